"""What a run tells while it goes on: lines for the job's log and for who asks FLARE for its statistics, numbers for FLARE's trackers.

Trackers (TensorBoard, MLflow, metrics artefacts) are fed at the server from the sites' replies, so that they are complete whatever became
of the sites' processes.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData, AnalyticsDataType
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.widgets.streaming import AnalyticsReceiver

from medflare.core.events import Event, EventLog

if TYPE_CHECKING:
    from medflare.flare.tasks import TaskExchange

GROUP: Final = "medflare"  # in FLARE's statistics of the job
NOTED: Final = "medflare: noted: "  # before an event in the job's log
_KEPT = 200  # lines: who asks every few seconds misses none


class Progress:
    """The lines of a run and its events, for the job's log and for FLARE's statistics (`medflare job watch`, `nvflare job stats`)."""

    def __init__(self, events: EventLog, log: Callable[[str], None] = lambda line: None):
        self.events, self.log = events, log
        self._seen = self._logged = 0
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._count = 0
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """Take a line."""
        self.log_events()
        self.log(line)
        with self._lock:
            self._take_events()
            self._add(line)

    def log_events(self) -> None:
        """Write the new events to the log: there finds them who begins to watch when the job is over, see `jobs.watching`."""
        with self._lock:
            new = list(self.events)[self._logged :]
            self._logged += len(new)
        for event in new:
            self.log(f"{NOTED}{event_line(event)}")

    def to_dict(self, exchange: "TaskExchange | None") -> dict[str, Any]:
        """As JSON has it: `count` of all lines so far, the last of them as `lines`, and what `TaskExchange.waiting` says."""
        with self._lock:
            self._take_events()
            told = {"count": self._count, "lines": list(self._lines)}
        return told if exchange is None else {**told, **exchange.waiting()}

    def _take_events(self) -> None:
        new = list(self.events)[self._seen :]
        self._seen += len(new)
        for event in new:
            self._add(event_line(event))

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._count += 1


def event_line(event: Event) -> str:
    """An event in one line.

    Examples:
        >>> event_line({"kind": "missing", "site": "B", "round": 3, "message": "no sign of life"})
        'missing: B (round 3): no sign of life'
    """
    where = " ".join(filter(None, [event["site"], "" if event["round"] is None else f"(round {event['round']})"]))
    return ": ".join(filter(None, [event["kind"], where, event["message"]]))


class Tracking:
    """Observes a run: one analytics record per curve and step, one line of metrics artefacts per step."""

    def __init__(self, component: FLComponent, fl_ctx: FLContext, rounds: int):
        self.component = component
        self.fl_ctx = fl_ctx
        self.rounds = rounds

    def __call__(self, step: Mapping[str, Any]) -> None:
        """Take a step."""
        meta, aggregation = step["sites"], step["aggregation"]
        numbers = {site: numbers_of(found) for site, found in meta.items()}
        curves = {site: {**numbers.get(site, {}), **aggregation_of(aggregation.get(site, {}))} for site in {*numbers, *aggregation}}
        for tag in sorted({tag for found in curves.values() for tag in found}):
            values = {site: found[tag] for site, found in sorted(curves.items()) if tag in found}
            dxo = create_analytic_dxo(tag=tag, value=values, data_type=AnalyticsDataType.SCALARS, global_step=step["round"])
            send_analytic_dxo(self.component, dxo, self.fl_ctx)
        weights = {site: float(found.get("n_samples", 1.0)) for site, found in meta.items()}
        self._fire_aggregation(step["phase"], step["round"], numbers, weights)

    def _fire_aggregation(self, phase: str, round: int, numbers: Mapping[str, Mapping[str, float]], weights: Mapping[str, float]) -> None:
        metrics = weighted_means(numbers, weights)
        if not metrics:
            return
        sites = [{"name": site, "metrics": dict(found), "weight": weights[site]} for site, found in numbers.items()]
        info = {"metric_source": phase, "metric_split": "validation", "sites": sites}
        model = FLModel(metrics=metrics, current_round=round, total_rounds=self.rounds, meta={AppConstants.METRICS_AGGREGATION_INFO: info})
        self.fl_ctx.set_prop(AppConstants.CURRENT_ROUND, round, private=True, sticky=True)
        self.component.fire_event_with_data(AppEventType.AFTER_AGGREGATION, self.fl_ctx, AppConstants.AGGREGATION_RESULT, model)


class MLflowTracker(AnalyticsReceiver):
    """FLARE's receiver for MLflow at the server, fed with a run's curves: an MLflow run for each site.

    FLARE's receiver takes what sites send, under the site's name. The curves of `Tracking` are fired at the server, one record for all
    sites; here each site's number goes into the site's run. Where mlflow is not installed, FLARE's log says so and the job goes on.
    """

    def __init__(self, tracking_uri: str = "", experiment: str = "medflare", run_name: str = "run"):
        super().__init__(events=[ANALYTIC_EVENT_TYPE])
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self._receiver: Any = None

    def initialize(self, fl_ctx: FLContext) -> None:
        """Open a run for every site that is there."""
        from nvflare.app_opt.tracking.mlflow.mlflow_receiver import MLflowReceiver

        about = {"experiment_name": self.experiment, "run_name": self.run_name, "experiment_tags": {}, "run_tags": {}}
        self._receiver = MLflowReceiver(tracking_uri=self.tracking_uri or None, kw_args=about)
        self._receiver.initialize(fl_ctx)

    def save(self, fl_ctx: FLContext, shareable: Shareable, record_origin: str) -> None:
        """Take a record of one curve of all sites."""
        record = AnalyticsData.from_dxo(from_shareable(shareable))
        if record is None or record.data_type != AnalyticsDataType.SCALARS:
            return
        if record.value.keys() - self._receiver.buffer.keys():  # a site that came late has no run yet
            for known in self._receiver.buffer:
                self._receiver.flush_buffers(known)
            self._receiver.initialize(fl_ctx)
        for site in sorted(record.value.keys() & self._receiver.buffer.keys()):
            dxo = create_analytic_dxo(record.tag, record.value[site], AnalyticsDataType.SCALAR, global_step=record.step)
            self._receiver.save(fl_ctx, dxo.to_shareable(), site)

    def finalize(self, fl_ctx: FLContext) -> None:
        """Send what is left and end the runs."""
        self._receiver.finalize(fl_ctx)


def numbers_of(meta: Mapping[str, Any]) -> dict[str, float]:
    """The curves in a reply's meta: loss and, by role, the validation metric; what is undefined is left out.

    Examples:
        >>> numbers_of({"loss": 0.5, "validation": {"global": 0.75, "personal": None}})
        {'loss': 0.5, 'validation_global': 0.75}
    """
    found = {"loss": meta.get("loss"), **{f"validation_{role}": value for role, value in (meta.get("validation") or {}).items()}}
    return _finite(found)


def aggregation_of(noted: Mapping[str, Any]) -> dict[str, float]:
    """The curves of what the server's aggregation made of a site: its weight, for example."""
    return _finite({f"aggregation_{name}": value for name, value in noted.items()})


def _finite(found: Mapping[str, Any]) -> dict[str, float]:
    return {tag: float(value) for tag, value in found.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def weighted_means(numbers: Mapping[str, Mapping[str, float]], weights: Mapping[str, float]) -> dict[str, float]:
    """Mean of every tag over the sites that have it, weighted by their samples.

    Examples:
        >>> weighted_means({"A": {"loss": 1.0}, "B": {"loss": 5.0, "other": 2.0}}, {"A": 3, "B": 1})
        {'loss': 2.0, 'other': 2.0}
    """
    means = {}
    for tag in sorted({tag for found in numbers.values() for tag in found}):
        sites = [site for site, found in numbers.items() if tag in found]
        total = sum(weights[site] for site in sites)
        means[tag] = sum(weights[site] * numbers[site][tag] for site in sites) / total
    return means

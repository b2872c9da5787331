"""The progress of a run: lines for the job's log and FLARE's job statistics, curves for FLARE's trackers (TensorBoard, MLflow).

The curves are fired at the server from the sites' replies.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData, AnalyticsDataType
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.widgets.streaming import AnalyticsReceiver

from medflare.core.events import Event, EventLog

GROUP: Final = "medflare"  # in FLARE's statistics of the job
NOTED: Final = "medflare: noted: "  # in the job's log, before an event
_LINES = 200  # that the statistics hold: who asks every few seconds misses none


class Progress:
    """The lines of a run and its events, for the job's log and FLARE's statistics (`medflare job watch`, `nvflare job stats`).

    Attributes:
        log: writes a line to the job's log.
    """

    def __init__(self, events: EventLog, log: Callable[[str], None] = lambda line: None):
        self.log = log
        self._events = events
        self._logged = 0  # events that are in the log
        self._taken = 0  # events that are among the lines
        self._lines: deque[str] = deque(maxlen=_LINES)
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
        """Write the new events to the log, where `jobs.watching` finds them after the end of the job."""
        with self._lock:
            new = list(self._events)[self._logged :]
            self._logged += len(new)
        for event in new:
            self.log(f"{NOTED}{event_line(event)}")

    def to_dict(self) -> dict[str, Any]:
        """`count` of all lines so far, and the last of them as `lines`."""
        with self._lock:
            self._take_events()
            return {"count": self._count, "lines": list(self._lines)}

    def _take_events(self) -> None:
        new = list(self._events)[self._taken :]
        self._taken += len(new)
        for event in new:
            self._add(event_line(event))

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._count += 1


def event_line(event: Event) -> str:
    """An event in one line.

    Examples:
        >>> event_line({"kind": "missing", "site": "B", "round": 3, "message": "no sign of life"})
        'missing: B (round 4): no sign of life'
    """
    where = " ".join(filter(None, [event["site"], "" if event["round"] is None else f"(round {event['round'] + 1})"]))
    return ": ".join(filter(None, [event["kind"], where, event["message"]]))


class Tracking:
    """Observer of a run: fires one analytics record for each curve and step, with the values of all sites."""

    def __init__(self, component: FLComponent, fl_ctx: FLContext):
        self._component, self._fl_ctx = component, fl_ctx

    def __call__(self, step: Mapping[str, Any]) -> None:
        """Take a step, as `StepReport.line` has it."""
        sites = {*step["sites"], *step["aggregation"]}
        curves = {site: site_curves(step["sites"].get(site, {}), step["aggregation"].get(site, {})) for site in sorted(sites)}
        for tag in sorted({tag for values in curves.values() for tag in values}):
            values = {site: curves[site][tag] for site in curves if tag in curves[site]}
            dxo = create_analytic_dxo(tag=tag, value=values, data_type=AnalyticsDataType.SCALARS, global_step=step["round"])
            send_analytic_dxo(self._component, dxo, self._fl_ctx)


def site_curves(meta: Mapping[str, Any], aggregation: Mapping[str, Any]) -> dict[str, float]:
    """A site's curves after a step: loss, validation metric by role, and what the aggregation noted; undefined values are left out.

    Examples:
        >>> site_curves({"loss": 0.5, "validation": {"global": 0.75, "personal": None}}, {"weight": 1})
        {'loss': 0.5, 'validation_global': 0.75, 'aggregation_weight': 1.0}
    """
    validation = {f"validation_{role}": value for role, value in (meta.get("validation") or {}).items()}
    values = {"loss": meta.get("loss"), **validation, **{f"aggregation_{name}": value for name, value in aggregation.items()}}
    return {tag: float(value) for tag, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)}


class MLflowTracker(AnalyticsReceiver):
    """FLARE's receiver for MLflow at the server, fed with a run's curves: an MLflow run for each site.

    FLARE's receiver takes what sites send, under the site's name. The records of `Tracking` hold all sites; here each site's value goes to
    the site's MLflow run. Without mlflow FLARE's log says that it is not installed, and the job goes on.
    """

    def __init__(self, tracking_uri: str = "", experiment: str = "medflare", run_name: str = "run"):
        super().__init__(events=[ANALYTIC_EVENT_TYPE])
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self._receiver: Any = None

    def initialize(self, fl_ctx: FLContext) -> None:
        """Open an MLflow run for each site that is present."""
        from nvflare.app_opt.tracking.mlflow.mlflow_receiver import MLflowReceiver

        names = {"experiment_name": self.experiment, "run_name": self.run_name, "experiment_tags": {}, "run_tags": {}}
        self._receiver = MLflowReceiver(tracking_uri=self.tracking_uri or None, kw_args=names)
        self._receiver.initialize(fl_ctx)

    def save(self, fl_ctx: FLContext, shareable: Shareable, record_origin: str) -> None:
        """Take a record of one curve of all sites."""
        record = AnalyticsData.from_dxo(from_shareable(shareable))
        if record is None or record.data_type != AnalyticsDataType.SCALARS:
            return
        if record.value.keys() - self._receiver.buffer.keys():  # a site that joined later has no MLflow run yet
            for site in self._receiver.buffer:
                self._receiver.flush_buffers(site)
            self._receiver.initialize(fl_ctx)
        for site in sorted(record.value.keys() & self._receiver.buffer.keys()):
            dxo = create_analytic_dxo(record.tag, record.value[site], AnalyticsDataType.SCALAR, global_step=record.step)
            self._receiver.save(fl_ctx, dxo.to_shareable(), site)

    def finalize(self, fl_ctx: FLContext) -> None:
        """Send what is left and end the MLflow runs."""
        self._receiver.finalize(fl_ctx)

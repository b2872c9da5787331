"""The server's part under FLARE, which builds the run that a job describes, and connects its
schedule to FLARE's tasks and events.

The imports at the top are light: in the simulator this process imports torch while FLARE starts the
sites.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.private.fed.simulator.simulator_server import SimulatorServerEngine
from nvflare.widgets.info_collector import InfoCollector

from medflare.core.errors import Aborted, ConfigError, MedflareError, StepFailed
from medflare.core.events import EventLog
from medflare.core.text import JsonDict
from medflare.core.threads import limit_spinning
from medflare.data.local import FOLDER
from medflare.federation.settings import RUN_SETTINGS, RunSettings, run_settings
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.flare_patches import (
    connect_sites_by_files,
    end_soon,
    keep_ports_apart,
    look_often,
    share_cleanup_thread,
    survive_resends,
)
from medflare.flare.job_policy import authorize, lead_of, settings_of, task_content
from medflare.flare.liveness import ALIVE, LONG_POLL, WORK
from medflare.flare.names import NO_TABLE, TASK_FILE
from medflare.flare.participants import checked_job_id
from medflare.flare.simulator import HostClient
from medflare.flare.tracking import GROUP, MLFLOW, MLflowTracker, Progress

if TYPE_CHECKING:
    from medflare.federation.run import Run
    from medflare.flare.task_exchange import TaskExchange

_LATE_EVENTS = 20  # of a site at most: how often it replies to closed steps is up to it


@dataclass(eq=False, repr=False)
class MedflareController(Controller):
    """Runs a federation (enrollment, the method's rounds, final models and evaluation) and writes
    the results to the job's folder.

    An argument that is not described here is a field of `federation.settings.RunSettings`. FLARE
    writes a job's arguments from the parameters of the class and the attributes of these names.

    Args:
        site_algorithm: method whose site algorithm the sites run, if it is not the aggregator's.
        track: "tensorboard", "wandb[=PROJECT]" or "none"; None: TensorBoard where it is installed.
            MLflow is a component, `MLflowTracker`.
        aggregator_id: id of the component that holds the server algorithm's aggregation, a
            `MethodAggregator`.
    """

    rounds: int
    seed: int
    outside: Sequence[str] = RunSettings.outside
    site_algorithm: str | None = None
    min_sites: int | None = RunSettings.min_sites
    sites_per_round: int | None = RunSettings.sites_per_round
    max_client_weight: float | None = RunSettings.max_client_weight
    outlier_policy: str = RunSettings.outlier_policy
    patience: int | None = RunSettings.patience
    adapt: str = RunSettings.adapt
    cross_site: bool = RunSettings.cross_site
    step_timeout: float = RunSettings.step_timeout
    enrol_timeout: float = RunSettings.enrol_timeout
    heartbeat_timeout: float = RunSettings.heartbeat_timeout
    resume: str = RunSettings.resume
    track: str | None = None
    aggregator_id: str = "aggregator"

    def __post_init__(self) -> None:
        super().__init__(task_check_period=0.1)
        self._events = EventLog()
        self._progress = Progress(self._events)
        self._exchange: TaskExchange | None = None
        self._stop_reason = ""
        self._late: Counter[str] = Counter()
        share_cleanup_thread()
        keep_ports_apart()
        connect_sites_by_files()
        look_often()

    def start_controller(self, fl_ctx: FLContext) -> None:
        """FLARE calls this before `control_flow`."""
        survive_resends(self.communicator)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Keep no site waiting for work any more, and cancel the open tasks."""
        if self._exchange is not None:
            self._exchange.close()
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listen to the sites when the job starts, report the progress and note a stop's reason."""
        if event_type == EventType.START_RUN:
            engine = fl_ctx.get_engine()
            for topic in (ALIVE, WORK):
                engine.register_aux_message_handler(topic, self._on_message)
            if isinstance(engine, SimulatorServerEngine):
                end_soon(engine.server)
                self._start_host(fl_ctx)
        elif event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            progress = self._progress.to_dict()
            if self._exchange is not None:
                progress |= self._exchange.waiting()
            collector.set_info(GROUP, progress)
        elif event_type == EventType.FATAL_SYSTEM_ERROR and not self._stop_reason:
            self._stop_reason = str(fl_ctx.get_prop(FLContextKey.EVENT_DATA, ""))

    def process_result_of_unknown_task(
        self,
        client: Client,
        task_name: str,
        client_task_id: str,
        result: Shareable,
        fl_ctx: FLContext,
    ) -> None:
        """Record an event for a reply that came after its step was closed; it is not used."""
        self._late[client.name] += 1
        if self._late[client.name] <= _LATE_EVENTS:
            self._events.add(
                "late",
                f"a reply to {task_name!r:.40} came after its step was closed and was not used",
                site=client.name,
            )

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the whole federation; a failure ends the job as failed, with its reason on one line
        and in results.json.
        """
        from medflare.evaluation.console import results_table
        from medflare.evaluation.results import FAILED
        from medflare.flare.messages import register_tensors
        from medflare.flare.task_exchange import TaskExchange

        register_tensors()
        self._progress.log = lambda line: self.log_info(fl_ctx, line)
        try:
            try:
                run = self._run(fl_ctx)
            except Exception as error:
                results = self._refused(error, fl_ctx)
            else:
                self._exchange = TaskExchange(
                    self,
                    fl_ctx,
                    abort_signal,
                    run.settings,
                    members=self._members,
                    stop_reason=lambda: self._stop_reason or "stopped on request",
                    say=self._progress.say,
                )
                results = run.execute(self._exchange, resume=bool(self.resume))
        except Aborted as error:
            self._progress.take_events()
            self.log_error(fl_ctx, f"medflare: FAILED: aborted: {error}")
            return
        except Exception as error:
            self.log_exception(fl_ctx, "medflare: the run ended by an error")
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, StepFailed):
                reason = str(error)
            self._fail(reason, fl_ctx)
            return
        self._progress.take_events()
        if results["status"] == FAILED:
            self._fail(results["reason"], fl_ctx)
            return
        if NO_TABLE not in os.environ:
            self.log_info(fl_ctx, "\n" + results_table(results))
        for folder in self._checkpoints(fl_ctx):  # those of a failed run stay: it may be resumed
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, fl_ctx: FLContext) -> "Run":
        """The run that the job describes.

        Raises:
            MedflareError: any part of it is wrong or not allowed here, or there is nothing to
                resume.
        """
        from medflare.federation.checkpoint import copy_checkpoint
        from medflare.federation.run import Run
        from medflare.methods.catalogue import get_method
        from medflare.tasks.config import load_task
        from medflare.training.opening import check_task_bounds

        aggregator = self._aggregator(fl_ctx)
        if not isinstance(aggregator, MethodAggregator):
            raise ConfigError(
                f"component {self.aggregator_id!r} of the job is no medflare aggregator; "
                "name one in config_fed_server.json"
            )
        site_algorithm = self.site_algorithm or aggregator.method_name
        task_file = self._task_file(fl_ctx)
        authorize((site_algorithm, aggregator.method_name), task_content(task_file), fl_ctx)
        task = load_task(task_file)
        settings = run_settings({name: getattr(self, name) for name in RUN_SETTINGS})
        local = settings_of(fl_ctx.get_workspace())
        check_task_bounds(task, local.bounds, "the server")
        checkpoints, *interrupted = self._checkpoints(fl_ctx)
        if interrupted:
            copy_checkpoint(interrupted[0], checkpoints)
        method = get_method(site_algorithm, server=aggregator.method_name)
        aggregator.hyper = method.effective(aggregator.hyper or {})  # with all defaults
        inside = [site for site in sorted(self._members()) if site not in settings.outside]
        weights = Path(local.weights).expanduser() if local.weights else None
        return Run(
            method=method,
            task=task,
            hyper=aggregator.hyper,
            settings=settings,
            sites=tuple(inside),
            aggregation=aggregator.aggregation,
            folder=self._results_folder(fl_ctx),
            weights=weights,
            checkpoints=checkpoints,
            engine="flare",
            say=self._progress.say,
            track=self._track(fl_ctx),
            lead=lead_of(fl_ctx),
            events=self._events,
        )

    def _refused(self, error: Exception, fl_ctx: FLContext) -> JsonDict:
        """Write and return the results of a job that cannot become a run, with the reason; any
        setting of the job may be wrong.
        """
        from medflare.evaluation.report import write_results
        from medflare.evaluation.results import UNKNOWN, RunRecord, SiteRecord
        from medflare.tasks.config import load_task

        reason = str(error)
        if not isinstance(error, MedflareError):
            reason = f"{type(error).__name__}: {error}"
        events = EventLog(self._events)
        events.add("failed", reason)
        try:
            task = load_task(self._task_file(fl_ctx))
        except Exception:  # which is the reason
            task = None
        outside = self.outside if isinstance(self.outside, (list, tuple)) else ()
        roles = {site: "outside" if site in outside else "inside" for site in self._members()}
        record = RunRecord(
            method=str(getattr(self._aggregator(fl_ctx), "method_name", "")) or UNKNOWN,
            task=task,
            seed=self.seed if isinstance(self.seed, int) else 0,
            rounds=max(0, self.rounds) if isinstance(self.rounds, int) else 0,
            sites={site: SiteRecord(role) for site, role in roles.items()},
            reason=reason,
            events=events.to_list(),
        )
        return write_results(self._results_folder(fl_ctx), record)

    def _fail(self, reason: str, fl_ctx: FLContext) -> None:
        self.log_error(fl_ctx, f"medflare: FAILED: {reason}")
        self.system_panic(reason, fl_ctx)

    def _aggregator(self, fl_ctx: FLContext) -> Any:
        return fl_ctx.get_engine().get_component(self.aggregator_id)

    def _track(self, fl_ctx: FLContext) -> str | None:
        """The run's `track`.

        Raises:
            ConfigError: it is MLflow without the component, which this server's class_allow_list
                may lack; or it names another MLflow than a real server's own, which would get the
                server's password.
        """
        engine = fl_ctx.get_engine()
        mlflow = engine.get_component(MLFLOW)
        if isinstance(mlflow, MLflowTracker):
            uri = mlflow.track.partition("=")[2]
            is_real = not isinstance(engine, SimulatorServerEngine)
            if is_real and uri not in ("", os.environ.get("MLFLOW_TRACKING_URI")):
                raise ConfigError(
                    f"track = {mlflow.track!r}: the server sends curves to the MLflow of its own "
                    "MLFLOW_TRACKING_URI alone; give track = 'mlflow'"
                )
            return mlflow.track
        if str(self.track).startswith(MLFLOW):
            raise ConfigError(
                f"track = {self.track!r} needs a component {MLFLOW!r} in config_fed_server.json; "
                "see medflare job --track"
            )
        return self.track

    def _members(self) -> list[str]:
        return [client.name for client in self._engine.get_clients()]

    def _task_file(self, fl_ctx: FLContext) -> Path:
        workspace = fl_ctx.get_workspace()
        return Path(workspace.get_app_config_dir(fl_ctx.get_job_id())) / TASK_FILE

    def _results_folder(self, fl_ctx: FLContext) -> Path:
        """The folder of the results, which FLARE packs with the job's folder for download."""
        return Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())) / FOLDER

    def _checkpoints(self, fl_ctx: FLContext) -> Iterator[Path]:
        """Folders of checkpoints, which FLARE does not pack: of this job and, if it resumes one, of
        the interrupted job.
        """
        folder = Path(fl_ctx.get_workspace().get_root_dir()) / FOLDER
        for job in (fl_ctx.get_job_id(), self.resume):
            if job:
                yield folder / checked_job_id(job)

    def _start_host(self, fl_ctx: FLContext) -> None:
        """In the simulator, start the host of the sites' workers; without it each site's process
        computes itself.
        """
        limit_spinning(os.environ)
        method = self.site_algorithm or str(getattr(self._aggregator(fl_ctx), "method_name", ""))
        try:
            HostClient(os.getpid()).start(method, str(self._task_file(fl_ctx)))
        except OSError as error:
            self.log_warning(
                fl_ctx, f"medflare: each site's process imports what it needs: {error}"
            )

    def _on_message(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Note that a site is alive; if it asks for work, wait until there is some before answering
        (long polling).
        """
        site = fl_ctx.get_peer_context().get_identity_name()
        if self._exchange is not None and site in self._exchange.members():
            if topic == WORK:
                self._exchange.wait_for_task(site, LONG_POLL)
            else:
                self._exchange.heard_from(site)
        return make_reply(ReturnCode.OK)

"""The server's part under FLARE: builds the run that a job describes, and connects its schedule to FLARE's tasks and events.

The imports at the top are light: in the simulator this process imports torch while FLARE starts the sites.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.private.fed.simulator.simulator_server import SimulatorServerEngine
from nvflare.widgets.info_collector import InfoCollector

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.core.events import EventLog
from medflare.data.local import FOLDER
from medflare.federation.settings import RUN_SETTINGS, run_settings
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.components import authorize, settings_of
from medflare.flare.flare_patches import keep_ports_apart, share_cleanup_thread, survive_resends
from medflare.flare.liveness import ALIVE, LONG_POLL, WORK
from medflare.flare.names import TASK_FILE
from medflare.flare.participants import interrupted_id
from medflare.flare.simulator import SimulatorHost, limit_spinning
from medflare.flare.tracking import GROUP, MLFLOW, MLflowTracker, Progress

if TYPE_CHECKING:
    from medflare.federation.run import Run
    from medflare.flare.tasks import TaskExchange

_LATE_EVENTS: Final = 20  # of a site at most: how often it replies to closed steps is up to the site


class MedflareController(Controller):
    """Runs a federation: enrollment, the method's rounds, final models and evaluation; writes the results to the job's folder.

    An argument that is not described here is a field of `federation.settings.RunSettings`.

    Args:
        site_algorithm: method whose site algorithm the sites run, if it is not the aggregator's.
        track: "tensorboard", "wandb[=PROJECT]" or "none"; None: TensorBoard where it is installed. MLflow is a component, `MLflowTracker`.
        aggregator_id: id of the component that holds the server algorithm's aggregation, a `MethodAggregator`.
    """

    def __init__(
        self,
        rounds: int,
        seed: int,
        outside: Sequence[str] = (),
        site_algorithm: str | None = None,
        min_sites: int | None = None,
        sites_per_round: int | None = None,
        max_client_weight: float | None = None,
        outlier_policy: str = "used",
        patience: int | None = None,
        cross_site: bool = False,
        step_timeout: float = 0.0,
        enrol_timeout: float = 3600.0,
        heartbeat_timeout: float = 120.0,
        resume: str = "",
        track: str | None = None,
        aggregator_id: str = "aggregator",
    ):
        super().__init__(task_check_period=0.1)
        self.rounds, self.seed, self.outside, self.resume = rounds, seed, outside, resume
        self.min_sites, self.sites_per_round, self.max_client_weight = min_sites, sites_per_round, max_client_weight
        self.outlier_policy, self.patience, self.cross_site = outlier_policy, patience, cross_site
        self.step_timeout, self.enrol_timeout, self.heartbeat_timeout = step_timeout, enrol_timeout, heartbeat_timeout
        self.site_algorithm, self.track, self.aggregator_id = site_algorithm, track, aggregator_id
        self._events = EventLog()
        self._progress = Progress(self._events)
        self._exchange: TaskExchange | None = None
        self._stop_reason = ""
        self._late: Counter[str] = Counter()
        share_cleanup_thread()
        keep_ports_apart()

    def start_controller(self, fl_ctx: FLContext) -> None:
        """FLARE calls this before `control_flow`."""
        survive_resends(self.communicator)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Keep no site waiting for work any more, and cancel the open tasks."""
        if self._exchange is not None:
            self._exchange.close()
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listen to the sites when the job starts; report the progress; remember why FLARE stops the job."""
        if event_type == EventType.START_RUN:
            engine = fl_ctx.get_engine()
            for topic in (ALIVE, WORK):
                engine.register_aux_message_handler(topic, self._on_message)
            if isinstance(engine, SimulatorServerEngine):
                self._start_host(fl_ctx)
        elif event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            collector.set_info(GROUP, {**self._progress.to_dict(), **(self._exchange.waiting() if self._exchange else {})})
        elif event_type == EventType.FATAL_SYSTEM_ERROR:
            self._stop_reason = self._stop_reason or str(fl_ctx.get_prop(FLContextKey.EVENT_DATA, ""))

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """A reply came after its step was closed: record an event; the reply is not used."""
        self._late[client.name] += 1
        if self._late[client.name] <= _LATE_EVENTS:
            message = f"an answer to {task_name!r:.40} came after its step was closed and was not used"
            self._events.add("late", message, site=client.name)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole federation. A failure ends the job as failed, with its reason on one line and in results.json."""
        from medflare.evaluation.console import results_table
        from medflare.evaluation.results import FAILED
        from medflare.flare.messages import register_tensors
        from medflare.flare.tasks import TaskExchange

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
            self._fail(f"{type(error).__name__}: {error}", fl_ctx)
            return
        self._progress.take_events()
        self.log_info(fl_ctx, "\n" + results_table(results))
        if results["status"] == FAILED:
            self._fail(results["reason"], fl_ctx)
            return
        for folder in self._checkpoints(fl_ctx):  # those of a failed run stay: it may be resumed
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, fl_ctx: FLContext) -> "Run":
        """The run that the job describes; MedflareError: any part of it is wrong or not allowed here, or there is nothing to resume."""
        from medflare.federation.checkpoint import take_up
        from medflare.federation.run import Run
        from medflare.methods.catalogue import get_method
        from medflare.networks.own import trust
        from medflare.tasks.config import load_task

        aggregator = self._aggregator(fl_ctx)
        if not isinstance(aggregator, MethodAggregator):
            raise ConfigError(f"component {self.aggregator_id!r} of the job is no medflare aggregator; name one in config_fed_server.json")
        site_algorithm = self.site_algorithm or aggregator.method_name
        task = load_task(self._task_file(fl_ctx))
        authorize((site_algorithm, aggregator.method_name), task.network, fl_ctx)
        settings = run_settings({name: getattr(self, name) for name in RUN_SETTINGS})
        local = settings_of(fl_ctx.get_engine().get_workspace())
        for package in local.packages:
            trust(package)
        checkpoints, *interrupted = self._checkpoints(fl_ctx)
        if interrupted:
            take_up(interrupted[0], checkpoints)
        method = get_method(site_algorithm, server=aggregator.method_name)
        aggregator.hyper = method.effective(aggregator.hyper or {})  # with all defaults
        return Run(
            method=method,
            task=task,
            hyper=aggregator.hyper,
            settings=settings,
            sites=tuple(site for site in sorted(self._members()) if site not in settings.outside),
            aggregation=aggregator.aggregation,
            folder=self._results_folder(fl_ctx),
            weights=Path(local.weights).expanduser() if local.weights else None,
            checkpoints=checkpoints,
            about={"engine": "flare"},
            say=self._progress.say,
            track=self._track(fl_ctx),
            events=self._events,
        )

    def _refused(self, error: Exception, fl_ctx: FLContext) -> dict[str, Any]:
        """Write and return results that say why the job cannot become a run, of which any setting may be wrong."""
        from medflare.evaluation.report import write_results
        from medflare.evaluation.results import UNKNOWN, RunRecord, SiteRecord
        from medflare.tasks.config import load_task

        reason = str(error) if isinstance(error, MedflareError) else f"{type(error).__name__}: {error}"
        events = EventLog(self._events)
        events.add("failed", reason)
        try:
            task = load_task(self._task_file(fl_ctx))
        except Exception:  # which is the reason
            task = None
        outside = self.outside if isinstance(self.outside, (list, tuple)) else ()
        record = RunRecord(
            method=str(getattr(self._aggregator(fl_ctx), "method_name", "")) or UNKNOWN,
            task=task,
            seed=self.seed if isinstance(self.seed, int) else 0,
            rounds=max(0, self.rounds) if isinstance(self.rounds, int) else 0,
            sites={site: SiteRecord("outside" if site in outside else "inside") for site in self._members()},
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
        """The run's `track`. MLflow is a component, which this server's class_allow_list may lack; ConfigError without it."""
        mlflow = fl_ctx.get_engine().get_component(MLFLOW)
        if isinstance(mlflow, MLflowTracker):
            return mlflow.track
        if str(self.track).startswith(MLFLOW):
            raise ConfigError(f"track = {self.track!r} needs a component {MLFLOW!r} in config_fed_server.json; see medflare job --track")
        return self.track

    def _members(self) -> list[str]:
        return [client.name for client in self._engine.get_clients()]

    def _task_file(self, fl_ctx: FLContext) -> Path:
        return Path(fl_ctx.get_engine().get_workspace().get_app_config_dir(fl_ctx.get_job_id())) / TASK_FILE

    def _results_folder(self, fl_ctx: FLContext) -> Path:
        """FLARE packs it with the job's folder for download."""
        return Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id())) / FOLDER

    def _checkpoints(self, fl_ctx: FLContext) -> Iterator[Path]:
        """Folders of checkpoints: of this job and, if it resumes one, of the interrupted job. FLARE does not pack them."""
        for job in filter(None, (fl_ctx.get_job_id(), self.resume)):
            yield Path(fl_ctx.get_engine().get_workspace().get_root_dir()) / FOLDER / interrupted_id(job)

    def _start_host(self, fl_ctx: FLContext) -> None:
        """In the simulator: start the host of the sites' workers; without a host each site's process computes itself."""
        limit_spinning(os.environ)
        try:
            SimulatorHost(os.getpid()).start(self.site_algorithm or str(getattr(self._aggregator(fl_ctx), "method_name", "")))
        except OSError as error:
            self.log_warning(fl_ctx, f"medflare: each site's process imports what it needs: {error}")

    def _on_message(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """A site is alive, or asks for work: then the answer waits until there is some (long polling)."""
        if self._exchange is not None:
            site = fl_ctx.get_peer_context().get_identity_name()
            if topic == WORK:
                self._exchange.wait_for_task(site, LONG_POLL)
            else:
                self._exchange.heard_from(site)
        return make_reply(ReturnCode.OK)

"""The server's part under FLARE: connects the schedule to FLARE's tasks, events and folders."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.core.events import EventLog
from medflare.data.sites.local import local_settings
from medflare.evaluation.console import results_table
from medflare.evaluation.results import FAILED, FOLDER
from medflare.federation.checkpoint import take_up
from medflare.federation.run import Run, refused_run
from medflare.federation.settings import RUN_SETTINGS, run_settings
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.exchange.desk import Desk
from medflare.flare.exchange.participants import LOCAL_FILE, TASK_FILE, authorize, authorize_network, interrupted, read_local, rebuild_hint
from medflare.flare.exchange.streams import share_cleanup_thread
from medflare.flare.exchange.tasks import TaskExchange
from medflare.flare.exchange.tracking import Tracking
from medflare.flare.exchange.wire import register_tensors
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task


@dataclass(frozen=True)
class JobPlace:
    """Where a job has its files at the server."""

    workspace: Workspace
    job: str

    def of(self, job: str) -> "JobPlace":
        """Another job's place."""
        return JobPlace(self.workspace, job)

    def task(self) -> TaskConfig:
        """The job's task.

        Raises:
            ConfigError: it is wrong.
        """
        return load_task(Path(self.workspace.get_app_config_dir(self.job)) / TASK_FILE)

    def weights(self) -> Path | None:
        """Where the server's own settings say that weights to start from lie; None where they say nothing.

        Raises:
            ConfigError: its local/medflare.json is wrong.
        """
        own = local_settings(read_local(Path(self.workspace.get_site_config_dir()) / LOCAL_FILE))
        return Path(own.weights).expanduser() if own.weights else None

    @property
    def results(self) -> Path:
        """Where the job's results go: into what FLARE packs up for download."""
        return Path(self.workspace.get_run_dir(self.job)) / FOLDER

    @property
    def checkpoints(self) -> Path:
        """Beside the job folders, which FLARE packs up for download when a job ends, however it ends."""
        return Path(self.workspace.get_root_dir()) / FOLDER / self.job


class MedflareController(Controller):
    """Runs a federation: enrol, the method's rounds, deliver and evaluate; leaves its results in the job's folder.

    What is not named here is a field of `federation.settings.RunSettings`.

    Args:
        site_half: method whose site half the sites run, where it is not the aggregator's.
        aggregator_id: the component that holds the server half's formula, a `MethodAggregator`.
    """

    def __init__(
        self,
        rounds: int,
        seed: int,
        outside: Sequence[str] = (),
        site_half: str | None = None,
        min_sites: int | None = None,
        sites_per_round: int | None = None,
        step_timeout: float = 0.0,
        silence: float = 120.0,
        resume: str = "",
        aggregator_id: str = "aggregator",
    ):
        super().__init__(task_check_period=0.1)
        self.rounds, self.seed, self.outside = rounds, seed, outside
        self.min_sites, self.sites_per_round = min_sites, sites_per_round
        self.step_timeout, self.silence, self.resume = step_timeout, silence, resume
        self.site_half, self.aggregator_id = site_half, aggregator_id
        register_tensors()
        share_cleanup_thread()
        self._desk = Desk()
        self._events = EventLog()
        self._stop_reason = ""

    # -- FLARE's hooks -----------------------------------------------------------------------------------------------------

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: sites may ask for work before this, so `handle_event` has made ready for them."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Let nobody wait for work any more, and take back the open tasks."""
        if self._desk.exchange is not None:
            self._desk.exchange.close()
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Open the desk when the run starts; remember why FLARE gives it up."""
        if event_type == EventType.START_RUN:
            self._desk.open(fl_ctx.get_engine())
        elif event_type == EventType.FATAL_SYSTEM_ERROR:
            self._stop_reason = self._stop_reason or str(fl_ctx.get_prop(FLContextKey.EVENT_DATA, ""))

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Note that an answer came after its step was closed; it is not used."""
        self._events.add("late", f"an answer to '{task_name}' came after its step was closed and was not used", site=client.name)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole federation. A failure ends the job as failed, with its reason on one line and in results.json."""
        try:
            run = self._run(fl_ctx)
        except Exception as error:
            self._refuse(error, fl_ctx)
            return
        exchange = self._desk.exchange = TaskExchange(
            self,
            fl_ctx,
            abort_signal,
            members=self._members,
            outside=run.outside,
            stop_reason=lambda: self._stop_reason or "stopped on request",
            step_timeout=self.step_timeout,
            silence=self.silence,
        )
        try:
            results = run.execute(exchange, resume=bool(self.resume))
        except Aborted as error:
            self.log_error(fl_ctx, f"medflare: FAILED: aborted: {error}")
            return
        self.log_info(fl_ctx, "\n" + results_table(results))
        if results["status"] == FAILED:
            self._fail(results["reason"], fl_ctx)
        else:
            shutil.rmtree(self._place(fl_ctx).checkpoints, ignore_errors=True)

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _run(self, fl_ctx: FLContext) -> Run:
        """The run that the job describes.

        Raises:
            MedflareError: the job's task, method, aggregator or settings are wrong, or there is nothing to take up.
        """
        settings = run_settings({name: getattr(self, name) for name in RUN_SETTINGS})
        place, aggregator = self._place(fl_ctx), self._aggregator()
        if self.resume:
            take_up(place.of(interrupted(self.resume)).checkpoints, place.checkpoints)
        halves = self.site_half or aggregator.method_name, aggregator.method_name
        task = place.task()
        authorize(halves, fl_ctx)
        authorize_network(task, fl_ctx)
        method = get_method(halves[0], server=halves[1])
        with rebuild_hint():  # the formula goes by the halves' own values, whichever way the job spells them
            aggregator.hyper = method.effective(aggregator.hyper or {})
        return Run(
            method=method,
            task=task,
            hyper=aggregator.hyper,
            settings=settings,
            sites=tuple(site for site in sorted(self._members()) if site not in settings.outside),
            aggregation=aggregator.aggregation,
            folder=place.results,
            weights=place.weights(),
            checkpoints=place.checkpoints,
            say=lambda line: self.log_info(fl_ctx, line),
            about={"engine": "flare"},
            observe=Tracking(self, fl_ctx, self.rounds),
            events=self._events,
        )

    def _aggregator(self) -> MethodAggregator:
        aggregator = self._engine.get_component(self.aggregator_id)
        if not isinstance(aggregator, MethodAggregator):
            raise ConfigError(f"component {self.aggregator_id!r} of the job is no medflare aggregator; name one in config_fed_server.json")
        return aggregator

    def _place(self, fl_ctx: FLContext) -> "JobPlace":
        return JobPlace(self._engine.get_workspace(), fl_ctx.get_job_id())

    def _members(self) -> list[str]:
        return [client.name for client in self._engine.get_clients()]

    def _refuse(self, error: Exception, fl_ctx: FLContext) -> None:
        """End a job that cannot even become a run; its results say why, and what is known of it."""
        reason = str(error) if isinstance(error, MedflareError) else f"{type(error).__name__}: {error}"
        place, known = self._place(fl_ctx), dict[str, Any](seed=self.seed, rounds=self.rounds)
        with suppress(Exception):  # what is wrong here is the reason already
            known["method"] = str(self._aggregator().method_name)
        with suppress(Exception):
            known["task"] = place.task()
        outside = self.outside if isinstance(self.outside, list | tuple) else ()
        roles = {site: "outside" if site in outside else "inside" for site in self._members()}
        results = refused_run(place.results, reason, roles, **known)
        self.log_info(fl_ctx, "\n" + results_table(results))
        self._fail(reason, fl_ctx)

    def _fail(self, reason: str, fl_ctx: FLContext) -> None:
        self.log_error(fl_ctx, f"medflare: FAILED: {reason}")
        self.system_panic(reason, fl_ctx)

"""The server's part under FLARE: connects the schedule to FLARE's tasks, events and folders."""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.core.events import EventLog
from medflare.evaluation.console import results_table
from medflare.evaluation.results import FAILED, FOLDER
from medflare.federation.run import Run, refused_run, take_up
from medflare.federation.schedule import Rules
from medflare.federation.settings import RunSettings
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.exchange.signs import ALIVE, PATIENCE, WORK
from medflare.flare.exchange.streams import share_cleanup_thread
from medflare.flare.exchange.tasks import TaskExchange
from medflare.flare.exchange.tracking import Tracking
from medflare.flare.exchange.wire import register_tensors
from medflare.flare.seat import TASK_FILE, interrupted
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task


@dataclass(kw_only=True, eq=False)
class MedflareController(RunSettings, Controller):
    """Runs a federation: enrol, the method's rounds, deliver and evaluate; leaves its results in the job's folder.

    Its arguments are those of `RunSettings` and:

    Attributes:
        aggregator_id: the component that owns the server half, a `MethodAggregator`.
    """

    aggregator_id: str = "aggregator"

    def __post_init__(self) -> None:
        super().__post_init__()
        Controller.__init__(self, task_check_period=0.1)
        register_tensors()
        share_cleanup_thread()
        self._exchange: TaskExchange | None = None
        self._events = EventLog()
        self._stop_reason = ""

    # -- FLARE's hooks -----------------------------------------------------------------------------------------------------

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: sites may ask for work before this, so `handle_event` has made ready for them."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            engine = fl_ctx.get_engine()
            engine.register_aux_message_handler(ALIVE, self._alive)
            engine.register_aux_message_handler(WORK, self._work)
        elif event_type == EventType.FATAL_SYSTEM_ERROR:
            self._stop_reason = self._stop_reason or str(fl_ctx.get_prop(FLContextKey.EVENT_DATA, ""))

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self._events.add("late", f"an answer to '{task_name}' came after its step was closed and was not used", site=client.name)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole federation. A failure ends the job as failed, with its reason on one line and in results.json."""
        try:
            run = self._run(fl_ctx)
        except Exception as error:
            self._refuse(error, fl_ctx)
            return
        self._exchange = TaskExchange(
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
            results = run.execute(self._exchange, resume=bool(self.resume))
        except Aborted as error:
            self.log_error(fl_ctx, f"medflare: FAILED: aborted: {error}")
            return
        self.log_info(fl_ctx, "\n" + results_table(results))
        if results["status"] == FAILED:
            self._fail(results["reason"], fl_ctx)
        else:
            shutil.rmtree(self._checkpoints(fl_ctx.get_job_id()), ignore_errors=True)

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _run(self, fl_ctx: FLContext) -> Run:
        """The run that the job describes.

        Raises:
            MedflareError: the job's task, method, aggregator or settings are wrong, or there is nothing to take up.
        """
        self.check()
        job = fl_ctx.get_job_id()
        aggregator = self._aggregator()
        if self.resume:
            take_up(self._checkpoints(interrupted(self.resume)), self._checkpoints(job))
        outside = tuple(self.outside)
        return Run(
            method=get_method(self.site_half or aggregator.method_name, server=aggregator.method_name),
            task=self._task(job),
            hyper=aggregator.hyper or {},
            rounds=self.rounds,
            seed=self.seed,
            sites=tuple(site for site in sorted(self._members()) if site not in outside),
            outside=outside,
            rules=Rules(min_sites=self.min_sites, sites_per_round=self.sites_per_round),
            folder=self._folder(job),
            checkpoints=self._checkpoints(job),
            say=lambda line: self.log_info(fl_ctx, line),
            observe=Tracking(self, fl_ctx, self.rounds),
            events=self._events,
        )

    def _aggregator(self) -> MethodAggregator:
        aggregator = self._engine.get_component(self.aggregator_id)
        if not isinstance(aggregator, MethodAggregator):
            raise ConfigError(f"component {self.aggregator_id!r} of the job is no medflare aggregator; name one in config_fed_server.json")
        return aggregator

    def _task(self, job: str) -> TaskConfig:
        workspace: Workspace = self._engine.get_workspace()
        return load_task(Path(workspace.get_app_config_dir(job)) / TASK_FILE)

    def _folder(self, job: str) -> Path:
        """Where a job's results go: into what FLARE packs up for download."""
        workspace: Workspace = self._engine.get_workspace()
        return Path(workspace.get_run_dir(job)) / FOLDER

    def _checkpoints(self, job: str) -> Path:
        """A job's checkpoints: beside the job folders, which FLARE packs up for download when a job ends, however it ends."""
        workspace: Workspace = self._engine.get_workspace()
        return Path(workspace.get_root_dir()) / FOLDER / job

    def _members(self) -> list[str]:
        return [client.name for client in self._engine.get_clients()]

    def _refuse(self, error: Exception, fl_ctx: FLContext) -> None:
        """End a job that cannot even become a run; its results say why, and what is known of it."""
        reason = str(error) if isinstance(error, MedflareError) else f"{type(error).__name__}: {error}"
        job, known = fl_ctx.get_job_id(), dict[str, Any](seed=self.seed, rounds=self.rounds)
        with suppress(Exception):  # what is wrong here is the reason already
            known["method"] = str(self._aggregator().method_name)
        with suppress(Exception):
            known["task"] = self._task(job)
        outside = self.outside if isinstance(self.outside, tuple) else ()
        roles = {site: "outside" if site in outside else "inside" for site in self._members()}
        results = refused_run(self._folder(job), reason, roles, **known)
        self.log_info(fl_ctx, "\n" + results_table(results))
        self._fail(reason, fl_ctx)

    def _fail(self, reason: str, fl_ctx: FLContext) -> None:
        self.log_error(fl_ctx, f"medflare: FAILED: {reason}")
        self.system_panic(reason, fl_ctx)

    def _alive(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        if self._exchange is not None:
            self._exchange.watch.sign_of_life(fl_ctx.get_peer_context().get_identity_name())
        return make_reply(ReturnCode.OK)

    def _work(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Holds a site's question for work until there is some: its poll then finds it."""
        reply = self._alive(topic, request, fl_ctx)
        if self._exchange is not None:
            self._exchange.wait_for_task(fl_ctx.get_peer_context().get_identity_name(), PATIENCE)
        return reply

"""The server's part under FLARE: connects the schedule to FLARE's tasks, events and folders.

Light to import, as `executors`: in the simulator torch is loaded while FLARE starts the sites.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.private.fed.simulator.simulator_server import SimulatorServerEngine
from nvflare.widgets.info_collector import InfoCollector

from medflare.core.errors import Aborted
from medflare.core.events import EventLog
from medflare.evaluation.names import FAILED
from medflare.federation.settings import RUN_SETTINGS
from medflare.flare.exchange.desk import Desk
from medflare.flare.exchange.progress import GROUP, Progress
from medflare.flare.exchange.streams import share_cleanup_thread
from medflare.flare.exchange.watch import Watch
from medflare.flare.simulator.ports import keep_ports_apart
from medflare.flare.simulator.relay import Relay
from medflare.flare.simulator.workers import Workers

if TYPE_CHECKING:
    from medflare.flare.exchange.serving import ServedJob


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
        max_share: float | None = None,
        suspects: str = "used",
        patience: int | None = None,
        wire: str = "fp32",
        step_timeout: float = 0.0,
        enrol_timeout: float = 3600.0,
        silence: float = 120.0,
        resume: str = "",
        aggregator_id: str = "aggregator",
    ):
        super().__init__(task_check_period=0.1)
        self.rounds, self.seed, self.outside = rounds, seed, outside
        self.min_sites, self.sites_per_round, self.max_share, self.suspects = min_sites, sites_per_round, max_share, suspects
        self.patience, self.wire, self.step_timeout, self.enrol_timeout = patience, wire, step_timeout, enrol_timeout
        self.silence, self.resume = silence, resume
        self.site_half, self.aggregator_id = site_half, aggregator_id
        share_cleanup_thread()
        keep_ports_apart()
        self._desk = Desk()
        self._events = EventLog()
        self._progress = Progress(self._events)
        self._stop_reason = ""
        self._workers: Workers | None = None

    # -- FLARE's hooks -----------------------------------------------------------------------------------------------------

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: sites may ask for work before this, so `handle_event` has made ready for them."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Let nobody wait for work any more, and take back the open tasks."""
        if self._desk.exchange is not None:
            self._desk.exchange.close()
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Open the desk when the run starts; say how far it is when somebody asks; remember why FLARE gives it up."""
        if event_type == EventType.START_RUN:
            self._desk.open(fl_ctx.get_engine())
            if isinstance(fl_ctx.get_engine(), SimulatorServerEngine):
                self._start_host(fl_ctx)
        elif event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            collector.set_info(GROUP, self._progress.to_dict(self._desk.exchange))
        elif event_type == EventType.FATAL_SYSTEM_ERROR:
            self._stop_reason = self._stop_reason or str(fl_ctx.get_prop(FLContextKey.EVENT_DATA, ""))

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Note that an answer came after its step was closed; it is not used."""
        self._events.add("late", f"an answer to '{task_name}' came after its step was closed and was not used", site=client.name)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole federation. A failure ends the job as failed, with its reason on one line and in results.json."""
        from medflare.flare.exchange.tasks import TaskExchange
        from medflare.flare.exchange.wire import register_tensors

        register_tensors()
        job = self._job(fl_ctx)
        try:
            run = job.run()
        except Exception as error:
            self._end(job, job.refused(error))
            return
        exchange = self._desk.exchange = TaskExchange(
            self,
            fl_ctx,
            abort_signal,
            members=self._members,
            outside=run.outside,
            stop_reason=lambda: self._stop_reason or "stopped on request",
            step_timeout=self.step_timeout,
            enrol_timeout=self.enrol_timeout,
            watch=Watch(self.silence, None if self._workers is None else self._workers.dead),
        )
        try:
            self._end(job, run.execute(exchange, resume=bool(self.resume)))
        except Aborted as error:
            self._log_events(fl_ctx)
            self.log_error(fl_ctx, f"medflare: FAILED: aborted: {error}")

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _job(self, fl_ctx: FLContext) -> "ServedJob":
        from medflare.flare.exchange.serving import ServedJob

        def say(line: str) -> None:
            self._log_events(fl_ctx)
            self.log_info(fl_ctx, line)
            self._progress.say(line)

        return ServedJob(
            controller=self,
            fl_ctx=fl_ctx,
            settings={name: getattr(self, name) for name in RUN_SETTINGS},
            site_half=self.site_half,
            aggregator_id=self.aggregator_id,
            members=self._members,
            say=say,
            events=self._events,
        )

    def _start_host(self, fl_ctx: FLContext) -> None:
        """In the simulator: have everything imported for all sites while FLARE starts them; without it they do it themselves."""
        self._workers = Workers()
        aggregator = fl_ctx.get_engine().get_component(self.aggregator_id)
        try:
            Relay(os.getpid()).start(self.site_half or str(getattr(aggregator, "method_name", "")))
        except OSError as error:
            self.log_warning(fl_ctx, f"medflare: every site's process imports what it needs: {error}")

    def _members(self) -> list[str]:
        return [client.name for client in self._engine.get_clients()]

    def _log_events(self, fl_ctx: FLContext) -> None:
        """Events go to the log as they come: there finds them who begins to watch when the job is over, see `jobs.watching`."""
        for line in self._progress.unlogged():
            self.log_info(fl_ctx, line)

    def _end(self, job: "ServedJob", results: Mapping[str, Any]) -> None:
        """Show the table; a failed run fails the job, a completed one needs its checkpoints no more."""
        from medflare.evaluation.console import results_table

        self._log_events(job.fl_ctx)
        self.log_info(job.fl_ctx, "\n" + results_table(results))
        if results["status"] == FAILED:
            self.log_error(job.fl_ctx, f"medflare: FAILED: {results['reason']}")
            self.system_panic(results["reason"], job.fl_ctx)
        else:
            shutil.rmtree(job.place.checkpoints, ignore_errors=True)

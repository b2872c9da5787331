"""The server's part under FLARE: connects the schedule to FLARE's tasks, events and folders.

Light to import, as `executors`: in the simulator the run is computed elsewhere (`simulator.ServerProxy`).
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

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
from medflare.core.events import Event, EventLog
from medflare.federation.settings import RUN_SETTINGS
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.flare_patches import end_without_torch, keep_ports_apart, share_cleanup_thread, survive_resends
from medflare.flare.liveness import Liveness
from medflare.flare.server_run import Ending, ServerSpec, allowed, executed, formula
from medflare.flare.simulator import Relay, ServerProxy, Workers
from medflare.flare.tasks import Listener, TaskExchange
from medflare.flare.tracking import GROUP, Progress, Tracking

_LATE: Final = 20  # a site's answers to closed steps that become events


class MedflareController(Controller):
    """Runs a federation: enrol, the method's rounds, deliver and evaluate; leaves its results in the job's folder.

    What is not named here is a field of `federation.settings.RunSettings`.

    Args:
        site_algorithm: method whose site algorithm the sites run, where it is not the aggregator's.
        aggregator_id: the component that holds the server algorithm's formula, a `MethodAggregator`.
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
        transport_dtype: str = "fp32",
        step_timeout: float = 0.0,
        enrol_timeout: float = 3600.0,
        heartbeat_timeout: float = 120.0,
        resume: str = "",
        aggregator_id: str = "aggregator",
    ):
        super().__init__(task_check_period=0.1)
        self.rounds, self.seed, self.outside = rounds, seed, outside
        self.min_sites, self.sites_per_round, self.max_client_weight, self.outlier_policy = (
            min_sites,
            sites_per_round,
            max_client_weight,
            outlier_policy,
        )
        self.patience, self.transport_dtype, self.step_timeout, self.enrol_timeout = patience, transport_dtype, step_timeout, enrol_timeout
        self.heartbeat_timeout, self.resume = heartbeat_timeout, resume
        self.site_algorithm, self.aggregator_id = site_algorithm, aggregator_id
        share_cleanup_thread()
        keep_ports_apart()
        self._listener = Listener()
        self._events = EventLog()
        self._progress = Progress(self._events)
        self._stop_reason = ""
        self._workers: Workers | None = None
        self._relay: Relay | None = None
        self._late: Counter[str] = Counter()
        self._note: Callable[[Event], None] = lambda event: self._events.extend([event])

    # -- FLARE's hooks -----------------------------------------------------------------------------------------------------

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Ready to send tasks; sites may ask for some before this, so `handle_event` has made ready for them."""
        survive_resends(self.communicator)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Let nobody wait for work any more, and take back the open tasks."""
        if self._listener.exchange is not None:
            self._listener.exchange.close()
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listen to the sites when the run starts; say how far it is when somebody asks; remember why FLARE gives up."""
        if event_type == EventType.START_RUN:
            self._listener.open(fl_ctx.get_engine())
            if isinstance(fl_ctx.get_engine(), SimulatorServerEngine):
                self._start_host(fl_ctx)
        elif event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            collector.set_info(GROUP, self._progress.to_dict(self._listener.exchange))
        elif event_type == EventType.FATAL_SYSTEM_ERROR:
            self._stop_reason = self._stop_reason or str(fl_ctx.get_prop(FLContextKey.EVENT_DATA, ""))

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Note that an answer came after its step was closed; it is not used."""
        self._late[client.name] += 1
        if self._late[client.name] <= _LATE:  # the name is the site's own word, and so is how often it sends one
            late = f"an answer to {task_name!r:.40} came after its step was closed and was not used"
            self._note({"kind": "late", "message": late, "site": client.name})

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole federation. A failure ends the job as failed, with its reason on one line and in results.json."""
        self._progress.log = lambda line: self.log_info(fl_ctx, line)
        tasks = self._listener.exchange = TaskExchange(
            self,
            fl_ctx,
            abort_signal,
            members=self._members,
            stop_reason=lambda: self._stop_reason or "stopped on request",
            say=self._progress.say,
            step_timeout=self.step_timeout,
            enrol_timeout=self.enrol_timeout,
            liveness=Liveness(self.heartbeat_timeout, None if self._workers is None else self._workers.dead),
        )
        settings = {name: getattr(self, name) for name in RUN_SETTINGS}
        spec = ServerSpec.of(fl_ctx, self._aggregator(fl_ctx), self.site_algorithm, settings, self._members())
        try:
            ending = self._ended(spec, tasks, fl_ctx)
        except Aborted as error:
            self._progress.log_events()
            self.log_error(fl_ctx, f"medflare: FAILED: aborted: {error}")
            return
        self._progress.log_events()
        self.log_info(fl_ctx, "\n" + ending.table)
        if ending.reason:
            self.log_error(fl_ctx, f"medflare: FAILED: {ending.reason}")
            self.system_panic(ending.reason, fl_ctx)
        else:
            spec.forget()  # a failed run may be taken up

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _ended(self, spec: ServerSpec, tasks: TaskExchange, fl_ctx: FLContext) -> Ending:
        """What becomes of the job, here or in a fork of the simulator's host."""
        observe = Tracking(self, fl_ctx, self.rounds)
        try:
            aggregator = formula(self._aggregator(fl_ctx), self.aggregator_id)
            spec = allowed(spec, fl_ctx)
            if self._relay is not None and type(aggregator).__module__ == MethodAggregator.__module__:  # another is known here alone
                end_without_torch(self.communicator)
                proxy = ServerProxy(tasks, self._progress, observe)
                self._note = proxy.note
                return proxy.serve(self._relay, spec)
            watching: dict[str, Any] = {"say": self._progress.say, "events": self._events}
            run = spec.run(aggregator, observe=lambda report: observe(report.line()), **watching)
        except Aborted:
            raise
        except Exception as error:
            return spec.refused(error, self._events)
        return executed(run, tasks)

    def _aggregator(self, fl_ctx: FLContext) -> Any:
        return fl_ctx.get_engine().get_component(self.aggregator_id)

    def _start_host(self, fl_ctx: FLContext) -> None:
        """In the simulator: have everything imported for all sites while FLARE starts them; without it they do it themselves."""
        self._workers, relay = Workers(), Relay(os.getpid())
        try:
            relay.start(self.site_algorithm or str(getattr(self._aggregator(fl_ctx), "method_name", "")))
        except OSError as error:
            self.log_warning(fl_ctx, f"medflare: every process imports what it needs: {error}")
        else:
            self._relay = relay

    def _members(self) -> list[str]:
        return [client.name for client in self._engine.get_clients()]

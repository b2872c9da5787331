"""A site's part as FLARE executors: a class for each paper's method, so that a job names what it runs.

The imports at the top are light. In FLARE's simulator they are all there is: the participants live elsewhere (`simulator`).
In a site's own process torch, MONAI and the method are loaded by a thread while FLARE still connects.
"""

import os
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.utils.memory_utils import try_malloc_trim

from medflare.core.errors import Aborted, MedflareError
from medflare.data.local import LOCAL_FILE, private_folder
from medflare.flare.flare_patches import share_cleanup_thread
from medflare.flare.liveness import Heartbeat, wait_for_work
from medflare.flare.messages import ERRORS, UNABLE, error_reply, outward, to_message, to_shareable, turn_into_arrays
from medflare.flare.names import by_name, named_classes
from medflare.flare.participants import (
    DATA_ROOT,
    SITE_TASK,
    TASK_FILE,
    ParticipantSpec,
    SiteTask,
    anchor,
    authorized,
    left_behind,
    load_ahead,
    refuse_result_filters,
)
from medflare.flare.simulator import Relay

if TYPE_CHECKING:
    from medflare.federation.participant import Participant


class MedflareExecutor(Executor):
    """Answers every task of the federation for one site.

    Args:
        seed: of the run.
        hyper: the method's hyper-parameters under the algorithm that owns them, the same as at the server.
        method: name of the method whose site algorithm runs; the named subclasses have one by default.
        server_algorithm: method that the server algorithm comes from, where it is another one.
        resume: id of the interrupted job that this one takes up.
    """

    default_method: ClassVar[str] = ""

    def __init__(self, seed: int, hyper: dict[str, Any] | None = None, method: str = "", server_algorithm: str = "", resume: str = ""):
        super().__init__()
        self.method = method
        self.seed = seed
        self.hyper = hyper
        self.server_algorithm = server_algorithm
        self.resume = resume
        self._known: ParticipantSpec | None = None
        self._authorized: ParticipantSpec | None = None
        self._participant: Participant | None = None
        self._abort_signal = Signal()
        share_cleanup_thread()
        self._relay = Relay(os.getppid())
        self._heartbeat = Heartbeat()
        self._preload = threading.Thread(target=load_ahead, args=(self.method_name,), name="medflare_preload", daemon=True)
        if _serves_a_site() and not self._relay.there():
            self._preload.start()  # while FLARE still connects the site
        anchor(DATA_ROOT)

    @property
    def method_name(self) -> str:
        """The method whose site algorithm runs."""
        return self.method or self.default_method

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Import everything before the first task; wait for work before every poll; send heartbeats until the answer has been sent."""
        if event_type == EventType.ABOUT_TO_START_RUN and self._preload.ident is not None:
            self._preload.join()
        elif event_type == EventType.BEFORE_PULL_TASK:
            self._heartbeat.end()
            wait_for_work(fl_ctx)
            self._heartbeat.begin(fl_ctx)
        elif event_type == EventType.AFTER_SEND_TASK_RESULT:
            self._heartbeat.end()
            try_malloc_trim()
        elif event_type == EventType.END_RUN:
            self._heartbeat.end()
        elif event_type == EventType.AFTER_TASK_RESULT_FILTER and "torch" in sys.modules:
            turn_into_arrays(fl_ctx.get_prop(FLContextKey.TASK_RESULT))

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """The answer to one task; whatever goes wrong becomes a one-line reply, without the name of an image or patient."""
        self._abort_signal = abort_signal
        round = shareable.get_header(AppConstants.CURRENT_ROUND, 0)
        try:
            fl_ctx.set_prop(SITE_TASK, SiteTask(task_name, round, shareable, self._spec(fl_ctx)), private=True, sticky=False)
            return self._reply(task_name, round, shareable, fl_ctx)
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception as error:
            self._keep(fl_ctx)
            told = self._relay.there() and isinstance(error, MedflareError)  # the simulator's sites lie on one machine
            reason = str(error) if told else outward(error, task_name, round)
        self.log_error(fl_ctx, f"{UNABLE}{reason}")
        return error_reply(reason)

    def _reply(self, phase: str, round: int, incoming: Shareable, fl_ctx: FLContext) -> Shareable:
        if self._authorized is None:
            refuse_result_filters(fl_ctx)
            self._authorized = authorized(self._spec(fl_ctx), fl_ctx)
        if self._relay.there():
            return self._relay.answer(self._authorized, phase, round, incoming, self._aborted)
        if self._participant is None:
            self._participant = self._authorized.participant(self._aborted)
        return to_shareable(self._participant.answer(phase, round, to_message(incoming)))

    def _keep(self, fl_ctx: FLContext) -> None:
        """The error at hand for the site alone; FLARE's own log may leave it."""
        from medflare.core.store import make_folder, own_opener

        with suppress(OSError, MedflareError):
            folder = Path(self._spec(fl_ctx).folder)
            make_folder(folder)
            with open(folder / ERRORS, "a", encoding="utf-8", opener=own_opener) as file:
                file.write(traceback.format_exc())

    def _aborted(self) -> bool:
        return bool(self._abort_signal.triggered)

    def _spec(self, fl_ctx: FLContext) -> ParticipantSpec:
        """Made once: nothing of it changes during a job."""
        if self._known is not None:
            return self._known
        workspace: Workspace = fl_ctx.get_engine().get_workspace()
        job = fl_ctx.get_job_id()
        self._known = ParticipantSpec(
            name=fl_ctx.get_identity_name(),
            method=self.method_name,
            server_algorithm=self.server_algorithm,
            seed=self.seed,
            task_file=str(Path(workspace.get_app_config_dir(job)) / TASK_FILE),
            local_file=str(Path(workspace.get_site_config_dir()) / LOCAL_FILE),
            folder=str(private_folder(Path(workspace.get_run_dir(job)))),
            hyper=self.hyper or {},
            resumed=left_behind(workspace, self.resume),
        )
        return self._known


def _serves_a_site() -> bool:
    """Whether FLARE started this process; others make executors only to write them into a job."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("nvflare.private.")


EXECUTORS = named_classes(MedflareExecutor, "executor", __name__)  # method -> executor


def __getattr__(name: str) -> Any:
    """The named executors, as a job spells them."""
    return by_name(__name__, EXECUTORS, name)

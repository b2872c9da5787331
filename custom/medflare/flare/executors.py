"""A site's part as FLARE executors: a class for each paper's method, so that a job names what it runs.

FLARE may run every task of a site in a new process, so the imports at the top are light; torch, MONAI and the method are
loaded by a thread while FLARE still connects (`Preload`), and the site half lives in the job's folder between two tasks.
"""

import os
import threading
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

from medflare.core.errors import Aborted, MedflareError
from medflare.flare.exchange.participants import (
    FOLDER,
    LOCAL_FILE,
    SITE_TASK,
    TASK_FILE,
    ParticipantSpec,
    SiteTask,
    anchor,
    authorized,
    interrupted,
    load_ahead,
)
from medflare.flare.exchange.signs import Pulse, expect_answers, wait_for_work
from medflare.flare.names import by_name, named_classes
from medflare.flare.simulator.host import WarmHost

if TYPE_CHECKING:
    from medflare.core.message import Message
    from medflare.federation.participant import Participant

_DATA_ROOT = "MEDFLARE_DATA_ROOT"


class MedflareExecutor(Executor):
    """Answers every task of the federation for one site.

    Args:
        seed: of the run.
        hyper: the method's hyper-parameters under the half that owns them, the same as at the server.
        method: name of the method whose site half runs; the named subclasses have one by default.
        server_half: method that the server half comes from, where it is another one.
        resume: id of the interrupted job that this one takes up.
    """

    default_method: ClassVar[str] = ""

    def __init__(self, seed: int, hyper: dict[str, Any] | None = None, method: str = "", server_half: str = "", resume: str = ""):
        super().__init__()
        self.method = method
        self.seed = seed
        self.hyper = hyper
        self.server_half = server_half
        self.resume = resume
        self._participant: Participant | None = None
        self._abort_signal = Signal()
        self._host = WarmHost(os.getppid())
        self._preload = Preload(self.method_name, self._host)
        anchor(_DATA_ROOT)

    @property
    def method_name(self) -> str:
        """The method whose site half runs."""
        return self.method or self.default_method

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Before the first task have everything imported; before every poll wait until there is work."""
        if event_type == EventType.ABOUT_TO_START_RUN:  # the first task comes after this, and needs torch on the wire
            self._preload.finish()
        elif event_type == EventType.BEFORE_PULL_TASK:
            wait_for_work(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """The answer to one task; whatever goes wrong becomes a reply that says so on one line.

        Args:
            task_name: the phase.
            shareable: the server's message.
            fl_ctx: of the job; names the site.
            abort_signal: looked at before every batch.
        """
        from medflare.flare.exchange.wire import error_reply, to_message, to_shareable

        self._abort_signal = abort_signal
        round = shareable.get_header(AppConstants.CURRENT_ROUND, 0)
        try:
            incoming = to_message(shareable)
            fl_ctx.set_prop(SITE_TASK, SiteTask(task_name, round, incoming, self._spec(fl_ctx)), private=True, sticky=False)
            with Pulse(fl_ctx):
                answer = self._answer(task_name, round, incoming, fl_ctx)
            expect_answers(fl_ctx, answer.nbytes)
            return to_shareable(answer)
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except MedflareError as error:
            reason = str(error)
        except Exception as error:
            self.log_exception(fl_ctx, f"'{task_name}' of round {round} failed")
            reason = f"{type(error).__name__} in '{task_name}' of round {round}: {error}; the site's log has the traceback"
        self.log_error(fl_ctx, f"medflare: {reason}")
        return error_reply(reason)

    def _answer(self, phase: str, round: int, incoming: "Message", fl_ctx: FLContext) -> "Message":
        if self._participant is None:
            spec = authorized(self._spec(fl_ctx), fl_ctx)
            if fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False) and spec.served_before():
                if self._host.running():
                    return self._host.answer(spec, phase, round, incoming, self._aborted)
                self._host.start(spec.method)
            self._participant = spec.participant(self._aborted)
        return self._participant.answer(phase, round, incoming)

    def _aborted(self) -> bool:
        return bool(self._abort_signal.triggered)

    def _spec(self, fl_ctx: FLContext) -> ParticipantSpec:
        workspace: Workspace = fl_ctx.get_engine().get_workspace()
        job = fl_ctx.get_job_id()
        return ParticipantSpec(
            name=fl_ctx.get_identity_name(),
            method=self.method_name,
            server_half=self.server_half,
            seed=self.seed,
            task_file=str(Path(workspace.get_app_config_dir(job)) / TASK_FILE),
            local_file=str(Path(workspace.get_site_config_dir()) / LOCAL_FILE),
            folder=str(Path(workspace.get_run_dir(job)) / FOLDER),
            hyper=self.hyper or {},
            resumed=str(Path(workspace.get_run_dir(interrupted(self.resume))) / FOLDER) if self.resume else "",
        )


class Preload:
    """Imports what the first task needs, in a thread, while FLARE connects the site; little where a warm host does the work."""

    def __init__(self, method: str, host: WarmHost):
        self._method = method
        self._host = host
        self._thread = threading.Thread(target=self._load, name="medflare_preload", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        from medflare.flare.exchange.streams import share_cleanup_thread
        from medflare.flare.exchange.wire import register_tensors

        share_cleanup_thread()
        register_tensors()
        if not self._host.running():
            load_ahead(self._method)

    def finish(self) -> None:
        """Returns when everything is imported."""
        self._thread.join()


EXECUTORS = named_classes(MedflareExecutor, "executor", __name__)  # method -> executor


def __getattr__(name: str) -> Any:
    """The named executors, as a job spells them."""
    return by_name(__name__, EXECUTORS, name)

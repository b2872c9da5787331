"""A site's part as FLARE executors: a class for the method of each paper, so that a job shows what
it runs.

The imports at the top are light. In FLARE's simulator they are all there is: the participants are
in other processes (`simulator`). In a site's own process a thread imports torch, MONAI and the
method while FLARE still connects.
"""

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.utils.memory_utils import try_malloc_trim

from medflare.core.errors import ERRORS, Aborted, MedflareError
from medflare.core.files import appending, write_json
from medflare.core.text import JsonDict, read_json
from medflare.data.local import LOCAL_FILE, PROGRESS, find_private_folder, private_folder
from medflare.flare.flare_patches import share_cleanup_thread
from medflare.flare.job_policy import authorize, refuse_result_filters, task_content
from medflare.flare.liveness import Heartbeat, wait_for_work
from medflare.flare.messages import (
    UNABLE,
    error_reply,
    outward,
    register_tensors,
    to_message,
    to_shareable,
)
from medflare.flare.names import TASK_FILE
from medflare.flare.participants import (
    RESULT_CONTEXT,
    ParticipantSpec,
    ResultContext,
    anchor_data_root,
    checked_job_id,
    load_ahead,
)
from medflare.flare.simulator import HostClient

if TYPE_CHECKING:
    from medflare.federation.participant import Participant


@dataclass(eq=False, repr=False)
class MedflareExecutor(Executor):
    """Replies to each task of the federation for one site.

    Args:
        seed: of the run.
        hyper: the method's hyper-parameters by the algorithm that owns them, the same as at the
            server.
        method: name of the method whose site algorithm runs; the subclasses below have one by
            default.
        server_algorithm: method of the server algorithm, if it is another one.
        resume: id of the interrupted job that this job resumes.
    """

    default_method = ""

    seed: int
    hyper: JsonDict | None = None
    method: str = ""
    server_algorithm: str = ""
    resume: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._spec: ParticipantSpec | None = None
        self._trusted: Sequence[str] | None = None  # `ParticipantSpec.trusted`, once authorized
        self._participant: Participant | None = None
        self._abort_signal = Signal()
        self._heartbeat = Heartbeat()
        self._host = HostClient(os.getppid())
        self._preload = threading.Thread(
            target=load_ahead, args=(self.method_name,), name="medflare_preload", daemon=True
        )
        share_cleanup_thread()
        anchor_data_root()
        if _started_by_flare() and not self._host.started():
            self._preload.start()

    @property
    def method_name(self) -> str:
        """The method whose site algorithm runs."""
        return self.method or self.default_method

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Import what the method needs, wait for work, send heartbeats, note the end.

        The import ends before the first task, the wait before each poll, and the heartbeats when
        the reply has been sent.
        """
        if event_type == EventType.ABOUT_TO_START_RUN and self._preload.ident is not None:
            self._preload.join()
        elif event_type == EventType.BEFORE_PULL_TASK:
            self._heartbeat.end()
            wait_for_work(fl_ctx)
            self._heartbeat.begin(fl_ctx)
        elif event_type == EventType.AFTER_TASK_RESULT_FILTER and "torch" in sys.modules:
            register_tensors()  # a filter may have put some into the result
        elif event_type == EventType.AFTER_SEND_TASK_RESULT:
            self._heartbeat.end()
            try_malloc_trim()
        elif event_type == EventType.END_RUN:
            self._heartbeat.end()
            self._note_end()

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """The reply to one task; any error becomes a reply of one line, without the name of an
        image or a patient.
        """
        self._abort_signal = abort_signal
        round = shareable.get_header(AppConstants.CURRENT_ROUND, 0)
        try:
            task = ResultContext(task_name, round, self._spec_of(fl_ctx))
            fl_ctx.set_prop(RESULT_CONTEXT, task, private=True, sticky=False)
            return self._reply(task_name, round, shareable, fl_ctx)
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except (Exception, SystemExit) as error:  # code that calls sys.exit is a bug, too
            self._store_traceback()
            on_one_machine = self._host.started() and isinstance(error, MedflareError)
            reason = str(error) if on_one_machine else outward(error, task_name, round)
        self.log_error(fl_ctx, f"{UNABLE}{reason}")
        return error_reply(reason)

    def _reply(self, phase: str, round: int, incoming: Shareable, fl_ctx: FLContext) -> Shareable:
        spec = self._spec_of(fl_ctx)
        if self._trusted is None:  # before anything of another distribution is imported
            refuse_result_filters(fl_ctx)
            methods = (spec.method, spec.server_algorithm or spec.method)
            self._trusted = authorize(methods, task_content(spec.task_file), fl_ctx)
        spec = replace(spec, trusted=self._trusted)
        if self._host.started():
            return self._host.reply(spec, phase, round, incoming, self._aborted)
        if self._participant is None:
            self._participant = spec.participant(self._aborted)
        return to_shareable(self._participant.reply(phase, round, to_message(incoming)))

    def _spec_of(self, fl_ctx: FLContext) -> ParticipantSpec:
        if self._spec is not None:
            return self._spec
        workspace = fl_ctx.get_workspace()
        job = fl_ctx.get_job_id()
        resumed = None
        if self.resume:
            interrupted = Path(workspace.get_run_dir(checked_job_id(self.resume)))
            resumed = find_private_folder(interrupted)
        self._spec = ParticipantSpec(
            name=fl_ctx.get_identity_name(),
            method=self.method_name,
            server_algorithm=self.server_algorithm,
            seed=self.seed,
            task_file=Path(workspace.get_app_config_dir(job)) / TASK_FILE,
            local_file=Path(workspace.get_site_config_dir()) / LOCAL_FILE,
            folder=private_folder(Path(workspace.get_run_dir(job))),
            hyper=self.hyper or {},
            resumed=resumed,
        )
        return self._spec

    def _store_traceback(self) -> None:
        """Append the current error to a file of the site; FLARE's own log may leave the site."""
        with suppress(OSError):
            if self._spec is not None:
                with appending(self._spec.folder / ERRORS) as file:
                    file.write(traceback.format_exc().encode(errors="replace"))

    def _note_end(self) -> None:
        """Note the end of the job for `medflare site status`; not in the simulator, whose host has
        the participant.
        """
        if self._spec is None or self._participant is None:
            return

        status = self._spec.folder / PROGRESS
        with suppress(OSError, ValueError):
            write_json(status, read_json(status) | {"ended": f"{datetime.now():%F %T}"})

    def _aborted(self) -> bool:
        return self._abort_signal.triggered


def _started_by_flare() -> bool:
    """Whether FLARE started this process; other processes make executors only to write them into a
    job.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("nvflare.private.")


class FedAvgExecutor(MedflareExecutor):
    default_method = "fedavg"


class FedSMExecutor(MedflareExecutor):
    default_method = "fedsm"


class PRRExecutor(MedflareExecutor):
    default_method = "prr"


class GraceExecutor(MedflareExecutor):
    default_method = "grace"


class IOPExecutor(MedflareExecutor):
    default_method = "iop_fl"


class FedDAGExecutor(MedflareExecutor):
    default_method = "feddag"


EXECUTORS = {  # method -> executor
    executor.default_method: executor for executor in MedflareExecutor.__subclasses__()
}

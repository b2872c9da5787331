"""A site's part as FLARE executors: one class per method, so that a job names what it runs.

FLARE may run every task of a site in a new process, so the imports at the top are light; torch, MONAI and the method are
loaded by a thread while FLARE still connects (`Preload`), and the site half lives in the job's folder between two tasks.
"""

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.app_constant import AppConstants

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.flare.pulse import Pulse

if TYPE_CHECKING:
    from medflare.core.message import Message
    from medflare.methods.participant import Participant
    from medflare.tasks.site import Site

LOCAL_FILE = "medflare.json"  # in the site's local/ folder: data_root, device, cache
TASK_FILE = "task.json"  # in the job's config folder
FOLDER = "medflare"  # below the job's folder at the site: state and delivered models
KEPT = ("personal", "deployed")  # roles of delivered models that a site keeps


class MedflareExecutor(Executor):
    """Answers every task of the federation for one site.

    Args:
        method: name of the method whose site half runs; the subclasses name it themselves.
        seed: of the run.
        hyper: the method's hyper-parameters, the same as at the server.
        server_half: method that the server half comes from, where it is another one.
    """

    default_method: ClassVar[str] = ""

    def __init__(self, method: str = "", seed: int = 0, hyper: dict[str, Any] | None = None, server_half: str = ""):
        super().__init__()
        self.method = method
        self.seed = seed
        self.hyper = hyper
        self.server_half = server_half
        self._participant: Participant | None = None
        self._abort_signal = Signal()
        self._preload = Preload(self.method_name)

    @property
    def method_name(self) -> str:
        return self.method or self.default_method

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.ABOUT_TO_START_RUN:  # the first task comes after this, and needs torch on the wire
            self._preload.finish()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        from medflare.flare.wire import error_reply, to_message, to_shareable

        self._abort_signal = abort_signal
        round = shareable.get_header(AppConstants.CURRENT_ROUND, 0)
        site = fl_ctx.get_identity_name()
        try:
            with Pulse(fl_ctx):
                if self._participant is None:
                    self._participant = self._join(fl_ctx)
                return to_shareable(self._participant.answer(task_name, round, to_message(shareable)))
        except Aborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except MedflareError as error:
            reason = str(error)
        except Exception as error:
            self.log_exception(fl_ctx, f"'{task_name}' of round {round} failed")
            reason = f"{type(error).__name__} in '{task_name}' of round {round}: {error}; the site's log has the traceback"
        self.log_error(fl_ctx, f"medflare: site {site}: {reason}")
        return error_reply(reason)

    def _join(self, fl_ctx: FLContext) -> "Participant":
        """The participant of this site; its data are read when the first task needs them."""
        from medflare.core.store import StateStore, write_atomically
        from medflare.inference.deployed import save_model
        from medflare.methods.participant import Participant
        from medflare.methods.registry import get_method
        from medflare.tasks.config import load_task
        from medflare.tasks.site import open_site

        workspace: Workspace = fl_ctx.get_engine().get_workspace()
        job, name = fl_ctx.get_job_id(), fl_ctx.get_identity_name()
        folder = Path(workspace.get_run_dir(job)) / FOLDER
        task = load_task(Path(workspace.get_app_config_dir(job)) / TASK_FILE)
        method = get_method(self.method_name, server=self.server_half or None)
        local = read_local(Path(workspace.get_site_config_dir()) / LOCAL_FILE)

        def opened(role: str) -> "Site":
            site = open_site(name, task, seed=self.seed, role=role, local=local, cache=folder / "cache")
            site.abort = lambda: bool(self._abort_signal.triggered)
            return site

        def keep(role: str, model: "Message", metrics: Any) -> None:
            if role in KEPT:
                card = {"method": method.name, "site": name, "role": role, "seed": self.seed, "metrics": dict(metrics)}
                save_model(folder / role, task, model, card)

        def show(title: str, png: bytes) -> None:
            write_atomically(folder / "pictures" / f"{title}.png", png)

        method.check(self.hyper or {})
        return Participant(name, opened, method, self.hyper or {}, store=StateStore(folder / "state"), keep=keep, show=show)


class Preload:
    """Imports what the first task needs, in a thread, while FLARE connects the site."""

    def __init__(self, method: str):
        self._method = method
        self._thread = threading.Thread(target=self._load, name="medflare_preload", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        from medflare.flare.streams import share_cleanup_thread
        from medflare.flare.wire import register_tensors
        from medflare.methods.registry import METHODS

        share_cleanup_thread()
        register_tensors()
        if self._method in METHODS:  # an unknown one is reported by the first task
            _ = METHODS[self._method].site_class

    def finish(self) -> None:
        self._thread.join()


def read_local(path: Path) -> dict[str, Any]:
    """The site's own settings; none where the file does not exist.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); correct it or delete it") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold a JSON object with data_root, device or cache; correct it or delete it")
    return settings


class FedAvgExecutor(MedflareExecutor):
    """FedAvg's site half: trains the global model."""

    default_method = "fedavg"


class FedSMExecutor(MedflareExecutor):
    """FedSM's site half: trains a global model, a personal model and the selector."""

    default_method = "fedsm"


class PRRExecutor(MedflareExecutor):
    """PRR-Imbalance's site half: recovers, exchanges and sublimates a deputy and a personal model."""

    default_method = "prr"


class GraceExecutor(MedflareExecutor):
    """GRACE's site half: meta-train and meta-update with feature alignment."""

    default_method = "grace"


class IOPExecutor(MedflareExecutor):
    """IOP-FL's site half: trains the local adapted model."""

    default_method = "iop_fl"


class FedDAGExecutor(MedflareExecutor):
    """FedDAG's site half: generator, student and mean teacher."""

    default_method = "feddag"

"""A site's participant under FLARE: what a process needs to know to act for the site, and how it becomes the participant.

The imports at the top are light, see `executors`.
"""

import gc
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.workspace import Workspace

from medflare.core.errors import ConfigError, MedflareError
from medflare.core.packages import untrusted
from medflare.data.local import CACHE, LOCAL_FILE, find_private_folder, local_settings, read_local

if TYPE_CHECKING:
    from medflare.federation.participant import Participant
    from medflare.tasks.config import TaskConfig
    from medflare.training.site import Site

TASK_FILE = "task.json"  # in the job's config folder
LEDGER = "privacy"  # folder beside it: what the site's jobs have given away of its patients' privacy
SITE_TASK = "medflare.site_task"  # in FLARE's context while a task and the filters of its result run
DATA_ROOT = "MEDFLARE_DATA_ROOT"  # as `data.loading` reads it
DEVICES = "CUDA_VISIBLE_DEVICES"  # the simulator gives each site's process its own
_MEMBER = "state"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParticipantSpec:
    """JSON-serialisable, so that another process can take it over.

    Attributes:
        name: the site's name.
        method: whose site algorithm runs; `server_algorithm` names the other algorithm's method where it is another one.
        task_file: the job's task.json.
        local_file: the site's own settings; may not exist.
        folder: the site's own folder for the job, see `data.local.private_folder`.
        resumed: the site's folder in the interrupted job that this one takes up; "" where it takes up none.
        trusted: module of the task's network, where that is one of its own and the site allows it; see `authorized`.
    """

    name: str
    method: str
    server_algorithm: str
    seed: int
    task_file: str
    local_file: str
    folder: str
    hyper: Mapping[str, Any] = field(default_factory=dict)
    resumed: str = ""
    trusted: str = ""

    @property
    def algorithms(self) -> tuple[str, str]:
        """Names of the methods that site algorithm and server algorithm come from."""
        return self.method, self.server_algorithm or self.method

    @property
    def state_folder(self) -> Path:
        """Where the site's memory lies between two tasks."""
        return Path(self.folder) / _MEMBER

    def participant(self, aborted: Callable[[], bool]) -> "Participant":
        """The site's participant; its data are read when the first task needs them.

        Raises:
            ConfigError: the task, the method or the site's own settings are wrong.
        """
        from medflare.core.store import StateStore
        from medflare.federation.final_models import SiteFolder
        from medflare.federation.participant import Participant
        from medflare.methods.catalogue import get_method
        from medflare.networks.own import trust
        from medflare.privacy.ledger import budget_of
        from medflare.tasks.config import load_task
        from medflare.training.opening import open_site

        folder = Path(self.folder)
        if self.resumed:
            self._take_up(Path(self.resumed) / _MEMBER)
        task, local = load_task(Path(self.task_file)), local_settings(read_local(Path(self.local_file)))
        for module in filter(None, (*local.packages, self.trusted)):
            trust(module)
        method = get_method(self.method, server=self.server_algorithm or None)
        method.check(self.hyper, task)

        def opened(role: str) -> "Site":
            site = open_site(self.name, task, seed=self.seed, role=role, local=local, cache=Path(self.local_file).parents[1] / CACHE)
            site.abort = stopped
            for note in site.notes:
                _log.info("%s: %s", self.name, note)
            return site

        def stopped() -> bool:
            participant.working.refuse()
            return aborted()

        own, store = SiteFolder(folder, self.name, method, task, self.seed), StateStore(self.state_folder)
        budget = budget_of(local.privacy, self.name, Path(self.local_file).with_name(LEDGER))
        rules: dict[str, Any] = {"budget": budget, "minimum_patients": local.minimum_patients, "chosen": local.keep}
        rules |= {"minutes": local.bounds.minutes, "hours": local.bounds.hours}
        participant = Participant(self.name, opened, method, self.hyper, store=store, artifacts=own, **rules)
        return participant

    def _take_up(self, interrupted: Path) -> None:
        """Copy what the site remembers of the interrupted job, once and in one piece; that job's own folder stays as it is."""
        if interrupted.exists() and not self.state_folder.exists():
            partial = self.state_folder.with_name(f".{_MEMBER}")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(interrupted, partial)
            partial.rename(self.state_folder)


@dataclass(frozen=True)
class SiteTask:
    """What a site is working on, for the filters that its result passes."""

    phase: str
    round: int
    incoming: Shareable
    spec: ParticipantSpec


def refuse_result_filters(fl_ctx: FLContext) -> None:
    """ConfigError where the job names task-result filters for this site: FLARE would run them after the site's own.

    Raises:
        ConfigError: it does; the error names their classes.
    """
    tables = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "task_result_filters", None) or {}
    classes = sorted({f"{type(each).__module__}.{type(each).__name__}" for chain in tables.values() for each in chain})
    if classes:
        raise ConfigError(
            f"site {fl_ctx.get_identity_name()} takes no job with task_result_filters of its own ({', '.join(classes)}): they would run "
            "after the site's filters; leave them out, or have the site name them in its local/privacy.json"
        )


def authorized(spec: ParticipantSpec, fl_ctx: FLContext) -> ParticipantSpec:
    """The same with what this party allows, before anything of another distribution is imported.

    Raises:
        ConfigError: the method, or the task's network, is code that this party does not allow.
    """
    from medflare.tasks.config import load_task

    authorize(spec.algorithms, fl_ctx)
    return replace(spec, trusted=authorize_network(load_task(Path(spec.task_file)), fl_ctx))


def authorize_network(task: "TaskConfig", fl_ctx: FLContext) -> str:
    """Ask this party's settings for a network of one's own, and trust its module in this process.

    Returns:
        The network's module; empty where it is none of one's own.

    Raises:
        ConfigError: this party does not trust its package.
    """
    from medflare.networks.own import own_module, trust

    module = own_module(task.network)
    if module:
        _ask(f"network {task.network['name']!r}", module, fl_ctx)
        trust(module)
    return module


def authorize(methods: Iterable[str], fl_ctx: FLContext) -> None:
    """Before a method of another distribution is imported: the party's settings must name its package.

    Raises:
        ConfigError: no such method, or this party does not trust its package.
    """
    for name in dict.fromkeys(methods):
        module = foreign_module(name)
        if module:
            _ask(f"method {name!r}", module, fl_ctx)


def _ask(what: str, module: str, fl_ctx: FLContext) -> None:
    """ConfigError where this party does not trust the package of a piece of code."""
    workspace: Workspace = fl_ctx.get_engine().get_workspace()
    trusted = local_settings(read_local(Path(workspace.get_site_config_dir()) / LOCAL_FILE)).packages
    if reason := untrusted(module, [*trusted, module] if brings_code(fl_ctx) else trusted):
        raise ConfigError(f"{what} comes from {module}, which {fl_ctx.get_identity_name()} does not allow; {reason}")


def brings_code(fl_ctx: FLContext) -> bool:
    """Whether FLARE has found code in the job (app/custom/); the party's authorization.json has then allowed it."""
    meta = fl_ctx.get_prop(FLContextKey.JOB_META)
    return isinstance(meta, Mapping) and bool(meta.get(AppValidationKey.BYOC))


def foreign_module(method: str) -> str:
    """The module of a method that another distribution brings, which is not imported; empty for one of medflare's own.

    Raises:
        ConfigError: no such method.
    """
    from medflare.methods.catalogue import module_of

    module = module_of(method)
    return "" if module.split(".")[0] == "medflare" else module


def load_ahead(method: str) -> None:
    """Import what a site needs of a method; an unknown one is reported by the first task.

    Of another distribution's method only what it stands on: the party has not been asked yet, see `authorize`.

    What was imported is not searched for circles of references any more. A fork that searches torch and MONAI copies more than 100 MB
    of memory, which it shares otherwise, and a process that ends takes a second.
    """
    from medflare.federation.participant import import_ahead
    from medflare.methods.catalogue import get_method

    import_ahead()
    with suppress(MedflareError):
        _ = get_method("fedavg" if foreign_module(method) else method).site_class
    gc.freeze()


def interrupted(job: str) -> str:
    """The id of a job to take up, as a folder's name.

    Raises:
        ConfigError: it is no such name, but a way to somewhere else.
    """
    if not re.fullmatch(r"[\w-]+", job):
        raise ConfigError(f"resume = {job!r} is no job id; give the id that FLARE listed the interrupted job under")
    return job


def left_behind(workspace: Workspace, job: str) -> str:
    """The site's folder in the interrupted job that it takes up; "" where none is taken up.

    Raises:
        ConfigError: it is no job id.
    """
    return str(find_private_folder(Path(workspace.get_run_dir(interrupted(job))))) if job else ""


def anchor(variable: str) -> None:
    """Make a relative path in an environment variable absolute: FLARE changes the working directory, the shell's PWD stays."""
    value, started_in = os.environ.get(variable), os.environ.get("PWD")
    if value and started_in and not Path(value).expanduser().is_absolute():
        os.environ[variable] = str(Path(started_in) / value)

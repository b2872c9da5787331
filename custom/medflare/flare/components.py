"""What a job without code may have FLARE build at a party: the classes that the party's resources.json lists by their full names.

FLARE itself takes an entry of `class_allow_list` for a prefix, and calls whatever callable a job names below it. `JobComponents`, which
a party's resources.json names as its "app_validator", asks for more before anything is called: the full name, and an `FLComponent`.
It looks twice: when a job arrives, so that the lead learns the reason and nothing is started, and in the job's process before each
component is built. What it refuses and what it lets FLARE build stands in the party's audit.log.

A job that brings its own code (app/custom/) is FLARE's `byoc`: a party that allows it to the lead has trusted that code with everything.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from nvflare.apis.app_validation import AppValidator
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, JobConstants, SiteType, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.audit import Auditor
from nvflare.fuel.utils.class_loader import load_class
from nvflare.fuel.utils.config_factory import ConfigFactory

from medflare.core.errors import one_line
from medflare.core.packages import untrusted
from medflare.data.local import LOCAL_FILE, local_settings, read_local
from medflare.flare.names import BUILT, COMPONENTS, REFUSED
from medflare.flare.participants import TASK_FILE, brings_code

_PATHS: Final = ("path", "class_path", "name")  # FLARE's keys for what a component is, the first that is there counts
_PLAIN: Final = re.compile(r"[\w.:]{1,200}", re.ASCII)


class JobComponents(FLComponent, AppValidator):
    """Refuses jobs that name what the party does not list, and FLARE's building of it."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Called by FLARE when a job arrives, before it is unpacked for good.

        Returns:
            Why the job is refused, or "", and nothing more that FLARE should know of it.
        """
        folder = Path(app_folder).resolve()
        if (folder / WorkspaceConstants.CUSTOM_FOLDER_NAME).exists():  # FLARE asks its own policy: byoc
            return "", {}
        name, job = folder.name.removeprefix(WorkspaceConstants.APP_PREFIX), folder.parent.name
        workspace = Workspace(str(folder.parents[1]), name)
        try:
            reason = _refusal_of_job(Path(workspace.get_app_config_dir(job)), workspace, name)
        except Exception as error:  # what cannot be read is not run
            reason = f"component configuration refused: {type(error).__name__}: {one_line(error)!a}"
        if reason:
            note(workspace, name, job, REFUSED, reason)
        return reason, {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Before FLARE builds a component of a job: refuse it, or write down that it is built.

        Raises:
            UnsafeComponentError: it is refused; FLARE then ends the job.
        """
        if event_type != EventType.BEFORE_BUILD_COMPONENT:
            return
        try:
            self._decide(fl_ctx)
        except UnsafeComponentError:
            raise
        except Exception as error:  # FLARE would go on after any other
            raise UnsafeComponentError(f"component configuration refused: {type(error).__name__}: {one_line(error)}") from error

    def _decide(self, fl_ctx: FLContext) -> None:
        config = fl_ctx.get_prop(FLContextKey.COMPONENT_CONFIG)
        workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        path, job = path_of(config), str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID))
        reason = "" if brings_code(fl_ctx) else refusal(path, listed(workspace))
        note(workspace, workspace.site_name, job, REFUSED if reason else BUILT, reason or f"component {_shown(path)}")
        if reason:
            raise UnsafeComponentError(reason)


class UnfinishedJobs(FLComponent):
    """Closes jobs that an earlier life of the server left unfinished, as FINISHED:ABANDONED, when the server starts.

    FLARE would call them running for ever. A component of the server itself: one line in its local/resources.json.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """The server comes up: none of the jobs that are marked as running has a process."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            fl_ctx.get_engine().job_runner.update_unfinished_jobs(fl_ctx)


def unlisted(path: Any, allowed: Collection[str]) -> str:
    """Why a job that names a component is refused, one line; "" where it is listed. Nothing is imported."""
    return "" if path in allowed else f"component {_shown(path)} refused: class_allow_list in local/resources.json does not name it"


def refusal(path: Any, allowed: Collection[str]) -> str:
    """Why a component may not be built, one line; "" where it may. Nothing is imported that is not listed."""
    if reason := unlisted(path, allowed):
        return reason
    found = load_class(path)
    if not (isinstance(found, type) and issubclass(found, FLComponent)):
        return f"component {_shown(path)} refused: it is no class derived from FLARE's FLComponent"
    return ""


def component_paths(config: Any, inside: bool = False) -> Iterator[Any]:
    """What a job's configuration names for FLARE to build: components, workflows, executors and filters, and those in their arguments."""
    if isinstance(config, Mapping):
        if any(key in config for key in _PATHS if inside or key != "name"):
            yield path_of(config)
        for name, part in config.items():
            yield from component_paths(part, inside=name in ("components", "workflows", "executor", "filters"))
    elif isinstance(config, list):
        for part in config:
            yield from component_paths(part, inside)


def path_of(config: Mapping[str, Any]) -> Any:
    """What FLARE would build of a component's configuration: it takes the first of path, class_path and name."""
    return next((config[key] for key in _PATHS if key in config), None)


def listed(workspace: Workspace) -> list[str]:
    """The party's own list of classes; none where it has no list."""
    content = json.loads(Path(workspace.get_resources_file_path()).read_text(encoding="utf-8"))
    allowed = content.get("class_allow_list")
    return [name for name in allowed if isinstance(name, str)] if isinstance(allowed, list) else []


def note(workspace: Workspace, name: str, job: str, action: str, text: str) -> None:
    """Write a line into the party's audit.log, which lies outside the jobs' folders; in a job's container into the job's own."""
    in_container = Path(workspace.get_run_dir(job)).is_mount()
    auditor = Auditor(workspace.get_audit_file_path(job if in_container else None))
    auditor.add_event(user=name, action=action, ref=job, msg=text)
    auditor.close()


def _refusal_of_job(folder: Path, workspace: Workspace, name: str) -> str:
    """Why a job's configuration is refused; "" where it is not."""
    file = JobConstants.SERVER_JOB_CONFIG if name == SiteType.SERVER else JobConstants.CLIENT_JOB_CONFIG
    config = ConfigFactory.load_config(file, [str(folder)])
    if config is None:
        return f"component configuration refused: {file} is missing"
    allowed = listed(workspace)
    ours = {path for names in COMPONENTS.values() for path in names}  # components for sure: a party need not import torch to know
    reasons = ((unlisted if str(path) in ours else refusal)(path, allowed) for path in component_paths(config.to_dict()))
    return next(filter(None, reasons), "") or _refusal_of_network(folder / TASK_FILE, workspace)


def _refusal_of_network(task: Path, workspace: Workspace) -> str:
    """Why the network that a job's task names is refused, where it is one of another package; see `networks.own`."""
    content = json.loads(task.read_text(encoding="utf-8")) if task.is_file() else None
    network = content.get("network") if isinstance(content, Mapping) else None
    name = network.get("name") if isinstance(network, Mapping) else None
    module, mark, _ = str(name).partition(":")
    if not mark:
        return ""
    own = local_settings(read_local(Path(workspace.get_site_config_dir()) / LOCAL_FILE))
    reason = untrusted(module, own.packages)
    return reason and f"network {_shown(name)} refused: {reason}"


def _shown(name: Any) -> str:
    """A name that a job chose, for logs and screens."""
    return name if isinstance(name, str) and _PLAIN.fullmatch(name) else ascii(name)[:200]

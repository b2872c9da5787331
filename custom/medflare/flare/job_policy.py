"""Security: what a job may name at a party, and what it may not.

Configuration is JSON. FLARE also parses HOCON and YAML, which include other files of the party;
here it does not (`flare_patches.parse_json_only`). FLARE searches all of a party's folder, the
files of jobs too, for its own settings; here it does not (`flare_patches.search_kits_only`), and a
job with other files than its own is refused.

A job without code may have FLARE build the classes that the party's resources.json lists. FLARE
takes an entry of `class_allow_list` for a prefix and calls any callable below it. `JobComponents`,
the "app_validator" of resources.json, demands the full name and a class derived from `FLComponent`,
before anything is called. It checks a job when it arrives, so that the lead learns the reason, and
again before each component is built. What it refuses and what is built is recorded in the party's
audit.log.

What a job names of another distribution (method, network, loss, ...) needs its package in
`packages` of local/medflare.json (`authorize`).

A job that brings code (app/custom/) is FLARE's `byoc`: a party that allows it trusts that code with
everything.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidationKey, AppValidator
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, JobConstants, SiteType, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.audit import Auditor
from nvflare.fuel.utils.class_loader import load_class
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE

from medflare.core.errors import ConfigError
from medflare.core.extensions import extension_module, trust
from medflare.core.packages import trust_refusal
from medflare.core.text import Json, JsonDict, read_json
from medflare.data.local import LOCAL_FILE, LocalSettings, in_container, local_settings, read_local
from medflare.flare.flare_patches import parse_json_only, search_kits_only
from medflare.flare.names import BUILT, REFUSED, TASK_FILE
from medflare.flare.other_parties import protect_from_other_parties
from medflare.flare.other_parties.limits import LARGEST_CONFIG

# FLARE's keys for a component's class; FLARE takes the first one that is there.
_PATH_KEYS = ("path", "class_path", "name")
_PLAIN = re.compile(r"[A-Za-z_][\w.:]{0,199}", re.ASCII)  # a name that a refusal may repeat
# Settings of a task, and arguments of components -> group of `core.extensions`.
_GROUPS = {
    "network": "networks",
    "loss": "losses",
    "optimizer": "optimizers",
    "intensity": "transforms",
    "augment": "transforms",
    "metric": "metrics",
    "metrics": "metrics",
}
_ARGUMENTS = {"rule": "rules", "adapt": "adaptations"}
# FLARE replaces "{$NAME}" by an environment variable of the party.
_NO_BRACES = "a name or text has braces, which FLARE replaces; write the values themselves"
# The files of a job beside its code. FLARE searches whole folders for further ones, such as
# comm_config.json, which names Python files to run.
_JOB_FILES = (JobConstants.CLIENT_JOB_CONFIG, JobConstants.SERVER_JOB_CONFIG, TASK_FILE)
SIGNATURES = (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)


class JobComponents(FLComponent, AppValidator):
    """Refuses jobs that name what the party does not list, and keeps FLARE from building it.

    FLARE makes it in the process of the party and in that of each job, before either reads a job's
    configuration.
    """

    def __init__(self) -> None:
        super().__init__()
        parse_json_only()
        search_kits_only()
        protect_from_other_parties()

    def validate(self, app_folder: str) -> tuple[str, JsonDict]:
        """FLARE calls this when a job arrives.

        Returns:
            Why the job is refused, or ""; and nothing else for FLARE.
        """
        folder = Path(app_folder).resolve()
        name = folder.name.removeprefix(WorkspaceConstants.APP_PREFIX)
        job = folder.parent.name.partition(".")[0]  # see `authorize_before_deployment`
        workspace = Workspace(str(folder.parents[1]), name)
        try:
            reason = _job_refusal(folder, workspace, name)
        except Exception as error:  # a job that cannot be read does not run
            reason = _unreadable(error)
        if reason:
            _audit(workspace, name, job, REFUSED, reason)
        return reason, {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Before FLARE builds a component of a job, refuse it, or record that it is built.

        Raises:
            UnsafeComponentError: it is refused; FLARE then ends the job.
        """
        if event_type != EventType.BEFORE_BUILD_COMPONENT:
            return
        try:
            workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
            path = _path_of(fl_ctx.get_prop(FLContextKey.COMPONENT_CONFIG))
            job = str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID))
            reason = ""
            if not brings_code(fl_ctx):
                reason = _refusal(path, _allow_list(workspace))
            if reason:
                _audit(workspace, workspace.site_name, job, REFUSED, reason)
            else:
                _audit(workspace, workspace.site_name, job, BUILT, f"component {path}")
        except Exception as error:  # FLARE would ignore any other exception
            raise UnsafeComponentError(_unreadable(error)) from error
        if reason:
            raise UnsafeComponentError(reason)


def authorize(methods: Iterable[str], task: Json, fl_ctx: FLContext) -> tuple[str, ...]:
    """Require that the party's local settings name the packages of a job's methods and task.

    It is called before the task is validated and anything of another distribution is imported. This
    process trusts the party's `packages` from now on.

    Args:
        methods: names.
        task: see `task_content`.

    Returns:
        The modules of other distributions that the task names, which are trusted, too.

    Raises:
        ConfigError: no such method, or this party does not trust the package.
    """
    for name in dict.fromkeys(methods):
        module = foreign_method_module(name)
        if module:
            _require_trust_of_party(f"method {name!r}", module, fl_ctx)
    modules = []
    for setting, name, module in _extensions_of(task):
        _require_trust_of_party(f"{setting} {name!r}", module, fl_ctx)
        modules.append(module)
    for module in (*settings_of(fl_ctx.get_workspace()).packages, *modules):
        trust(module)
    return tuple(modules)


def task_content(file: Path) -> Json:
    """The content of a job's task.json, not validated; empty if `load_task` refuses the file."""
    with suppress(OSError, ValueError):
        content = read_json(file)
        if isinstance(content, Mapping):
            return content
    return {}


def _extensions_of(task: Any) -> Iterator[tuple[str, str, str]]:
    """Setting, name and module of what a task names of other distributions; imports none."""
    from medflare.networks.foreign import foreign_module

    if not isinstance(task, Mapping):
        return
    for setting, group in _GROUPS.items():
        values = task.get(setting)
        for value in values if isinstance(values, list) else [values]:
            name = str(value.get("name") if isinstance(value, Mapping) else value)
            if setting == "network":
                module = foreign_module({"name": name})
            else:
                module = extension_module(group, name)
            if module:
                yield setting, name, module


def foreign_method_module(method: str) -> str:
    """The module of a method of another distribution, not imported; "" for one of medflare.

    Raises:
        ConfigError: no such method.
    """
    from medflare.methods.catalogue import module_of

    module = module_of(method)
    if module.split(".")[0] == "medflare":
        return ""
    return module


def refuse_result_filters(fl_ctx: FLContext) -> None:
    """Raise if the job names task-result filters for this site, which FLARE would run after the
    site's own.

    Raises:
        ConfigError: the job names some; the error names their classes.
    """
    tables = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "task_result_filters", None) or {}
    classes: set[str] = set()
    for chain in tables.values():
        classes.update(f"{type(item).__module__}.{type(item).__name__}" for item in chain)
    if classes:
        raise ConfigError(
            f"site {fl_ctx.get_identity_name()} takes no job with task_result_filters of its own "
            f"({', '.join(sorted(classes))}): they would run after the site's filters; "
            "leave them out, or have the site name them in its local/privacy.json"
        )


def brings_code(fl_ctx: FLContext) -> bool:
    """Whether FLARE has found code in the job (app/custom/), which the party's authorization.json
    has then allowed.
    """
    meta = fl_ctx.get_prop(FLContextKey.JOB_META)
    return isinstance(meta, Mapping) and bool(meta.get(AppValidationKey.BYOC))


def lead_of(fl_ctx: FLContext) -> str:
    """Who submitted the job, as FLARE's server notes it; "" in the simulator."""
    meta = fl_ctx.get_prop(FLContextKey.JOB_META)
    name = meta.get(JobMetaKey.SUBMITTER_NAME.value) if isinstance(meta, Mapping) else None
    return str(name or "")


def _require_trust_of_party(what: str, module: str, fl_ctx: FLContext) -> None:
    packages = settings_of(fl_ctx.get_workspace()).packages
    if brings_code(fl_ctx):
        packages = (*packages, module)
    reason = trust_refusal(module, packages)
    if reason:
        party = fl_ctx.get_identity_name()
        raise ConfigError(f"{what} comes from {module}, which {party} does not allow; {reason}")


def settings_of(workspace: Workspace) -> LocalSettings:
    """A party's settings in its local/medflare.json."""
    return local_settings(read_local(Path(workspace.get_site_config_dir()) / LOCAL_FILE))


def _job_refusal(app: Path, workspace: Workspace, name: str) -> str:
    """Why the job in this folder is refused; "" if it is not."""
    code = app / WorkspaceConstants.CUSTOM_FOLDER_NAME
    folder = Path(workspace.get_app_config_dir(app.parent.name))
    allowed_files = [folder / name for name in _JOB_FILES]
    for path in sorted(app.rglob("*")):
        is_expected = path in allowed_files or path.name in SIGNATURES or path.is_dir()
        if not is_expected and not path.is_relative_to(code):
            return (
                f"configuration {_named(path.name, 'file')} refused: beside its code a job has "
                f"{', '.join(_JOB_FILES)} in config, in JSON, and nothing else"
            )
    for path in filter(Path.is_file, allowed_files):
        if path.stat().st_size > LARGEST_CONFIG:
            return f"configuration {path.name} refused: more than {LARGEST_CONFIG} bytes"
    file = JobConstants.CLIENT_JOB_CONFIG
    if name == SiteType.SERVER:
        file = JobConstants.SERVER_JOB_CONFIG
    config = ConfigFactory.load_config(file, [str(folder)])
    if config is None:
        return f"configuration {file} refused: it is missing"
    if code.exists():  # FLARE checks its own policy: byoc
        return ""
    if any("{" in text or "}" in text for text in _texts(config.to_dict())):
        return f"configuration {file} refused: {_NO_BRACES}"
    allowed = _allow_list(workspace)
    for component in _component_paths(config.to_dict()):
        reason = _refusal(component, allowed)
        if reason:
            return reason
    return _extension_refusal(config.to_dict(), folder / TASK_FILE, workspace)


def _texts(config: Any) -> Iterator[str]:
    """All names and texts of a configuration."""
    if isinstance(config, str):
        yield config
    elif isinstance(config, Mapping):
        yield from map(str, config)
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _texts(part)


def _refusal(path: Any, allowed: Collection[str]) -> str:
    """Why a component may not be built, "" if it may; only a listed class is imported."""
    if path not in allowed:
        return (
            f"component {_named(path, 'without a plain name')} refused: "
            "class_allow_list in local/resources.json does not name it"
        )
    loaded = load_class(path)
    if isinstance(loaded, type) and issubclass(loaded, FLComponent):
        return ""
    return f"component {path} refused: it is no class derived from FLARE's FLComponent"


def _extension_refusal(config: Any, task: Path, workspace: Workspace) -> str:
    """Why an extension that a job's task or configuration names is refused; "" if none is."""
    extensions = list(_configured(config))
    if task.is_file():
        extensions += _extensions_of(read_json(task))
    for setting, name, module in extensions:
        reason = trust_refusal(module, settings_of(workspace).packages)
        if reason:
            return f"{setting} {_named(name, 'without a plain name')} refused: {reason}"
    return ""


def _configured(config: Any) -> Iterator[tuple[str, str, str]]:
    """The items of `_extensions_of`, for the arguments of a configuration's components."""
    parts: Iterable[Any] = ()
    if isinstance(config, Mapping):
        for key, value in config.items():
            setting = str(key).rpartition(".")[2]  # "rule" and "server.rule"
            name = str(value).partition(",")[0].strip()  # "tent,rate=0.01"
            module = extension_module(_ARGUMENTS.get(setting, ""), name)
            if module:
                yield setting, name, module
        parts = config.values()
    elif isinstance(config, list):
        parts = config
    for part in parts:
        yield from _configured(part)


def _component_paths(config: Any, inside: bool = False) -> Iterator[Any]:
    """What a job's configuration has FLARE build: components, workflows, executors and filters, and
    those in their arguments.
    """
    if isinstance(config, Mapping):
        if "path" in config or "class_path" in config or (inside and "name" in config):
            yield _path_of(config)
        for name, part in config.items():
            holds_components = name in ("components", "workflows", "executor", "filters")
            yield from _component_paths(part, holds_components)
    elif isinstance(config, list):
        for part in config:
            yield from _component_paths(part, inside)


def _path_of(config: Json) -> Any:
    for key in _PATH_KEYS:
        if key in config:
            return config[key]
    return None


def _allow_list(workspace: Workspace) -> list[str]:
    """The classes that the party lists."""
    resources = Path(workspace.get_resources_file_path()).read_text(encoding="utf-8")
    allowed = json.loads(resources).get("class_allow_list")
    if not isinstance(allowed, list):
        return []
    return [name for name in allowed if isinstance(name, str)]


def _audit(workspace: Workspace, name: str, job: str, action: str, text: str) -> None:
    """Write a line to the party's audit.log; in a container to the one in the job's folder, which
    alone outlives the job.
    """
    has_container = in_container(Path(workspace.get_run_dir(job)))
    auditor = Auditor(workspace.get_audit_file_path(job if has_container else None))
    auditor.add_event(user=name, action=action, ref=job, msg=text)
    auditor.close()


def _named(name: Any, otherwise: str) -> str:
    """A name that a job chose if it is plain letters, else `otherwise`.

    A refusal is shown to the lead and repeats no other value.
    """
    if isinstance(name, str) and _PLAIN.fullmatch(name):
        return name
    return otherwise


def _unreadable(error: Exception) -> str:
    """A refusal for an error, without the error's text, which may repeat values of the party's
    files.
    """
    return f"component configuration refused: it cannot be read ({type(error).__name__})"

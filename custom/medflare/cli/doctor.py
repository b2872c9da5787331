"""`medflare site doctor`: checks of a party; it starts nothing and joins no federation."""

import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from medflare.cli.startup_kit import (
    MALFORMED,
    VALIDATOR,
    Kit,
    certificate_end,
    check_root,
    components,
    read_object,
    server_problem,
    template,
)
from medflare.core.errors import ConfigError, MedflareError
from medflare.core.text import JsonDict
from medflare.data.loading import site_folder
from medflare.data.local import (
    CACHE,
    LOCAL_FILE,
    PLACE,
    LocalSettings,
    cache_with_folder,
    local_settings,
    read_local,
)
from medflare.preparation.check import check_site
from medflare.tasks.config import TaskConfig
from medflare.training.computing import usable_device

_GB = 10**9


class CheckResult(NamedTuple):
    """The result of a check: "ok", "warning" or "FAILED", and the reason (with the remedy)."""

    check: str
    status: str
    text: str


class _Warning(Exception):
    """A check that is not ok but does not stop the party from working."""


def examine(kit: Kit, task: TaskConfig | None = None) -> Iterator[CheckResult]:
    """Every check of a kit, one after the other.

    `task`: a site's images are read for it; None: only the datalist is read.
    """
    local = None
    with suppress(MedflareError, OSError):  # the check "settings" reports it
        local = local_settings(read_local(kit.local / LOCAL_FILE))
    checks = {
        "policies": _policies,
        "keys": _keys,
        "certificate": _certificate,
        "server": _connection,
        "settings": _settings,
        "disk": lambda kit: _disk(kit, local),
    }
    if kit.kind == "server":
        checks["server"] = _port
        checks["storage"] = _storage
    elif local is not None:
        checks["device"] = lambda _: f"{usable_device(local.chosen_device(), PLACE)} can be used"
        checks["data"] = lambda kit: _data(kit, local, task)
        if _in_containers(kit):
            checks["records"] = lambda kit: _records(kit, local)
    for name, check in checks.items():
        try:
            yield CheckResult(name, "ok", check(kit))
        except _Warning as warning:
            yield CheckResult(name, "warning", str(warning))
        except MedflareError as error:
            yield CheckResult(name, "FAILED", str(error))
        except OSError as error:
            remedy = "run the command as the account that owns the kit"
            yield CheckResult(name, "FAILED", f"{error}; {remedy}")


# -- each check returns its text, or raises _Warning or ConfigError --------------------------------


def _policies(kit: Kit) -> str:
    """Whether the policies admit medflare's components, and nothing else that runs code."""
    checks = {
        "resources.json": _classes,
        "authorization.json": _code,
        "comm_config.json": _processes,
    }
    if kit.kind == "site":
        checks["privacy.json"] = _guard
    for name, check in checks.items():
        path = kit.local / name
        if not path.exists():
            raise ConfigError(f"{path} is missing; run medflare site setup {kit.folder}")
        try:
            check(kit, read_object(path))
        except MALFORMED as error:
            raise ConfigError(
                f"{path}: not in the format of FLARE 2.9 ({error!r}); correct it"
            ) from error
    return "jobs may name medflare's components and bring no code"


def _processes(kit: Kit, communication: JsonDict) -> None:
    internal = communication["internal"]
    is_mutual = internal["resources"].get("connection_security") == "mtls"
    if internal["scheme"] != "shared-file" and not is_mutual:
        raise ConfigError(
            f"the processes of {kit.name} talk in clear, and other accounts of this machine in its "
            f"name; run medflare site setup {kit.folder}"
        )


def _code(kit: Kit, authorization: JsonDict) -> None:
    for right in authorization.get("permissions", {}).values():
        brings_code = isinstance(right, dict) and right.get("byoc", "none") != "none"
        if right == "any" or brings_code:
            raise _Warning(
                "a lead's jobs may bring code, which then runs here; "
                "medflare's policies say byoc none"
            )


def _classes(kit: Kit, resources: JsonDict) -> None:
    file = kit.local / "resources.json"
    remedy = f"medflare site setup {kit.folder} --replace-policies"
    allowed = [str(name) for name in resources.get("class_allow_list", [])]
    usual = template(kit.kind, "resources.json")
    prefixes = [name for name in allowed if name.endswith((".", "*"))]
    if prefixes:
        raise ConfigError(
            f'class_allow_list in {file} has "{prefixes[0]}", '
            f"which admits every function below it; {remedy}"
        )
    missing = [name for name in usual["class_allow_list"] if name not in allowed]
    if missing:
        raise ConfigError(
            f'class_allow_list in {file} lacks "{missing[0]}", so jobs of medflare are rejected; '
            f"{remedy}"
        )
    if (resources.get(VALIDATOR) or {}).get("path") != usual[VALIDATOR]["path"]:
        raise ConfigError(
            f"{VALIDATOR} in {file} is not {usual[VALIDATOR]['path']}: "
            f"FLARE calls anything below a listed class; {remedy}"
        )
    if kit.kind == "site" and resources.get("allow_log_streaming", True):  # FLARE's default
        raise _Warning(f"logs of jobs go to the server; {remedy} keeps them here")


def _guard(kit: Kit, privacy: JsonDict) -> None:
    if not _result_filters(template("site", "privacy.json")) <= _result_filters(privacy):
        raise _Warning(
            "no OutboundGuard in privacy.json: nothing compares what leaves the site with the "
            "method's declaration"
        )


def _result_filters(privacy: JsonDict) -> set[str]:
    """Class paths of the result filters in the default scope."""
    scopes = {scope.get("name"): scope for scope in privacy.get("scopes", ())}
    default = scopes.get(privacy.get("default_scope"), {})
    return {str(item.get("path")) for item in default.get("task_result_filters", ())}


def _keys(kit: Kit) -> str:
    if stat.S_IMODE(kit.key.stat().st_mode) & 0o077:
        raise ConfigError(
            f"other accounts can read {kit.key} and act as {kit.name}; chmod 600 {kit.key}"
        )
    folders = (kit.folder, kit.folder / "startup", kit.local)
    entering = stat.S_IMODE(kit.folder.stat().st_mode) & 0o011  # group and others, if they may
    writing = entering << 1  # the same accounts' right to write
    for path in (*folders, *kit.local.iterdir()):
        if stat.S_IMODE(path.stat().st_mode) & writing:
            raise ConfigError(f"other accounts can change {path}; chmod go-w {path}")
    return "only this account can read the private key"


def _certificate(kit: Kit) -> str:
    end = certificate_end(kit.name, kit.root, kit.certificate)
    check_root(kit)
    if end - datetime.now(timezone.utc) < timedelta(days=30):
        raise _Warning(f"valid until {end:%F} only; ask the project admin for a new kit")
    return f"valid until {end:%F} by this machine's clock"


def _connection(kit: Kit) -> str:
    problem = server_problem(kit)
    if problem:
        raise ConfigError(problem)
    return f"{kit.host} port {kit.port} replies and accepts this kit's certificate"


def _port(kit: Kit) -> str:
    try:
        with socket.create_server(("", kit.port)):
            return f"port {kit.port} is free"
    except OSError as error:
        if server_problem(kit):
            listeners = f"ss -ltnp 'sport = :{kit.port}'"
            raise ConfigError(
                f"port {kit.port} is not available ({error.strerror}); see who listens: {listeners}"
            ) from error
        return f"the server runs and replies at {kit.host} port {kit.port}"


def _settings(kit: Kit) -> str:
    local = local_settings(read_local(kit.local / LOCAL_FILE))
    if kit.kind == "server":
        return "settings are valid"
    if not local.minimum_patients:
        raise _Warning(
            f"minimum_patients is not set in {kit.local / LOCAL_FILE}: "
            "metrics of single patients may leave the site"
        )
    text = f"metrics of at least {local.minimum_patients} patients leave the site"
    if local.privacy is None:
        text += '; no "privacy" budget: models can show training images to who leads a job'
    return text


def _in_containers(kit: Kit) -> bool:
    """Whether `nvflare deploy prepare` made the kit for Docker or Kubernetes."""
    launchers = {"docker_launcher", "k8s_launcher"}
    with suppress(*MALFORMED, MedflareError, OSError):  # the check "policies" reports it
        return bool(launchers & components(read_object(kit.local / "resources.json")).keys())
    return False


def _records(kit: Kit, local: LocalSettings) -> str:
    """Whether what is counted over all jobs outlives their containers."""
    file = kit.local / LOCAL_FILE
    mounts = kit.local / "study_runtime.yaml"
    writable = mounts.exists() and re.search(r"^[^#\n]*mode:\W*rw", mounts.read_text(), re.M)
    keeps_record = local.minimum_patients > 1 or local.privacy is not None
    if keeps_record and not local.records:
        raise ConfigError(
            f"no records in {file}, so the site refuses jobs: mount a folder in {mounts} with "
            'mode: rw, and name it there as the job sees it, "records": "/data/STUDY/NAME"'
        )
    if local.records and not writable:
        raise _Warning(f"{mounts} mounts no dataset with mode: rw, which records needs")
    return "what is counted over all jobs outlives their containers"


def _disk(kit: Kit, local: LocalSettings | None) -> str:
    folders = [kit.folder]
    if kit.kind == "site" and local is not None:
        cache = cache_with_folder(local.cache, kit.folder / CACHE)
        if cache is not None:
            folders.append(_existing(Path(cache.folder)))
    free, folder = min((shutil.disk_usage(folder).free / _GB, folder) for folder in folders)
    text = f"{free:.1f} GB free at {folder}"
    if free < 1:
        raise ConfigError(f"{text}; free some space")
    if free < 10:
        raise _Warning(text)
    return text


def _storage(kit: Kit) -> str:
    """Whether the server can write where it keeps jobs and results."""
    file = kit.local / "resources.json"
    try:
        resources = read_object(file)
        jobs = components(resources)["job_manager"]["args"]["uri_root"]
        snapshots = resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"]
    except MALFORMED as error:
        raise ConfigError(
            f"{file}: names no folders for jobs and snapshots ({error!r}); see {file.name}.default"
        ) from error
    for folder in (Path(jobs), Path(snapshots)):
        if not os.access(_existing(folder), os.W_OK | os.X_OK):
            remedy = f"medflare site setup {kit.folder} --storage FOLDER"
            raise ConfigError(f"{folder} is not writable; {remedy}")
    return f"jobs are kept in {jobs}, snapshots in {snapshots}"


def _data(kit: Kit, local: LocalSettings, task: TaskConfig | None) -> str:
    root = site_folder(kit.name, local.data_root)
    if root is None:
        raise _Warning(
            "no data_root, so only tasks with embedded images run; "
            f"medflare site setup {kit.folder} --data-root FOLDER"
        )
    if task is None:
        return f"{root} has a datalist; --task TASK reads every image"
    report = check_site(root, task, local=local)
    problems = [problem for site in report.sites.values() for problem in site.problems]
    if problems:
        raise ConfigError(
            f"problems: {len(problems)}, the first: {problems[0]}; "
            f"see medflare data check {root} with this --task"
        )
    splits = []
    for site in report.sites.values():
        if site.suppressed:
            raise _Warning(f"{site.suppressed}; the splits are in {root}")
        splits += [f"{name} {images}" for name, (images, _) in site.splits.items()]
    return f"every image can be read: {', '.join(splits)}"


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())

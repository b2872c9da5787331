"""Everything that keeps a party from working, looked at without touching a live federation: nothing registers, nothing is started."""

import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from medflare.cli.kits.kit import Kit, certificate_end, open_kit, read_object, refuse_foreign_root, server_problem
from medflare.cli.kits.setup import ODD, OURS, VALIDATOR, owner, template
from medflare.core.errors import ConfigError, MedflareError
from medflare.data.local import CACHE, LOCAL_FILE, LocalSettings, local_settings, read_local
from medflare.data.settings import placed

if TYPE_CHECKING:
    from medflare.tasks.config import TaskConfig

_GB: Final = 10**9
_SOON: Final = timedelta(days=30)


class Finding(NamedTuple):
    """One check: its name, "ok", "warning" or "FAILED", and what was found, with the remedy where it is not ok."""

    check: str
    verdict: Literal["ok", "warning", "FAILED"]
    text: str


def examine(kit: Kit, task: "TaskConfig | None" = None) -> Iterator[Finding]:
    """Every check of a kit, one after the other.

    Args:
        kit: of a site or the server.
        task: site: what its data are checked for; None: they are only looked for.
    """
    checks: dict[str, Callable[[], Finding]] = {
        "policies": lambda: _policies(kit),
        "owner": lambda: _owner(kit),
        "keys": lambda: _keys(kit),
        "certificate": lambda: _certificate(kit),
        "server": lambda: _port(kit) if kit.kind == "server" else _server(kit),
        "settings": lambda: _settings(kit),
    }
    own: LocalSettings | None = None
    with suppress(MedflareError, OSError):  # then "settings" says it, and the checks that need them are left out
        own = _own(kit)
    checks["disk"] = lambda: _disk(kit, own)
    if kit.kind == "server":
        checks["storage"] = lambda: _storage(kit)
    elif own is not None:
        checks |= {"device": lambda: _device(own), "data": lambda: _data(kit, own, task)}
    for name, check in checks.items():
        try:
            yield check()._replace(check=name)
        except MedflareError as error:
            yield Finding(name, "FAILED", str(error))
        except OSError as error:
            yield Finding(name, "FAILED", f"{error}; run the command as the account that owns the kit")


def _ok(text: str) -> Finding:
    return Finding("", "ok", text)


def _warning(text: str) -> Finding:
    return Finding("", "warning", text)


def _failed(text: str) -> Finding:
    return Finding("", "FAILED", text)


# -- the kit -------------------------------------------------------------------------------------------------------------------------


def _policies(kit: Kit) -> Finding:
    """The files that decide what runs here and what leaves."""
    files = ["resources.json", "authorization.json", *(["privacy.json"] if kit.kind == "site" else [])]
    missing = [name for name in files if not (kit.local / name).exists()]
    if {"resources.json", "authorization.json"} & {*missing}:
        return _failed(f"{', '.join(missing)} missing in {kit.local}; run medflare site setup {kit.folder}")
    policies = {name: {} if name in missing else read_object(kit.local / name) for name in files}
    file = ""
    try:
        for file, look in (("authorization.json", _code), ("resources.json", _classes), ("privacy.json", _leaving)):
            if file in policies and (found := look(kit, policies[file])):
                return found
    except ODD as error:
        raise ConfigError(f"{kit.local / file}: not as FLARE 2.9 has it ({error!r}); correct it") from error
    return _ok("jobs may name medflare's components and bring no code")


def _code(kit: Kit, authorization: dict[str, Any]) -> Finding | None:
    rights = authorization.get("permissions", {}).values()
    if any(right == "any" or (isinstance(right, dict) and right.get("byoc", "none") != "none") for right in rights):
        return _warning("a lead's jobs may bring code, which then runs here; medflare's own policies say byoc none")
    return None


def _classes(kit: Kit, resources: dict[str, Any]) -> Finding | None:
    """The classes that a job may name here, and whether its logs stay."""
    allowed, usual = resources.get("class_allow_list", []), template(kit.kind, "resources.json")
    file, remedy = kit.local / "resources.json", f"medflare site setup {kit.folder}"
    if prefixes := [str(name) for name in allowed if str(name).endswith((".", "*"))]:
        mend = remedy if prefixes[0] == OURS else "name classes in full; packages of networks and methods go to packages in medflare.json"
        return _failed(f'class_allow_list in {file} holds "{prefixes[0]}", which is no full name of a class; {mend}')
    if missing := [name for name in usual["class_allow_list"] if name not in allowed]:
        return _failed(f'class_allow_list in {file} lacks "{missing[0]}", so jobs of medflare are refused; {remedy} --replace-policies')
    if (resources.get(VALIDATOR) or {}).get("path") != usual[VALIDATOR]["path"]:
        open_door = f"is not {usual[VALIDATOR]['path']}, so FLARE calls whatever a job names below a class"
        return _failed(f"{VALIDATOR} in {file} {open_door}; {remedy} --replace-policies")
    if kit.kind == "site" and resources.get("allow_log_streaming", True):  # FLARE's default
        return _warning(f"logs of jobs go to the server; {remedy} --no-stream-logs keeps them here")
    return None


def _leaving(kit: Kit, privacy: dict[str, Any]) -> Finding | None:
    if not {*_filters(template("site", "privacy.json"))} <= {*_filters(privacy)}:
        return _warning("no OutboundGuard in privacy.json: nothing compares what leaves with what a method declares")
    return None


def _filters(privacy: dict[str, Any]) -> list[str]:
    """Paths of the result filters of the scope that jobs without one get."""
    scopes = {str(scope.get("name")): scope for scope in privacy.get("scopes", ())}
    return [str(one.get("path")) for one in scopes.get(str(privacy.get("default_scope")), {}).get("task_result_filters", ())]


def _owner(kit: Kit) -> Finding:
    """A file that root left behind in local/ is one that the kit's account cannot read."""
    whose = kit.folder.stat().st_uid
    if strange := [path for path in sorted(kit.local.rglob("*")) if not path.is_symlink() and path.lstat().st_uid != whose]:
        remedy = f"sudo chown -R {owner(kit.folder)} {kit.local}"
        return _failed(f"{strange[0]} belongs to {owner(strange[0])}, the kit to {owner(kit.folder)}; {remedy}")
    return _ok(f"all of local/ belongs to {owner(kit.folder)}, as the kit does")


def _keys(kit: Kit) -> Finding:
    if stat.S_IMODE(kit.key.stat().st_mode) & 0o077:
        return _failed(f"{kit.key} can be read by others on this machine, who could act as {kit.name}; chmod 600 {kit.key}")
    if stat.S_IMODE((kit.folder / "startup").stat().st_mode) & 0o022:
        return _failed(f"others on this machine can change {kit.folder / 'startup'}; chmod 700 {kit.folder / 'startup'}")
    return _ok("the private key is for this account alone")


def _certificate(kit: Kit) -> Finding:
    end = certificate_end(kit)
    refuse_foreign_root(kit)
    if end - datetime.now(timezone.utc) < _SOON:
        return _warning(f"valid until {end:%F} only; ask the project admin for a new kit")
    return _ok(f"valid until {end:%F} by this machine's clock")


def _server(kit: Kit) -> Finding:
    problem = server_problem(kit)
    return _failed(problem) if problem else _ok(f"{kit.host} port {kit.port} answers, and takes this kit's certificate")


def _port(kit: Kit) -> Finding:
    try:
        with socket.create_server(("", kit.port)):
            return _ok(f"port {kit.port} is free")
    except OSError as error:
        if not server_problem(kit):
            return _ok(f"it runs, and answers at {kit.host} port {kit.port}")
        return _failed(f"port {kit.port} cannot be had ({error.strerror}); see who listens: ss -ltnp 'sport = :{kit.port}'")


def _disk(kit: Kit, own: LocalSettings | None) -> Finding:
    places = [kit.folder]
    if kit.kind == "site" and own is not None and (cache := placed(own.cache, kit.folder / CACHE)) is not None:
        places.append(_existing(Path(cache.folder)))
    free, place = min((shutil.disk_usage(place).free / _GB, place) for place in places)
    text = f"{free:.1f} GB free at {place}"
    return _failed(text) if free < 1 else _warning(text) if free < 10 else _ok(text)


def _storage(kit: Kit) -> Finding:
    """Where the server keeps jobs and results: whether there can be files, and nobody else's."""
    file, remedy = kit.local / "resources.json", f"medflare site setup {kit.folder}"
    if not file.exists():
        return _warning(f"nobody has said where jobs and results are kept; {remedy}")
    resources = read_object(file)
    try:
        manager = next(one for one in resources["components"] if one.get("id") == "job_manager")
        folders = [Path(manager["args"]["uri_root"]), Path(resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"])]
    except (*ODD, StopIteration) as error:
        raise ConfigError(f"{file}: names no folders for jobs and snapshots ({error!r}); see {file.name}.default") from error
    for folder in folders:
        if not os.access(_existing(folder), os.W_OK | os.X_OK):
            return _failed(f"{folder} cannot be written to; {remedy} --storage FOLDER")
        for place in folder.parents:
            with suppress(ConfigError):
                if (other := open_kit(place).folder) != kit.folder:
                    return _warning(f"{folder} lies in another kit, {other}; {remedy} --storage FOLDER")
    return _ok(f"jobs are kept in {folders[0]}, snapshots in {folders[1]}")


# -- its own settings, and a site's device and data ----------------------------------------------------------------------------------


def _own(kit: Kit) -> LocalSettings:
    return local_settings(read_local(kit.local / LOCAL_FILE))


def _settings(kit: Kit) -> Finding:
    own = _own(kit)
    if kit.kind == "server":
        return _ok("its own settings can be read")
    if not own.minimum_patients:
        return _warning(f"minimum_patients not set in {kit.local / LOCAL_FILE}: numbers of single patients may leave")
    return _ok(f"metrics of {own.minimum_patients} patients or more leave")


def _device(own: LocalSettings) -> Finding:
    from medflare.training.opening import usable_devices

    return _ok(f"{', '.join(map(str, usable_devices(own)))} can be used")


def _data(kit: Kit, own: LocalSettings, task: "TaskConfig | None") -> Finding:
    """Where a run of this site looks for them; as `medflare data check` finds them where a task says what they are for."""
    from medflare.data.loading import site_folder

    root = site_folder(kit.name, own.data_root)
    if root is None:
        return _warning(f"no data_root, so only tasks with embedded images run; medflare site setup {kit.folder} --data-root FOLDER")
    if task is None:
        return _ok(f"{root} has a datalist; --task TASK reads every image")
    from medflare.training.check import check_site

    report = check_site(root, task, own=own)
    if problems := [problem for site in report.sites.values() for problem in site.problems]:
        return _failed(f"{len(problems)} problems, the first: {problems[0]}; see medflare data check {root} --task {task.name}")
    splits = ", ".join(f"{name} {images}" for site in report.sites.values() for name, (images, _) in site.splits.items())
    return _ok(f"every image can be read: {splits}")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is."""
    return next(place for place in (folder, *folder.parents) if place.exists())

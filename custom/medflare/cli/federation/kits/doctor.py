"""Everything that keeps a party from working, looked at without touching a live federation: nothing registers, nothing is started."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from medflare.cli.federation.kits.certificates import end_of, ends_soon, refuse_invalid, refuse_strange, server_answer
from medflare.cli.federation.kits.kit import Kit, open_kit
from medflare.cli.federation.kits.processes import running
from medflare.cli.federation.kits.setup import OURS, VALIDATOR, owner, read_policy, template
from medflare.core.errors import ConfigError, MedflareError, StateError
from medflare.data.settings import placed
from medflare.data.sites.local import CACHE, LOCAL_FILE, LocalSettings, local_settings, read_local

if TYPE_CHECKING:
    from medflare.tasks.config import TaskConfig

_GB: Final = 10**9
_LITTLE: Final = 10 * _GB  # of free disk
_TOO_LITTLE: Final = _GB


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
    for name, check in _checks(kit, task).items():
        try:
            yield check()._replace(check=name)
        except MedflareError as error:
            yield Finding(name, "FAILED", str(error))
        except OSError as error:
            yield Finding(name, "FAILED", f"{error}; run the command as the account that owns the kit")


def _checks(kit: Kit, task: "TaskConfig | None") -> dict[str, Callable[[], Finding]]:
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
    return checks


def preflight(kit: Kit) -> None:
    """Run FLARE's own check, which registers the party at the server and starts it for a moment.

    Args:
        kit: of a site or the server.

    Raises:
        ConfigError: the party runs: the check would void its token, and the next job would wait for it in vain.
        StateError: the check did not pass; what it said is on the standard output.
    """
    if (first := running(kit).first) is not None:
        reason = "FLARE's preflight would register it a second time, and its jobs would lose their server"
        raise ConfigError(f"{kit.name} runs (process {first.pid}): {reason}; stop it first, or leave out --preflight")
    done = subprocess.run([sys.executable, "-m", "nvflare.cli", "preflight-check", "-p", kit.folder], check=False)
    if done.returncode:
        raise StateError(f"{kit.name}: FLARE's preflight did not pass; see above")


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
    if "resources.json" in missing or "authorization.json" in missing:
        return _failed(f"{', '.join(missing)} missing in {kit.local}; run medflare site setup {kit.folder}")
    contents = {name: read_policy(kit.local / name) for name in files if name not in missing}
    if _code_allowed(contents["authorization.json"]):
        return _warning("a lead's jobs may bring code, which then runs here; medflare's own policies say byoc none")
    if problem := _open_list(kit, contents["resources.json"]):
        return _failed(problem)
    if kit.kind == "site" and not {*_filters(template("site", "privacy.json"))} <= {*_filters(contents.get("privacy.json", {}))}:
        return _warning("no OutboundGuard in privacy.json: nothing compares what leaves with what a method declares")
    if kit.kind == "site" and contents["resources.json"].get("allow_log_streaming", True):  # FLARE's default
        return _warning(f"logs of jobs go to the server; medflare site setup {kit.folder} --no-stream-logs keeps them here")
    return _ok("jobs may name medflare's components and bring no code")


def _open_list(kit: Kit, resources: dict[str, Any]) -> str:
    """What is wrong with the classes that a job may name here; "" for nothing."""
    allowed, usual = resources.get("class_allow_list", []), template(kit.kind, "resources.json")
    file, remedy = kit.local / "resources.json", f"medflare site setup {kit.folder}"
    if prefixes := [str(name) for name in allowed if str(name).endswith((".", "*"))]:
        mend = remedy if prefixes[0] == OURS else "name classes in full; packages of networks and methods go to packages in medflare.json"
        return f'class_allow_list in {file} holds "{prefixes[0]}", which is no full name of a class; {mend}'
    if missing := [name for name in usual["class_allow_list"] if name not in allowed]:
        return f'class_allow_list in {file} lacks "{missing[0]}", so jobs of medflare are refused; {remedy} --replace-policies'
    validator = resources.get(VALIDATOR)
    if not isinstance(validator, dict) or validator.get("path") != usual[VALIDATOR]["path"]:
        wanted = usual[VALIDATOR]["path"]
        return f"{VALIDATOR} in {file} is not {wanted}, so FLARE calls whatever a job names below a class; {remedy} --replace-policies"
    return ""


def _code_allowed(authorization: dict[str, Any]) -> bool:
    rights = authorization.get("permissions", {}).values()
    return any(right == "any" or (isinstance(right, dict) and right.get("byoc", "none") != "none") for right in rights)


def _filters(privacy: dict[str, Any]) -> list[str]:
    """Paths of the result filters of the scope that jobs without one get."""
    scopes = {str(scope.get("name")): scope for scope in privacy.get("scopes", ())}
    return [str(one.get("path")) for one in scopes.get(str(privacy.get("default_scope")), {}).get("task_result_filters", ())]


def _owner(kit: Kit) -> Finding:
    """A file that root left behind in local/ is one that the kit's account cannot read."""
    whose = kit.folder.stat().st_uid
    strange = [path for path in sorted(kit.local.rglob("*")) if not path.is_symlink() and path.lstat().st_uid != whose]
    if strange:
        remedy = f"chown {owner(kit.folder)} {strange[0]}" if len(strange) == 1 else f"chown -R {owner(kit.folder)} {kit.local}"
        return _failed(f"{strange[0]} belongs to {owner(strange[0])}, the kit to {owner(kit.folder)}; sudo {remedy}")
    return _ok(f"all of local/ belongs to {owner(kit.folder)}, as the kit does")


def _keys(kit: Kit) -> Finding:
    open_to_others = [kit.key] if stat.S_IMODE(kit.key.stat().st_mode) & 0o077 else []
    if open_to_others:
        return _failed(f"{kit.key} can be read by others on this machine, who could act as {kit.name}; chmod 600 {kit.key}")
    if stat.S_IMODE((kit.folder / "startup").stat().st_mode) & 0o022:
        return _failed(f"others on this machine can change {kit.folder / 'startup'}; chmod 700 {kit.folder / 'startup'}")
    return _ok("the private key is for this account alone")


def _certificate(kit: Kit) -> Finding:
    refuse_invalid(kit)
    refuse_strange(kit)
    end = f"{end_of(kit):%F}"
    if ends_soon(kit):
        return _warning(f"valid until {end} only; ask the project admin for a new kit")
    return _ok(f"valid until {end} by this machine's clock")


def _server(kit: Kit) -> Finding:
    problem = server_answer(kit)
    return _failed(problem) if problem else _ok(f"{kit.host} port {kit.port} answers, and takes this kit's certificate")


def _port(kit: Kit) -> Finding:
    if (first := running(kit).first) is not None:
        problem = server_answer(kit)
        return (
            _failed(f"it runs (process {first.pid}), but {problem}")
            if problem
            else _ok(f"it runs, and answers at {kit.host} port {kit.port}")
        )
    try:
        with socket.create_server(("", kit.port)):
            return _ok(f"port {kit.port} is free")
    except OSError as error:
        return _failed(f"port {kit.port} cannot be had ({error.strerror}); see who listens: ss -ltnp 'sport = :{kit.port}'")


def _disk(kit: Kit, own: LocalSettings | None) -> Finding:
    places = [kit.folder]
    if kit.kind == "site" and own is not None and (cache := placed(own.cache, kit.folder / CACHE)) is not None:
        places.append(_existing(Path(cache.folder)))
    place, free = min(((place, shutil.disk_usage(place).free) for place in places), key=lambda pair: pair[1])
    text = f"{free / _GB:.1f} GB free at {place}"
    if free < _LITTLE:
        remedy = f"{text}; see what medflare site clean {kit.folder} --older-than 30d --dry-run would remove"
        return _failed(remedy) if free < _TOO_LITTLE else _warning(remedy)
    return _ok(text)


def _storage(kit: Kit) -> Finding:
    """Where the server keeps jobs and results: whether there can be files, and nobody else's."""
    file = kit.local / "resources.json"
    if not file.exists():
        return _warning(f"nobody has said where jobs and results are kept; medflare site setup {kit.folder}")
    resources = read_policy(file)
    try:
        manager = next(one for one in resources["components"] if one.get("id") == "job_manager")
        folders = [Path(manager["args"]["uri_root"]), Path(resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"])]
    except (KeyError, StopIteration, TypeError) as error:
        raise ConfigError(f"{file}: names no folders for jobs and snapshots ({error!r}); see {file.name}.default") from error
    for folder in folders:
        remedy = f"medflare site setup {kit.folder} --storage FOLDER"
        if problem := _unwritable(folder):
            return _failed(f"{folder} cannot be written to ({problem}); {remedy}")
        for place in folder.parents:
            with suppress(ConfigError):
                if (other := open_kit(place).folder) != kit.folder:
                    return _warning(f"{folder} lies in another kit, {other}; {remedy}")
    return _ok(f"jobs are kept in {folders[0]}, snapshots in {folders[1]}")


# -- its own settings, and a site's device and data ----------------------------------------------------------------------------------


def _own(kit: Kit) -> LocalSettings:
    return local_settings(read_local(kit.local / LOCAL_FILE))


def _settings(kit: Kit) -> Finding:
    own = _own(kit)
    if kit.kind == "server":
        return _ok(f"{kit.local / LOCAL_FILE} can be read" if (kit.local / LOCAL_FILE).exists() else "none of its own, which is as well")
    open_ones = [name for name, closed in (("minimum_patients", own.minimum_patients > 0), ("redact", own.redact)) if not closed]
    if open_ones:
        return _warning(f"{' and '.join(open_ones)} not set in {kit.local / LOCAL_FILE}: numbers and names of single patients may leave")
    return _ok(f"metrics of {own.minimum_patients} patients or more leave, names leave as codes")


def _device(own: LocalSettings) -> Finding:
    from medflare.data.sites.opening import usable_devices

    return _ok(f"{', '.join(map(str, usable_devices(own)))} can be used")


def _data(kit: Kit, own: LocalSettings, task: "TaskConfig | None") -> Finding:
    """Where a run of this site looks for them; as `medflare data check` finds them where a task says what they are for."""
    from medflare.data.loading import site_folder

    root = site_folder(kit.name, own.data_root)
    if root is None:
        return _warning(f"no data_root, so only tasks with embedded images run; medflare site setup {kit.folder} --data-root FOLDER")
    if task is None:
        return _ok(f"{root} has a datalist; --task TASK reads every image")
    from medflare.data.checking.check import check_site

    report = check_site(root, task, own=own)
    problems = [problem for site in report.sites.values() for problem in site.problems]
    if problems:
        return _failed(f"{len(problems)} problems, the first: {problems[0]}; see medflare data check {root} --task {task.name}")
    splits = ", ".join(f"{name} {images}" for site in report.sites.values() for name, (images, _) in site.splits.items())
    return _ok(f"every image can be read: {splits}")


def _unwritable(folder: Path) -> str:
    """Why there can be no files in a folder, or ""; one that is there is left alone, since FLARE takes whatever lies in it for a job."""
    if folder.is_dir():
        return "" if os.access(folder, os.W_OK | os.X_OK) else "not by this account"
    try:
        with tempfile.TemporaryDirectory(prefix=".medflare-", dir=_existing(folder)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is."""
    return next(place for place in (folder, *folder.parents) if place.exists())

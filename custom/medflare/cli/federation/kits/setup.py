"""The policies and settings in a kit's local/ folder: what is missing is added, what is named is changed, the rest is kept.

What FLARE provisioned stays beside them as *.json.default; resources.json is made from it, so that a kit prepared for Docker or
Kubernetes keeps its launcher.
"""

import copy
import json
import os
import pwd
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from medflare.cli.federation.kits.kit import Kind, Kit, read_object
from medflare.core.errors import ConfigError
from medflare.data.sites.local import LOCAL_FILE

TEMPLATES: Final = Path(__file__).parent / "templates"
VALIDATOR: Final = "app_validator"  # FLARE's name for what looks at a job when it arrives
OURS: Final = "medflare."  # as an entry of class_allow_list, as medflare 0.2 wrote it, it allows every function of medflare's
_PLAIN_LAUNCHER: Final = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
_SHARED: Final = "/tmp/nvflare/"  # FLARE's default: all federations of a machine share it, and a reboot empties it
_SHOWN: Final = 60  # characters of a value in a change
_ODD: Final = (AttributeError, IndexError, KeyError, TypeError)  # what JSON of another shape comes to
_LISTS: Final = ("class_allow_list", "components", "scopes", "servers", "task_data_filters", "task_result_filters")
_Object = dict[str, Any]


@dataclass(frozen=True)
class Wishes:
    """What an administrator names; None and False leave things as they are.

    Attributes:
        data_root: site: folder with datalist.json.
        device: site: where models run.
        batch_size: site: most images at once.
        cache: site: folder for decoded images; "off" for none.
        minimum_patients: site: of how many a metric must be for it to leave.
        stream_logs: site: whether its logs of a job go to the server.
        packages: whose networks and methods a job may name.
        storage: server: folder for jobs and results.
        bring_code: medflare is not installed here: policies name nothing of it, and a lead's jobs may bring it.
        replace_policies: policies that are there are replaced by new ones.
    """

    data_root: Path | None = None
    device: str | None = None
    batch_size: int | None = None
    cache: str | None = None
    minimum_patients: int | None = None
    stream_logs: bool | None = None
    packages: list[str] | None = None
    storage: Path | None = None
    bring_code: bool = False
    replace_policies: bool = False


class Change(NamedTuple):
    """What became of one file: "kept", "added", "changed" or "removed", and every setting that differs, as "setting: old -> new"."""

    file: Path
    verdict: str
    settings: tuple[str, ...] = ()


def set_up(kit: Kit, wishes: Wishes) -> list[Change]:
    """Bring a kit's local/ folder to what is wished; every file is checked before one is written. The kit is then for its account alone.

    Args:
        kit: of a site or the server.
        wishes: what is named.

    Returns:
        One line for every file.

    Raises:
        ConfigError: a wish that is not this kind of kit's, a value that a setting cannot have, a file that cannot be understood, a storage
            that cannot be made, or a kit of another account.
    """
    from medflare.core.store import write_json

    _refuse_strange(kit, wishes)
    if os.geteuid() not in (0, kit.folder.stat().st_uid):
        raise ConfigError(f"{kit.folder} belongs to {owner(kit.folder)}; run it as {owner(kit.folder)}")
    makers = {"authorization.json": _authorization, LOCAL_FILE: _own, "privacy.json": _privacy, "resources.json": _resources}
    names = sorted({LOCAL_FILE, *(path.name for path in (TEMPLATES / kit.kind).glob("*.json"))})
    before = {name: read_policy(path) if (path := kit.local / name).exists() else None for name in names}
    after = {}
    for name, content in before.items():
        try:
            after[name] = makers[name](kit, wishes, copy.deepcopy(content))
        except _ODD as error:
            odd = kit.local / (name if content is not None else f"{name}.default")
            raise ConfigError(f"{odd}: not as FLARE 2.9 has it ({error!r}); correct it") from error
    if wishes.storage is not None:
        _make(wishes.storage.expanduser().resolve(), kit)
    done = []
    for name in names:
        path, old, new = kit.local / name, before[name], after[name]
        if old == new:
            done += [] if old is None else [Change(path, "kept")]
        elif new is None:
            path.unlink()
            done.append(Change(path, "removed", ("all that it names is medflare's, which is not installed here",)))
        else:
            write_json(path, new)
            _hand_over(path, kit)
            done.append(Change(path, "added") if old is None else Change(path, "changed", tuple(differences(old, new))))
    _close(kit.folder)
    return done


def _close(folder: Path) -> None:
    """Take from others what they may do below a folder: FLARE writes scripts for everybody, and archives unpack as the umask says."""
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077 and not path.is_symlink():
            path.chmod(mode & 0o700)


def _hand_over(path: Path, kit: Kit) -> None:
    """What root has written for another account's kit is that account's; a link is not followed."""
    whose = kit.folder.stat()
    if os.geteuid() == 0 and path.lstat().st_uid != whose.st_uid:
        os.chown(path, whose.st_uid, whose.st_gid, follow_symlinks=False)


def _make(storage: Path, kit: Kit) -> None:
    """The server's folder for jobs and results, for its account alone; ConfigError where there can be none."""
    from medflare.core.store import make_folder

    missing = [place for place in (storage, *storage.parents) if not place.exists()]
    try:
        make_folder(storage)
        for place in missing:
            _hand_over(place, kit)
    except OSError as error:
        raise ConfigError(f"--storage {storage}: cannot be made ({error.strerror}); name a folder for {owner(kit.folder)}") from error
    if not os.access(storage, os.W_OK | os.X_OK):
        raise ConfigError(f"--storage {storage}: cannot be written to; name a folder for {owner(kit.folder)}")


def owner(path: Path) -> str:
    """The account that a file or folder belongs to: its name, or its number where it has none here."""
    number = path.lstat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Every setting in which two JSON values differ, as "setting: old -> new"; of lists, what was added and removed.

    Args:
        old: before.
        new: after.
        place: dotted name of both.

    Examples:
        >>> list(differences({"device": "cpu", "names": ["a"]}, {"device": "cuda", "names": ["a", "b"], "keep": True}))
        ['device: "cpu" -> "cuda"', 'names: "b" added', 'keep: not set -> true']
    """
    if old == new:
        return
    if isinstance(old, list) and isinstance(new, list):
        if all(isinstance(item, dict) and "id" in item for item in [*old, *new]):
            old, new = ({item["id"]: item for item in items} for items in (old, new))  # FLARE's components
        elif [item for item in old if item in new] == [item for item in new if item in old]:
            yield from (f"{place}: {_shown(item)} removed" for item in old if item not in new)
            yield from (f"{place}: {_shown(item)} added" for item in new if item not in old)
            return
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from differences(old.get(name), new.get(name), f"{place}.{name}" if place else name)
    else:
        yield f"{place}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any, null: str = "not set") -> str:
    text = null if value is None else json.dumps(value)
    half = (_SHOWN - 3) // 2  # of paths it is the end that tells them apart
    return text if len(text) <= _SHOWN else f"{text[:half]}...{text[half + 3 - _SHOWN :]}"


def template(kind: Kind, name: str) -> _Object:
    """What a new kit gets.

    Args:
        kind: of the kit.
        name: of the file in local/.
    """
    return read_object(TEMPLATES / kind / name)


def read_policy(path: Path) -> _Object:
    """The JSON object in a file of local/, with lists and objects where FLARE has them.

    Args:
        path: of the file.

    Raises:
        ConfigError: the file cannot be read, or something in it is of another kind.
    """
    content = read_object(path)
    scopes = content.get("scopes")
    for part in (content, *(filter(_is_object, scopes) if isinstance(scopes, list) else ())):
        for name in (name for name in _LISTS if name in part):
            if not isinstance(part[name], list):
                raise ConfigError(f'{path}: "{name}" must be a JSON list, not {_shown(part[name], "null")}; correct it')
            if name != "class_allow_list" and not all(map(_is_object, part[name])):
                raise ConfigError(f'{path}: "{name}" must hold JSON objects alone; correct it')
    if not _is_object(content.get("permissions", {})):
        raise ConfigError(f'{path}: "permissions" must be a JSON object, not {_shown(content["permissions"], "null")}; correct it')
    return content


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _refuse_strange(kit: Kit, wishes: Wishes) -> None:
    """ConfigError where a wish is for the other kind of kit."""
    of_sites = ("data_root", "device", "batch_size", "cache", "minimum_patients", "stream_logs")
    strange, other = (of_sites, "a site") if kit.kind == "server" else (("storage",), "the server")
    for name in strange:
        if getattr(wishes, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is a setting of {other}; {kit.folder} is the kit of the {kit.kind} {kit.name}")


# -- one function a file: the content that is there, or None -> what it shall be, or None for no file --------------------------------


def _own(kit: Kit, wishes: Wishes, content: _Object | None) -> _Object | None:
    from medflare.data.sites.local import local_settings

    if content is None and kit.kind == "server":
        if wishes.packages is None:
            return None
        content = {}
    elif content is None:
        usual = template(kit.kind, LOCAL_FILE)
        content = {name: usual[name] for name in ("device", "minimum_patients")}  # the rest is an example of a site's own
    if wishes.data_root is not None:
        content["data_root"] = str(wishes.data_root.expanduser().absolute())  # a link stays one: mounts move
    if wishes.cache is not None:
        content["cache"] = _cache(wishes.cache, content.get("cache"))
    for name in ("device", "batch_size", "minimum_patients", "packages"):
        if getattr(wishes, name) is not None:
            content[name] = getattr(wishes, name)
    local_settings(content)
    return content


def _cache(wish: str, before: Any) -> Any:
    if wish == "off":
        return False
    folder = str(Path(wish).expanduser().absolute())
    return {**before, "folder": folder} if isinstance(before, Mapping) else folder


def _authorization(kit: Kit, wishes: Wishes, content: _Object | None) -> _Object:
    content = _policy(kit, wishes, content, "authorization.json")
    if wishes.bring_code:
        content.setdefault("permissions", {}).setdefault("lead", {})["byoc"] = "any"
    return content


def _privacy(kit: Kit, wishes: Wishes, content: _Object | None) -> _Object | None:
    if not wishes.bring_code:
        return _policy(kit, wishes, content, "privacy.json")
    filters = 0
    for scope in (content or {}).get("scopes", []):
        for name in ("task_result_filters", "task_data_filters"):
            scope[name] = [one for one in scope.get(name, []) if not _is_ours(one)]
            filters += len(scope[name])
    return content if filters else None


def _policy(kit: Kit, wishes: Wishes, content: _Object | None, name: str) -> _Object:
    return template(kit.kind, name) if content is None or wishes.replace_policies else content


def _resources(kit: Kit, wishes: Wishes, content: _Object | None) -> _Object:
    if content is None or wishes.replace_policies:
        before, content = content, read_object(kit.local / "resources.json.default")
        _close_list(kit, content, [])
        _adapt(content, wishes.storage or _storage(before) or kit.folder / "storage")
    else:
        if OURS in content.get("class_allow_list", ()):  # medflare 0.2 has set it up
            provisioned = read_object(kit.local / "resources.json.default").get("class_allow_list") or ()
            _close_list(kit, content, [name for name in content["class_allow_list"] if name != OURS and name not in provisioned])
        if wishes.storage is not None:
            _store(content, wishes.storage)
    if wishes.stream_logs is not None:
        content["allow_log_streaming"] = wishes.stream_logs
    if wishes.bring_code:
        _replace_launcher(content, _our_launcher(), _PLAIN_LAUNCHER)
        if "class_allow_list" in content:
            content["class_allow_list"] = [name for name in content["class_allow_list"] if not name.startswith(OURS)]
        content["components"] = [one for one in content.get("components", ()) if not _is_ours(one)]
        if _is_ours(content.get(VALIDATOR) or {}):
            del content[VALIDATOR]
    return content


def _close_list(kit: Kit, resources: _Object, more: Sequence[str]) -> None:
    """List what medflare's jobs name there and `more`, by full names; have it asked for; let no log leave a site. In place."""
    usual = template(kit.kind, "resources.json")
    resources["class_allow_list"] = list(dict.fromkeys([*usual["class_allow_list"], *more]))
    resources.setdefault(VALIDATOR, usual[VALIDATOR])
    if kit.kind == "site":
        resources["allow_log_streaming"] = usual["allow_log_streaming"]


def _adapt(resources: _Object, storage: Path) -> None:
    """What medflare needs of FLARE's resources.json, in place."""
    _replace_launcher(resources, _PLAIN_LAUNCHER, _our_launcher())
    for server in resources.get("servers", ()):
        server["heart_beat_timeout"] = 120  # seconds; FLARE's ten minutes are long for those who wait for a site that is gone
    manager = _components(resources).get("job_manager")
    if manager is None:
        return
    resources["components"] += [one for one in template("server", "resources.json")["components"] if _is_ours(one)]
    if manager["args"]["uri_root"].startswith(_SHARED):
        _store(resources, storage)


def _is_ours(component: _Object) -> bool:
    return str(component.get("path", "")).startswith(OURS)


def _our_launcher() -> str:
    return str(_components(template("site", "resources.json"))["process_launcher"]["path"])


def _replace_launcher(resources: _Object, old: str, new: str) -> None:
    launcher = _components(resources).get("process_launcher", {})
    if launcher.get("path") == old:
        launcher["path"] = new


def _store(resources: _Object, storage: Path) -> None:
    storage = storage.expanduser().resolve()
    _components(resources)["job_manager"]["args"]["uri_root"] = str(storage / "jobs")
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")


def _storage(resources: _Object | None) -> Path | None:
    """Where a server keeps its jobs so far; None where that is FLARE's default, or nowhere."""
    manager = _components(resources or {}).get("job_manager")
    root = None if manager is None else str(manager["args"]["uri_root"])
    return None if root is None or root.startswith(_SHARED) else Path(root).parent


def _components(resources: _Object) -> dict[str, _Object]:
    return {component["id"]: component for component in resources.get("components", ())}

"""The policies and settings in a kit's local/ folder: what is missing is added, what is named is changed, the rest is kept.

What FLARE provisioned stays beside them as *.json.default; resources.json is made from it, so that a kit prepared for Docker or
Kubernetes keeps its launcher.
"""

import copy
import json
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from medflare.cli.kits.kit import Kind, Kit, read_object
from medflare.core.errors import ConfigError

TEMPLATES: Final = Path(__file__).parent / "templates"
LOCAL_FILE: Final = "medflare.json"  # as `data.local` reads it; its import takes numpy along
VALIDATOR: Final = "app_validator"  # FLARE's name for what looks at a job when it arrives
OURS: Final = "medflare."  # as an entry of class_allow_list, as medflare 0.2 wrote it, it allows every function of medflare's
ODD: Final = (AttributeError, IndexError, KeyError, TypeError)  # what JSON of another shape comes to
_PLAIN_LAUNCHER: Final = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
_OUR_LAUNCHER: Final = "medflare.flare.launcher.RestartingLauncher"
_SHARED: Final = "/tmp/nvflare/"  # FLARE's default: all federations of a machine share it, and a reboot empties it
_SHOWN: Final = 60  # characters of a value in a change
_Object = dict[str, Any]


@dataclass(frozen=True)
class KitSettings:
    """What an administrator names; None and False leave things as they are. The first six are a site's own, `storage` the server's.

    Attributes:
        data_root: with datalist.json; without it only tasks with embedded images run
        device: where models run: cpu, cuda, cuda:1 (a new site: cpu)
        batch_size: most images at once, for a small GPU (default: as the task says)
        cache: folder for decoded images, or off (default: medflare-cache beside local/)
        minimum_patients: no metric of fewer patients leaves (a new site: 5)
        stream_logs: FLARE sends the site's log of errors in a job to the server (a new site: no)
        packages: installed packages, separated by commas, whose networks and methods a job may name (a new party: none)
        storage: for submitted jobs and results (default: storage in the kit)
        bring_code: medflare is not installed here: a lead's jobs may bring it (--embed-code); no OutboundGuard, no restarts
        replace_policies: new policies in place of those that are there
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


def set_up(kit: Kit, wanted: KitSettings) -> list[Change]:
    """Bring a kit's local/ folder to what is wanted; every file is checked before one is written. The kit is then for its account alone.

    Raises:
        ConfigError: a setting that is not this kind of kit's, a value that it cannot have, a file that cannot be understood, or a kit of
            another account.
        OSError: the storage cannot be made.
    """
    from medflare.core.store import write_json

    of_others = ("storage",) if kit.kind == "site" else tuple(KitSettings.__dataclass_fields__)[:6]
    for name in of_others:
        if getattr(wanted, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is no setting of a {kit.kind}, whose kit {kit.folder} is")
    if os.geteuid() not in (0, kit.folder.stat().st_uid):
        raise ConfigError(f"{kit.folder} belongs to {owner(kit.folder)}; run it as {owner(kit.folder)}")
    makers = {"authorization.json": _authorization, LOCAL_FILE: _own, "privacy.json": _privacy, "resources.json": _resources}
    names = sorted({LOCAL_FILE, *(path.name for path in (TEMPLATES / kit.kind).glob("*.json"))})
    before = {name: read_object(path) if (path := kit.local / name).exists() else None for name in names}
    after = {}
    for name, content in before.items():
        try:
            after[name] = makers[name](kit, wanted, copy.deepcopy(content))
        except ODD as error:
            odd = kit.local / (name if content is not None else f"{name}.default")
            raise ConfigError(f"{odd}: not as FLARE 2.9 has it ({error!r}); correct it") from error
    if wanted.storage is not None:
        _make_storage(wanted.storage.expanduser().resolve(), kit)
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


def _make_storage(storage: Path, kit: Kit) -> None:
    from medflare.core.store import make_folder

    missing = [place for place in (storage, *storage.parents) if not place.exists()]
    make_folder(storage)
    for place in missing:
        _hand_over(place, kit)


def owner(path: Path) -> str:
    """The account that a file or folder belongs to: its name, or its number where it has none here."""
    number = path.lstat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Every setting in which two JSON objects differ; of lists of texts, what was added and removed.

    Examples:
        >>> list(differences({"device": "cpu", "names": ["a"]}, {"device": "cuda", "names": ["a", "b"], "keep": True}))
        ['device: "cpu" -> "cuda"', 'names: "b" added', 'keep: not set -> true']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from differences(old.get(name), new.get(name), f"{place}.{name}" if place else name)
    elif isinstance(old, list) and isinstance(new, list):
        yield from (f"{place}: {_shown(item)} removed" for item in old if item not in new)
        yield from (f"{place}: {_shown(item)} added" for item in new if item not in old)
    elif old != new:
        yield f"{place}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value)
    half = (_SHOWN - 3) // 2  # of paths it is the end that tells them apart
    return text if len(text) <= _SHOWN else f"{text[:half]}...{text[half + 3 - _SHOWN :]}"


def template(kind: Kind, name: str) -> _Object:
    """What a new kit gets as the file `name` in local/."""
    return read_object(TEMPLATES / kind / name)


# -- one function a file: the content that is there, or None -> what it shall be, or None for no file --------------------------------


def _own(kit: Kit, wanted: KitSettings, content: _Object | None) -> _Object | None:
    from medflare.data.local import local_settings

    if content is None and kit.kind == "server":
        if wanted.packages is None:
            return None
        content = {}
    elif content is None:
        usual = template(kit.kind, LOCAL_FILE)
        content = {name: usual[name] for name in ("device", "minimum_patients")}  # the rest is an example of a site's own
    if wanted.data_root is not None:
        content["data_root"] = str(wanted.data_root.expanduser().absolute())  # a link stays one: mounts move
    if wanted.cache is not None:
        content["cache"] = _cache(wanted.cache, content.get("cache"))
    for name in ("device", "batch_size", "minimum_patients", "packages"):
        if getattr(wanted, name) is not None:
            content[name] = getattr(wanted, name)
    local_settings(content)
    return content


def _cache(value: str, before: Any) -> Any:
    if value == "off":
        return False
    folder = str(Path(value).expanduser().absolute())
    return {**before, "folder": folder} if isinstance(before, Mapping) else folder


def _authorization(kit: Kit, wanted: KitSettings, content: _Object | None) -> _Object:
    content = _policy(kit, wanted, content, "authorization.json")
    if wanted.bring_code:
        content.setdefault("permissions", {}).setdefault("lead", {})["byoc"] = "any"
    return content


def _privacy(kit: Kit, wanted: KitSettings, content: _Object | None) -> _Object | None:
    if not wanted.bring_code:
        return _policy(kit, wanted, content, "privacy.json")
    filters = 0
    for scope in (content or {}).get("scopes", []):
        for name in ("task_result_filters", "task_data_filters"):
            scope[name] = _of_others(scope.get(name, []))
            filters += len(scope[name])
    return content if filters else None


def _policy(kit: Kit, wanted: KitSettings, content: _Object | None, name: str) -> _Object:
    return template(kit.kind, name) if content is None or wanted.replace_policies else content


def _resources(kit: Kit, wanted: KitSettings, content: _Object | None) -> _Object:
    provisioned = read_object(kit.local / "resources.json.default")
    if content is None or wanted.replace_policies:
        before, content = content, provisioned
        _close_list(kit, content, set(content.get("class_allow_list") or ()))
        _adapt(content, wanted.storage or _storage(before) or kit.folder / "storage")
    else:
        if OURS in content.get("class_allow_list", ()):  # medflare 0.2 has set it up
            _close_list(kit, content, {OURS, *(provisioned.get("class_allow_list") or ())})
        if wanted.storage is not None:
            _store(content, wanted.storage)
    if wanted.stream_logs is not None:
        content["allow_log_streaming"] = wanted.stream_logs
    if wanted.bring_code:
        _replace_launcher(content, _OUR_LAUNCHER, _PLAIN_LAUNCHER)
        if "class_allow_list" in content:
            content["class_allow_list"] = [name for name in content["class_allow_list"] if not name.startswith(OURS)]
        content["components"] = _of_others(content.get("components", ()))
        if _is_ours(content.get(VALIDATOR) or {}):
            del content[VALIDATOR]
    return content


def _close_list(kit: Kit, resources: _Object, dropped: set[str]) -> None:
    """List the classes of medflare's jobs by full names, in place; have the list asked for; let no log leave a site."""
    usual = template(kit.kind, "resources.json")
    kept = [name for name in resources.get("class_allow_list") or () if name not in dropped]
    resources["class_allow_list"] = list(dict.fromkeys([*usual["class_allow_list"], *kept]))
    resources.setdefault(VALIDATOR, usual[VALIDATOR])
    if kit.kind == "site":
        resources["allow_log_streaming"] = usual["allow_log_streaming"]


def _adapt(resources: _Object, storage: Path) -> None:
    """What medflare needs of FLARE's resources.json, in place."""
    _replace_launcher(resources, _PLAIN_LAUNCHER, _OUR_LAUNCHER)
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


def _of_others(components: Any) -> list[_Object]:
    return [one for one in components if not _is_ours(one)]


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
    root = _SHARED if manager is None else str(manager["args"]["uri_root"])
    return None if root.startswith(_SHARED) else Path(root).parent


def _components(resources: _Object) -> dict[str, _Object]:
    return {component["id"]: component for component in resources.get("components", ())}

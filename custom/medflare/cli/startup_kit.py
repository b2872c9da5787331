"""A party's startup kit: its content, its certificate, and what `medflare site setup` writes.

resources.json is made from FLARE's resources.json.default, so that a kit for Docker or Kubernetes
keeps its launcher.
"""

import copy
import json
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.x509 import Certificate, load_pem_x509_certificate

from medflare.core.errors import ConfigError
from medflare.core.files import make_folder, refuse_link, refuse_links, write_json
from medflare.core.text import JsonDict, read_json
from medflare.data.local import LOCAL_FILE, local_settings

VALIDATOR = "app_validator"  # FLARE's name: the component that inspects a job on arrival
PREFIX = "medflare."
# Raised when FLARE's JSON has another structure.
MALFORMED = (AttributeError, IndexError, KeyError, TypeError)
SITE_SETTINGS = ("data_root", "device", "batch_size", "cache", "minimum_patients")
_DEFAULT_LAUNCHER = (
    "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
)
_RESTARTING_LAUNCHER = "medflare.flare.launcher.RestartingLauncher"
_LOG_STREAMING = "nvflare.app_common.logging."
# FLARE's default, shared by all federations of a machine and deleted at a reboot.
_DEFAULT_STORAGE = "/tmp/nvflare/"


@dataclass(frozen=True)
class Kit:
    """A startup kit of a site or the server."""

    folder: Path  # absolute
    kind: Literal["site", "server"]
    name: str
    host: str  # the server's name in its certificate
    port: int
    certificate: Path  # PEM, as the others
    key: Path
    root: Path  # certificate of the federation

    @property
    def local(self) -> Path:
        """The folder of the party's settings and policies."""
        return self.folder / "local"


def open_kit(folder: Path | str) -> Kit:
    """The kit in a folder with startup/ and local/.

    ConfigError: it is no kit of a server or a site, or it cannot be read.
    """
    folder = Path(folder).expanduser().resolve()
    startup = folder / "startup"
    file = startup / "fed_server.json"
    is_server = file.is_file()
    if not is_server:
        file = startup / "fed_client.json"
    if (startup / "fed_admin.json").is_file():
        raise ConfigError(
            f"{folder}: the startup kit of a person; medflare job list --kit {folder} tries it"
        )
    if not file.is_file():
        raise ConfigError(
            f"{folder}: not a startup kit of a server or a site (no startup/fed_server.json or "
            "startup/fed_client.json)"
        )
    content = read_object(file)
    try:
        server = content["servers"][0]
        host, _, port = server["service"]["target"].rpartition(":")
        party = server if is_server else content["client"]
        name = host if is_server else party["fqsn"]
        fields = ("ssl_cert", "ssl_private_key", "ssl_root_cert")
        paths = [startup / party[field] for field in fields]
        return Kit(folder, "server" if is_server else "site", name, host, int(port), *paths)
    except (*MALFORMED, ValueError) as error:
        raise ConfigError(
            f"{file}: not in the format of FLARE 2.9 ({error!r}); provision the kit again"
        ) from error


def read_object(path: Path) -> JsonDict:
    """The JSON object in a file; raises ConfigError if it cannot be read or holds none."""
    try:
        content = read_json(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); "
            "run the command as the account that owns the kit"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); correct it") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object; correct it")
    return content


# -- certificates ----------------------------------------------------------------------------------


def certificate_end(name: str, root: Path, certificate: Path) -> datetime:
    """The end of a party's certificate; FLARE may wait for an invalid one without a message.

    Raises:
        ConfigError: a file cannot be read, or is not valid now.
    """
    now = datetime.now(timezone.utc)
    for file in (root, certificate):
        content = _read_certificate(file)
        begin = content.not_valid_before_utc
        end = content.not_valid_after_utc
        if not begin <= now <= end:
            validity = f"is valid from {begin:%F %R} to {end:%F %R} UTC"
            raise ConfigError(
                f"{name}: {file.name} {validity}, and the clock says {now:%F %R}; "
                "set the clock or provision a new kit"
            )
    return end


def check_root(kit: Kit) -> None:
    """Raise ConfigError if the kit's root did not sign the certificate, as in a kit of two kits."""
    try:
        _read_certificate(kit.certificate).verify_directly_issued_by(_read_certificate(kit.root))
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(
            f"{kit.certificate.name} is not signed by {kit.root.name}; "
            "take all of startup/ from one kit"
        ) from None


def server_problem(kit: Kit, timeout: float = 5.0) -> str:
    """Why a TLS handshake with the kit's certificate fails in `timeout` seconds, "" if it succeeds.

    It registers no party.
    """
    address = f"{kit.host} port {kit.port}"
    try:
        context = ssl.create_default_context(cafile=str(kit.root))
        context.load_cert_chain(kit.certificate, kit.key)
        context.set_alpn_protocols(["h2", "http/1.1"])  # those of FLARE's drivers
        with (
            socket.create_connection((kit.host, kit.port), timeout) as plain,
            context.wrap_socket(plain, server_hostname=kit.host) as tls,
        ):
            tls.settimeout(0.5)  # the server rejects a certificate after the handshake
            if _closed_by_server(tls):
                return (
                    f"{address} rejects this kit's certificate: "
                    "it is expired or of another federation; provision a new kit"
                )
    except ssl.SSLCertVerificationError as error:
        return (
            f"{address} has a certificate of another root ({error.verify_message}): "
            "a TLS proxy, or a kit of another federation"
        )
    except ssl.SSLError as error:
        return (
            f"{address} rejects the handshake ({error.reason or error}); see the server's log, "
            "or provision a new kit"
        )
    except socket.gaierror:
        return (
            f"the host name {kit.host} is unknown here; ask your network's administrators, "
            "or add it to /etc/hosts"
        )
    except ConnectionRefusedError:
        return f"nothing listens at {address}; ask the project admin whether the server is up"
    except TimeoutError:
        return (
            f"no reply from {address} in {timeout:g} s; "
            "a firewall must let this machine open a connection to it"
        )
    except OSError as error:
        return f"{address}: {error.strerror or error}; check this machine's network"
    return ""


def _closed_by_server(tls: ssl.SSLSocket) -> bool:
    """Whether the server closes the connection after the handshake.

    FLARE's gRPC rejects a certificate so, without an alert.
    """
    try:
        return tls.recv(1) == b""
    except TimeoutError:  # accepted: the server waits for a request
        return False
    except ConnectionResetError:
        return True


def _read_certificate(file: Path) -> Certificate:
    try:
        return load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: no readable certificate ({error}); take startup/ again from the project admin"
        ) from error


# -- setup -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KitSettings:
    """Settings of `medflare site setup`; None and False change nothing.

    The first five are a site's, `storage` is the server's.

    Attributes:
        data_root: folder with datalist.json; without it only tasks with embedded images run
        device: device of the models: cpu, cuda, cuda:1 (a new site: cpu)
        batch_size: maximum number of images at once, for a small GPU (default: the task's)
        cache: folder for decoded images, or off (default: medflare-cache beside local/)
        minimum_patients: no metric of fewer patients leaves the site (a new site: 5)
        packages: installed packages, separated by commas, that a job or its task may name
            (default: none)
        storage: folder for submitted jobs and results (default: storage in the kit)
        bring_code: medflare is not installed here: a lead's jobs may bring it (--embed-code); no
            OutboundGuard, no restarts
        replace_policies: write new policies over those that exist
    """

    data_root: Path | None = None
    device: str | None = None
    batch_size: int | None = None
    cache: str | None = None
    minimum_patients: int | None = None
    packages: list[str] | None = None
    storage: Path | None = None
    bring_code: bool = False
    replace_policies: bool = False


class Change(NamedTuple):
    """What setup did with a file: "kept", "added", "changed" or "removed"; settings that differ."""

    file: Path
    action: str
    settings: tuple[str, ...] = ()


def set_up(kit: Kit, settings: KitSettings) -> list[Change]:
    """Add missing files to a kit's local/ folder and change the named settings.

    All content is checked before a file is written. Afterwards only the account that owns the kit
    can read it.

    Raises:
        ConfigError: a setting of the other kind of kit, an invalid value, a malformed file, or a
            kit of another account.
        StateError: local/ is a link, or has one.
        OSError: the storage cannot be made.
    """
    foreign = ("storage",) if kit.kind == "site" else SITE_SETTINGS
    for name in foreign:
        if getattr(settings, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not a setting of a {kit.kind}; "
                f"{kit.folder} is the kit of one"
            )
    if os.geteuid() not in (0, kit.folder.stat().st_uid):
        raise ConfigError(
            f"{kit.folder} belongs to {owner(kit.folder)}; run the command as {owner(kit.folder)}"
        )
    refuse_link(kit.local, kit.folder)
    refuse_links(kit.local)
    makers = {
        "authorization.json": _authorization,
        LOCAL_FILE: _local_settings,
        "privacy.json": _privacy,
        "resources.json": _resources,
        "comm_config.json": _communication,
    }
    if kit.kind == "server":
        del makers["privacy.json"]
    contents = {}
    for name, make in makers.items():
        path = kit.local / name
        old = read_object(path) if path.exists() else None
        try:
            contents[path] = old, make(kit, settings, copy.deepcopy(old))
        except MALFORMED as error:
            raise ConfigError(
                f"{path}: not in the format of FLARE 2.9 ({error!r}); correct it"
            ) from error
    if settings.storage is not None:
        _make_storage(settings.storage.expanduser().resolve(), kit)
    changes = []
    for path, (old, new) in contents.items():
        if old is not None or new is not None:
            changes.append(_write(kit, path, old, new))
    make_private(kit.folder)
    return changes


def _write(kit: Kit, path: Path, old: JsonDict | None, new: JsonDict | None) -> Change:
    """Write the new content of a file; None: remove the file."""
    if old == new:
        return Change(path, "kept")
    if new is None:
        path.unlink()
        reason = "it named only classes of medflare, which is not installed here"
        return Change(path, "removed", (reason,))
    write_json(path, new)
    _give_to_owner(path, kit)
    if old is None:
        return Change(path, "added")
    return Change(path, "changed", tuple(differences(old, new)))


def make_private(folder: Path) -> None:
    """Take the rights of other accounts from a folder and all below it.

    A file behind a link keeps its own.
    """
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077 and not path.is_symlink():
            path.chmod(mode & 0o700)


def _make_storage(storage: Path, kit: Kit) -> None:

    missing = [folder for folder in (storage, *storage.parents) if not folder.exists()]
    make_folder(storage)
    for folder in missing:
        _give_to_owner(folder, kit)


def _give_to_owner(path: Path, kit: Kit) -> None:
    """A file that root writes for another account's kit belongs to that account."""
    account = kit.folder.stat()
    if os.geteuid() == 0 and path.lstat().st_uid != account.st_uid:
        os.chown(path, account.st_uid, account.st_gid, follow_symlinks=False)


def owner(path: Path) -> str:
    """The name of the account that owns a file, or its number if it has no name here."""
    try:
        return path.owner()
    except KeyError:
        return str(path.stat().st_uid)


def differences(old: Any, new: Any, key_path: str = "") -> Iterator[str]:
    """The settings in which two JSON objects differ; for lists, the items added and removed.

    Examples:
        >>> old = {"device": "cpu", "names": ["a"]}
        >>> list(differences(old, {"device": "cuda", "names": ["a", "b"], "keep": True}))
        ['device: "cpu" -> "cuda"', 'names: "b" added', 'keep: not set -> true']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            below = f"{key_path}.{name}" if key_path else name
            yield from differences(old.get(name), new.get(name), below)
    elif isinstance(old, list) and isinstance(new, list):
        yield from (f"{key_path}: {json.dumps(item)} removed" for item in old if item not in new)
        yield from (f"{key_path}: {json.dumps(item)} added" for item in new if item not in old)
    elif old != new:
        before, after = ("not set" if value is None else json.dumps(value) for value in (old, new))
        yield f"{key_path}: {before} -> {after}"


def template(kind: str, name: str) -> JsonDict:
    """The file `name` of a new kit's local/ folder."""
    return read_object(Path(__file__).parent / "templates" / kind / name)


# -- a function for each file: its content, None if there is none -> its new content, None: no file


def _local_settings(kit: Kit, settings: KitSettings, content: JsonDict | None) -> JsonDict | None:
    if content is None and kit.kind == "server":
        if settings.packages is None:
            return None
        content = {}
    elif content is None:
        usual = template(kit.kind, LOCAL_FILE)
        # The rest of the template is an example.
        content = {name: usual[name] for name in ("device", "minimum_patients", "bounds")}
    if settings.data_root is not None:
        data_root = settings.data_root.expanduser().absolute()  # not resolved: mounts move
        content["data_root"] = str(data_root)
    if settings.cache == "off":
        content["cache"] = False
    elif settings.cache is not None:
        folder = str(Path(settings.cache).expanduser().absolute())
        cache = content.get("cache")
        content["cache"] = {**cache, "folder": folder} if isinstance(cache, dict) else folder
    for name in ("device", "batch_size", "minimum_patients", "packages"):
        if getattr(settings, name) is not None:
            content[name] = getattr(settings, name)
    local_settings(content)
    return content


def _authorization(kit: Kit, settings: KitSettings, content: JsonDict | None) -> JsonDict:
    if content is None or settings.replace_policies:
        content = template(kit.kind, "authorization.json")
    if settings.bring_code:
        content.setdefault("permissions", {}).setdefault("lead", {})["byoc"] = "any"
    return content


def _communication(kit: Kit, settings: KitSettings, content: JsonDict | None) -> JsonDict:
    """FLARE's settings of connections, with mTLS between the processes of the party: by a clear one
    any account of the machine could speak in its name.
    """
    content = content or {}
    internal = content.setdefault("internal", {"scheme": "tcp"})
    resources = internal.setdefault("resources", {"host": "localhost"})
    if internal.get("scheme") != "shared-file":  # whose files have no TLS
        resources["connection_security"] = "mtls"  # FLARE sets "clear" where a site has a relay
    return content


def _privacy(kit: Kit, settings: KitSettings, content: JsonDict | None) -> JsonDict | None:
    if not settings.bring_code:
        if content is None or settings.replace_policies:
            return template(kit.kind, "privacy.json")
        return content
    filters = []
    for scope in (content or {}).get("scopes", []):
        for name in ("task_result_filters", "task_data_filters"):
            scope[name] = _without_medflare(scope.get(name, []))
            filters += scope[name]
    return content if filters else None


def _resources(kit: Kit, settings: KitSettings, content: JsonDict | None) -> JsonDict:
    if content is None or settings.replace_policies:
        storage = settings.storage or _storage_of(content or {}) or kit.folder / "storage"
        content = _new_resources(kit, read_object(kit.local / "resources.json.default"), storage)
    elif settings.storage is not None:
        _set_storage(content, settings.storage)
    if settings.bring_code:
        _replace_launcher(content, _RESTARTING_LAUNCHER, _DEFAULT_LAUNCHER)
        content["class_allow_list"] = [
            name for name in content["class_allow_list"] if not name.startswith(PREFIX)
        ]
        content["components"] = _without_medflare(content.get("components", []))
        if not _without_medflare([content.get(VALIDATOR) or {}]):
            del content[VALIDATOR]
    return content


def _new_resources(kit: Kit, content: JsonDict, storage: Path) -> JsonDict:
    """FLARE's resources.json with medflare's classes, validator and launcher, with a storage, and
    without the streaming of logs.

    Classes are listed by their full names.
    """
    usual = template(kit.kind, "resources.json")
    content |= {"class_allow_list": usual["class_allow_list"], VALIDATOR: usual[VALIDATOR]}
    if kit.kind == "site":
        content["allow_log_streaming"] = usual["allow_log_streaming"]
    content["components"] = [
        item for item in content["components"] if not item["path"].startswith(_LOG_STREAMING)
    ]
    _replace_launcher(content, _DEFAULT_LAUNCHER, _RESTARTING_LAUNCHER)
    for server in content.get("servers", ()):
        server["heart_beat_timeout"] = 120  # seconds; FLARE's default is ten minutes
    if "job_manager" in components(content):
        content["components"] += [
            item for item in usual["components"] if item["path"].startswith(PREFIX)
        ]
        if _storage_of(content) is None:
            _set_storage(content, storage)
    return content


def _without_medflare(components: list[JsonDict]) -> list[JsonDict]:
    return [item for item in components if not str(item.get("path", "")).startswith(PREFIX)]


def _replace_launcher(resources: JsonDict, old: str, new: str) -> None:
    launcher = components(resources).get("process_launcher", {})
    if launcher.get("path") == old:
        launcher["path"] = new


def _set_storage(resources: JsonDict, storage: Path) -> None:
    storage = storage.expanduser().resolve()
    components(resources)["job_manager"]["args"]["uri_root"] = str(storage / "jobs")
    persistor = resources["snapshot_persistor"]["args"]["storage"]
    persistor["args"]["root_dir"] = str(storage / "snapshots")


def _storage_of(resources: JsonDict) -> Path | None:
    """The server's storage; None if it is FLARE's default or not set."""
    manager = components(resources).get("job_manager")
    if manager is None:
        return None
    root = str(manager["args"]["uri_root"])
    if root.startswith(_DEFAULT_STORAGE):
        return None
    return Path(root).parent


def components(resources: JsonDict) -> dict[str, JsonDict]:
    return {component["id"]: component for component in resources.get("components", ())}

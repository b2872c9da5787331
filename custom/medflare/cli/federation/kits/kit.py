"""A startup kit: the folder with a party's certificate, key, start script and policies. Light to import."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from medflare.core.errors import ConfigError

Kind = Literal["site", "server"]
_CONFIGURATION: Final[dict[Kind, str]] = {"server": "fed_server.json", "site": "fed_client.json"}


@dataclass(frozen=True)
class Kit:
    """What a kit says of its party.

    Attributes:
        folder: of the kit, absolute.
        kind: "site" or "server".
        name: of the party.
        host: the server's name, as its certificate has it.
        port: the server's.
        certificate: file of the party's certificate.
        key: file of its private key.
        root: file of the federation's root certificate.
    """

    folder: Path
    kind: Kind
    name: str
    host: str
    port: int
    certificate: Path
    key: Path
    root: Path

    @property
    def local(self) -> Path:
        """The folder of the party's own settings and policies."""
        return self.folder / "local"

    @property
    def log(self) -> Path:
        """FLARE's log of the party."""
        return self.folder / "log.txt"

    @property
    def output(self) -> Path:
        """What the party's processes print: errors of a start that came to no log."""
        return self.folder / "start.log"


def open_kit(folder: Path | str) -> Kit:
    """The kit in a folder.

    Args:
        folder: with startup/ and local/.

    Raises:
        ConfigError: it is no startup kit of a server or a site, or one that cannot be read.
    """
    folder = Path(folder).expanduser().resolve()
    found = {kind: folder / "startup" / name for kind, name in _CONFIGURATION.items()}
    kind = next((kind for kind, file in found.items() if file.is_file()), None)
    if kind is None:
        missing = "startup/fed_server.json or startup/fed_client.json is missing"
        raise ConfigError(f"{folder} is no startup kit of a server or a site: {missing}")
    content = read_object(found[kind])
    try:
        server = content["servers"][0]
        own = server if kind == "server" else content["client"]
        host, _, port = server["service"]["target"].rpartition(":")
        name = host if kind == "server" else own["fqsn"]
        files = [folder / "startup" / own[field] for field in ("ssl_cert", "ssl_private_key", "ssl_root_cert")]
        return Kit(folder, kind, name, host, int(port), *files)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{found[kind]}: not as FLARE 2.9 provisions it ({error!r}); have the kit provisioned anew") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); run the command as the account that owns the kit") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); correct it") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object; correct it")
    return content

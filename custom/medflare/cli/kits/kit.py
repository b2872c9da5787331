"""A startup kit: the folder with a party's certificate, key, start script and policies. Light to import."""

import json
import socket
import ssl
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from medflare.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

Kind = Literal["site", "server"]
_CONFIGURATION: Final[dict[Kind, str]] = {"server": "fed_server.json", "site": "fed_client.json"}
_REFUSAL: Final = 0.5  # seconds in which a server says that it does not take the certificate


@dataclass(frozen=True)
class Kit:
    """What a startup kit says of its party.

    Attributes:
        folder: absolute.
        host: the server's name, as its certificate has it.
        certificate: of the party, a PEM file; `key` is its private key, `root` the federation's root certificate.
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


def open_kit(folder: Path | str) -> Kit:
    """The kit in a folder with startup/ and local/.

    Raises:
        ConfigError: it is no startup kit of a server or a site, or one that cannot be read.
    """
    folder = Path(folder).expanduser().resolve()
    files = {kind: folder / "startup" / name for kind, name in _CONFIGURATION.items()}
    kind = next((kind for kind, file in files.items() if file.is_file()), None)
    if kind is None:
        missing = "startup/fed_server.json or startup/fed_client.json is missing"
        raise ConfigError(f"{folder} is no startup kit of a server or a site: {missing}")
    content = read_object(files[kind])
    try:
        server = content["servers"][0]
        own = server if kind == "server" else content["client"]
        host, _, port = server["service"]["target"].rpartition(":")
        name = host if kind == "server" else own["fqsn"]
        paths = [folder / "startup" / own[field] for field in ("ssl_cert", "ssl_private_key", "ssl_root_cert")]
        return Kit(folder, kind, name, host, int(port), *paths)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{files[kind]}: not as FLARE 2.9 provisions it ({error!r}); have the kit provisioned anew") from error


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


# -- certificates ----------------------------------------------------------------------------------------------------------


def certificate_end(kit: Kit, now: datetime | None = None) -> datetime:
    """When the party's certificate ends.

    Args:
        kit: with its certificates.
        now: None: by this machine's clock.

    Raises:
        ConfigError: a certificate is not valid now, or cannot be read. FLARE itself may wait in silence then.
    """
    now = now or datetime.now(timezone.utc)
    for file in (kit.root, kit.certificate):
        certificate = _read(file)
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not begin <= now <= end:
            remedy = "set the clock" if now < begin else "set the clock, or have a new kit provisioned if it is right"
            valid = f"is valid from {begin:%F %R} to {end:%F %R} UTC"
            raise ConfigError(f"{kit.name}: {file.name} {valid}, and the clock here says {now:%F %R}; {remedy}")
    return end


def refuse_foreign_root(kit: Kit) -> None:
    """Raise ConfigError where the kit's root did not sign the certificate: the kit is made of parts of two."""
    from cryptography.exceptions import InvalidSignature

    try:
        _read(kit.certificate).verify_directly_issued_by(_read(kit.root))
    except (ValueError, TypeError, InvalidSignature):
        remedy = "take all of startup/ from one kit, and no file from another generation"
        raise ConfigError(f"{kit.certificate.name} was not signed by the root in {kit.root.name}; {remedy}") from None


def server_problem(kit: Kit, patience: float = 5.0) -> str:
    """What is wrong with the server by a TLS handshake with the kit's own certificate, which registers nobody; "" for nothing.

    Args:
        kit: names the server.
        patience: seconds for a connection.
    """
    place = f"{kit.host} port {kit.port}"
    try:
        context = ssl.create_default_context(cafile=str(kit.root))
        context.load_cert_chain(kit.certificate, kit.key)
        context.set_alpn_protocols(["h2", "http/1.1"])  # what FLARE's drivers speak
        with socket.create_connection((kit.host, kit.port), patience) as plain, context.wrap_socket(plain, server_hostname=kit.host) as tls:
            tls.settimeout(_REFUSAL)
            if _refused(tls):
                return f"{place} does not take this kit's certificate: it is expired, or another federation's; have a new kit provisioned"
    except ssl.SSLCertVerificationError as error:
        return f"{place} shows a certificate of another root ({error.verify_message}): a proxy that opens TLS, or another federation's kit"
    except ssl.SSLError as error:
        return f"{place} refuses the handshake ({error.reason or error}); look into the server's log, or have a new kit provisioned"
    except socket.gaierror:
        return f"the name {kit.host} is unknown here; ask your network's administrators, or put it into /etc/hosts"
    except ConnectionRefusedError:
        return f"nothing listens at {place}; ask the project admin whether the server is up"
    except TimeoutError:
        return f"no answer from {place} in {patience:g} s; a firewall must let this machine open a connection to it"
    except OSError as error:
        return f"{place}: {error.strerror or error}; look at this machine's network"
    return ""


def _refused(tls: ssl.SSLSocket) -> bool:
    """Whether the server ends the connection, as it does after the handshake where it refuses the certificate: FLARE's without an alert."""
    try:
        return tls.recv(1) == b""
    except TimeoutError:  # accepted, and waiting for us to speak
        return False
    except ConnectionResetError:
        return True


def _read(file: Path) -> "Certificate":
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: no readable certificate ({error}); take the kit's startup/ anew from the project admin") from error

"""A kit's certificate and the server's answer to it: the same handshake that FLARE begins with, which registers nobody."""

import socket
import ssl
from datetime import datetime, timedelta, timezone
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from medflare.cli.federation.kits.kit import Kit
from medflare.core.errors import ConfigError

_SOON: Final = timedelta(days=30)
_PATIENCE: Final = 5.0  # seconds for a connection
_REFUSAL: Final = 0.5  # seconds in which a server says that it does not take the certificate


def refuse_invalid(kit: Kit, now: datetime | None = None) -> None:
    """Nothing where the certificates are valid by this machine's clock; FLARE itself may wait in silence where they are not.

    Args:
        kit: with its certificates.
        now: the time; None: by the clock.

    Raises:
        ConfigError: says which certificate is valid when, and what the clock says.
    """
    now = now or datetime.now(timezone.utc)
    for file in (kit.certificate, kit.root):
        begin, end = validity(_read(kit, file == kit.root))
        if not begin <= now <= end:
            remedy = "set the clock" if now < begin else "set the clock, or have a new kit provisioned if it is right"
            valid = f"is valid from {begin:%F %R} to {end:%F %R} UTC"
            raise ConfigError(f"{kit.name}: {file.name} {valid}, and the clock here says {now:%F %R}; {remedy}")


def end_of(kit: Kit) -> datetime:
    """When the party's certificate ends."""
    return validity(_read(kit))[1]


def ends_soon(kit: Kit, now: datetime | None = None) -> bool:
    """Whether it ends within a month."""
    return end_of(kit) - (now or datetime.now(timezone.utc)) < _SOON


def validity(certificate: x509.Certificate) -> tuple[datetime, datetime]:
    """From when to when."""
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def refuse_strange(kit: Kit) -> None:
    """Nothing where the certificate was signed by the kit's own root.

    Raises:
        ConfigError: it was not: the kit is made of parts of two.
    """
    try:
        _read(kit).verify_directly_issued_by(_read(kit, root=True))
    except (ValueError, TypeError, InvalidSignature):
        remedy = "take all of startup/ from one kit, and no file from another generation"
        raise ConfigError(f"{kit.certificate.name} was not signed by the root in {kit.root.name}; {remedy}") from None


def server_answer(kit: Kit, patience: float = _PATIENCE) -> str:
    """What a TLS handshake with the server finds, with the kit's own certificate; the connection ends without a word.

    Args:
        kit: names the server.
        patience: seconds.

    Returns:
        "" where the server answers as it should, else what is wrong and the remedy.
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
        return (
            f"{place} shows a certificate of another root ({error.verify_message}); a proxy that opens TLS, or a kit of another federation"
        )
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


def _read(kit: Kit, root: bool = False) -> x509.Certificate:
    file = kit.root if root else kit.certificate
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: no readable certificate ({error}); take the kit's startup/ anew from the project admin") from error

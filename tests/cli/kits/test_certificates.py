"""Certificates by this machine's clock, and a handshake that says why a server is not reached."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cli.kits.fake import NOW, Root, free_port, make_kit
from medflare.cli.federation.kits.certificates import ends_soon, refuse_invalid, refuse_strange, server_answer
from medflare.cli.federation.kits.kit import Kit
from medflare.core.errors import ConfigError


@contextmanager
def listening(kit: Kit, curt: bool = False) -> Iterator[None]:
    """A server of mutual TLS at a server kit's port, for one connection; a curt one takes no certificate and says nothing, as gRPC's."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(kit.root))
    context.load_cert_chain(kit.certificate, kit.key)
    context.verify_mode = ssl.CERT_NONE if curt else ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", kit.port))

    def serve() -> None:
        with suppress(OSError):
            plain, _ = listener.accept()
            with plain, context.wrap_socket(plain, server_side=True) as tls:
                if not curt:
                    tls.recv(1)  # until the other one leaves

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.close()
        thread.join(10)


@pytest.mark.parametrize(("days", "soon"), [((-1, 365), False), ((-1, 20), True)])
def test_valid_and_how_long(tmp_path: Path, root: Root, days: tuple[float, float], soon: bool) -> None:
    kit = make_kit(tmp_path / "site-1", root, days=days)
    refuse_invalid(kit)
    refuse_strange(kit)
    assert ends_soon(kit) == soon


@pytest.mark.parametrize(("days", "remedy"), [(-3, "set the clock"), (400, "set the clock, or have a new kit provisioned if it is right")])
def test_a_clock_outside_the_validity_is_named(site: Kit, days: int, remedy: str) -> None:
    with pytest.raises(ConfigError) as said:
        refuse_invalid(site, NOW + timedelta(days=days))
    assert str(said.value).startswith("site-1: client.crt is valid from ") and str(said.value).endswith(f"; {remedy}")


def test_a_kit_of_parts_of_two(site: Kit, tmp_path: Path) -> None:
    other = make_kit(tmp_path / "other", Root())
    with pytest.raises(ConfigError, match=r"client\.crt was not signed by the root in rootCA\.pem"):
        refuse_strange(replace(site, root=other.root))
    site.certificate.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"client\.crt: no readable certificate"):
        refuse_strange(site)


def test_a_server_that_answers(tmp_path: Path, root: Root) -> None:
    server = make_kit(tmp_path / "server", root, "server", free_port())
    with listening(server):
        assert server_answer(make_kit(tmp_path / "site-1", root, port=server.port)) == ""


@pytest.mark.parametrize(("site_of_it", "said"), [(False, "shows a certificate of another root"), (True, "refuses the handshake")])
def test_two_federations(tmp_path: Path, root: Root, site_of_it: bool, said: str) -> None:
    """A kit of another federation, and one that knows the root and has a certificate of another one."""
    server = make_kit(tmp_path / "server", root, "server", free_port())
    stranger = make_kit(tmp_path / "site-1", Root("other"), port=server.port)
    with listening(server):
        assert said in server_answer(replace(stranger, root=server.root) if site_of_it else stranger)


def test_a_server_that_closes_without_an_alert_takes_no_certificate(tmp_path: Path, root: Root) -> None:
    server = make_kit(tmp_path / "server", root, "server", free_port())
    with listening(server, curt=True):
        said = server_answer(make_kit(tmp_path / "site-1", root, port=server.port))
    assert "does not take this kit's certificate" in said and said.endswith("have a new kit provisioned")


def test_nobody_there(site: Kit) -> None:
    assert server_answer(site).startswith("nothing listens at localhost port 1; ask the project admin")
    assert server_answer(replace(site, host="no-such-host.invalid")).startswith("the name no-such-host.invalid is unknown here")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = server_answer(replace(site, port=silent.getsockname()[1]), patience=0.1)
    assert "a firewall must let this machine" in said

"""What a kit says of its party; certificates of one root; a handshake that says why a server is not reached."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cli.fake_kits import Root, free_port, make_kit
from medflare.cli.startup_kit import Kit, check_root, open_kit, server_problem
from medflare.core.errors import ConfigError


def test_site_and_server_by_name(site: Kit, server: Kit) -> None:
    assert (site.kind, site.name, site.host, site.port, site.key.name) == (
        "site",
        "site-1",
        "localhost",
        1,
        "client.key",
    )
    assert (server.kind, server.name, server.certificate.name) == (
        "server",
        "localhost",
        "server.crt",
    )


def test_a_folder_that_is_no_kit_is_refused(tmp_path: Path, site: Kit) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        open_kit(tmp_path)
    file = site.folder / "startup" / "fed_client.json"
    for text in ("{", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=file.name):
            open_kit(site.folder)


def test_a_kit_made_of_parts_of_two_is_refused(site: Kit, tmp_path: Path) -> None:
    check_root(site)
    other = make_kit(tmp_path / "other", Root())
    with pytest.raises(ConfigError, match="root"):
        check_root(replace(site, root=other.root))
    site.certificate.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"client\.crt"):
        check_root(site)


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


@pytest.fixture
def served(tmp_path: Path, root: Root) -> Kit:
    return make_kit(tmp_path / "server", root, "server", free_port())


@pytest.mark.parametrize(("same_root", "named"), [(False, "another root"), (True, "handshake")])
def test_another_federations_server_is_named(
    tmp_path: Path, served: Kit, same_root: bool, named: str
) -> None:
    stranger = make_kit(tmp_path / "site-1", Root("other"), port=served.port)
    with listening(served):
        assert named in server_problem(
            replace(stranger, root=served.root) if same_root else stranger
        )


def test_a_server_answers_or_closes_without_an_alert(site: Kit, served: Kit) -> None:
    site = replace(site, port=served.port)
    with listening(served):
        assert server_problem(site) == ""
    with listening(served, curt=True):
        assert "certificate" in server_problem(site)


def test_a_server_that_is_not_there_is_named(site: Kit) -> None:
    assert "nothing listens" in server_problem(site)
    assert "no-such-host.invalid" in server_problem(replace(site, host="no-such-host.invalid"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "firewall" in server_problem(
            replace(site, port=silent.getsockname()[1]), timeout=0.1
        )

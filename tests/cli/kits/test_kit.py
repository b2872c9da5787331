"""What a kit says of its party, and what is none."""

from pathlib import Path

import pytest

from medflare.cli.federation.kits.kit import Kit, open_kit
from medflare.core.errors import ConfigError


def test_site_and_server_by_name(site: Kit, server: Kit) -> None:
    assert (site.kind, site.name, site.host, site.port, site.key.name) == ("site", "site-1", "localhost", 1, "client.key")
    assert (server.kind, server.name, server.certificate.name) == ("server", "localhost", "server.crt")


def test_what_is_no_kit_is_one_line(tmp_path: Path, site: Kit) -> None:
    with pytest.raises(ConfigError, match="is no startup kit of a server or a site"):
        open_kit(tmp_path)
    file = site.folder / "startup" / "fed_client.json"
    for text, said in (("{", "not JSON"), ("[]", "must hold a JSON object"), ("{}", "not as FLARE 2.9 provisions it")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            open_kit(site.folder)

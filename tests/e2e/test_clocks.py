"""Machines by whose clocks no certificate is valid. That clocks are wrong by hours changes nothing, see test_provisioned.py."""

from collections.abc import Iterator

import pytest

from e2e.provisioned import HOUR, SERVER, ProvisionedFederation, text_of, wait_until
from e2e.simulation import END_TO_END

pytestmark = END_TO_END

DAY = 24 * HOUR


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProvisionedFederation]:
    """Provisioned, and not started."""
    federation = ProvisionedFederation(tmp_path_factory.mktemp("federation"), ("site-1",))
    federation.provision()
    yield federation
    federation.stop()


@pytest.mark.parametrize("party", [SERVER, "site-1"])
@pytest.mark.parametrize(("days", "remedy"), [(-1, "set the clock"), (4000, "set the clock, or have a new kit provisioned if it is right")])
def test_it_is_named_at_the_start(kits: ProvisionedFederation, party: str, days: int, remedy: str) -> None:
    with kits.clock(days * DAY):
        done = kits.script("start.sh", kits.kit(party), check=False)
    assert done.returncode != 0
    assert done.stderr.startswith(f"medflare: {party}: ") and " is valid from " in done.stderr
    assert done.stderr.strip().endswith(f"; {remedy}")


def test_flare_refuses_a_certificate_that_is_not_valid_yet(kits: ProvisionedFederation) -> None:
    """What `start.sh` foretells does happen."""
    log = kits.kit(SERVER) / "log.txt"
    with kits.clock(-DAY):
        kits.launch(SERVER)
    wait_until(lambda: "cert is not valid at validation time" in text_of(log), f"no word of the certificate in {log}")

"""Machines by whose clocks no certificate is valid. That clocks are wrong by hours changes nothing, see test_provisioned.py."""

import sys
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
@pytest.mark.parametrize("days", [-1, 4000])
def test_doctor_names_the_certificate(kits: ProvisionedFederation, party: str, days: int) -> None:
    with kits.clock(days * DAY):
        done = kits.command(sys.executable, "-m", "medflare.cli", "site", "doctor", kits.kit(party), check=False)
    assert done.returncode == 1
    assert any(line.startswith("FAILED   certificate") and "clock" in line for line in done.stdout.splitlines())


def test_flare_refuses_a_certificate_that_is_not_valid_yet(kits: ProvisionedFederation) -> None:
    """What `medflare site doctor` foretells does happen."""
    log = kits.kit(SERVER) / "log.txt"
    with kits.clock(-DAY):
        kits.launch(SERVER)
    wait_until(lambda: "cert is not valid at validation time" in text_of(log), f"no word of the certificate in {log}")

"""Provisioned startup kits, before a party is started: policies, keys, certificates."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from e2e.provisioned import HOUR, SCRIPTS, SERVER, ProvisionedFederation, text_of, wait_until
from e2e.simulation import END_TO_END

pytestmark = END_TO_END


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProvisionedFederation]:
    federation = ProvisionedFederation(tmp_path_factory.mktemp("federation"), ["site-1"])
    federation.provision()
    yield federation
    federation.stop()


@pytest.mark.parametrize(("kind", "party"), [("site", "site-1"), ("server", SERVER)])
def test_templates_are_what_a_kit_gets(
    provisioned: ProvisionedFederation, kind: str, party: str
) -> None:
    local = provisioned.kit(party) / "local"
    for template in (SCRIPTS / "local" / kind).glob("*.json"):
        expected = json.loads(template.read_text())
        actual = json.loads((local / template.name).read_text())
        if template.name == "medflare.json":
            # Its own.
            expected = {
                key: value
                for key, value in expected.items()
                if key not in ("data_root", "cache", "batch_size")
            }
        text = json.dumps(expected).replace(
            "/var/lib/medflare", str(provisioned.kit(party) / "storage")
        )
        assert json.loads(text) == actual, template


def test_keys_are_for_one_account_alone(provisioned: ProvisionedFederation) -> None:
    keys = [*provisioned.folder.rglob("*.key"), *provisioned.folder.rglob("cert.json")]
    assert {"client.key", "server.key", "cert.json"} <= {path.name for path in keys}
    assert {path.stat().st_mode & 0o077 for path in [*keys, *(path.parent for path in keys)]} == {0}


def test_no_file_of_a_kit_is_for_others(provisioned: ProvisionedFederation) -> None:
    files = [path for path in provisioned.kits.rglob("*") if not path.is_symlink()]
    assert provisioned.kit("lead") / "startup" / "fl_admin.sh" in files
    assert not [path for path in files if path.stat().st_mode & 0o077]


def test_a_kit_prepared_for_docker_keeps_its_launcher(provisioned: ProvisionedFederation) -> None:
    kit = provisioned.kit("site-1")
    provisioned.command(
        "nvflare", "deploy", "prepare", kit, "--config", SCRIPTS / "runtime" / "docker.yaml"
    )
    subprocess.run(
        [sys.executable, SCRIPTS / "party.py", "setup", kit / "prepared" / "docker"],
        capture_output=True,
        check=True,
    )
    resources = json.loads((kit / "prepared" / "docker" / "local" / "resources.json").read_text())
    assert "medflare.flare.executors.FedSMExecutor" in resources["class_allow_list"]
    assert any("docker" in component["path"].lower() for component in resources["components"])


def test_poc_project_has_the_same_people(provisioned: ProvisionedFederation) -> None:
    central, poc = (
        yaml.safe_load((SCRIPTS / name).read_text())["participants"]
        for name in ("project.yml", "project_poc.yml")
    )
    assert {one["role"] for one in poc if one["type"] == "admin"} == {
        one["role"] for one in central if one["type"] == "admin"
    }
    assert [one["name"] for one in poc if one["type"] == "client"] == [
        one["name"] for one in central if one["type"] == "client"
    ]


@pytest.mark.parametrize(("party", "days"), [(SERVER, -1), ("site-1", 4000)])
def test_doctor_says_that_a_certificate_is_not_valid(
    provisioned: ProvisionedFederation, party: str, days: int
) -> None:
    with provisioned.clock(24 * HOUR * days):
        done = provisioned.command(
            sys.executable,
            "-m",
            "medflare.cli",
            "site",
            "doctor",
            provisioned.kit(party),
            check=False,
        )
    assert done.returncode == 1
    assert any(
        line.startswith("FAILED   certificate") and "clock" in line
        for line in done.stdout.splitlines()
    )


def test_flare_refuses_a_certificate_that_is_not_valid_yet(
    provisioned: ProvisionedFederation,
) -> None:
    log = provisioned.kit(SERVER) / "log.txt"
    with provisioned.clock(-24 * HOUR):
        provisioned.launch(SERVER)
    wait_until(
        lambda: "cert is not valid at validation time" in text_of(log),
        f"no word of the certificate in {log}",
    )

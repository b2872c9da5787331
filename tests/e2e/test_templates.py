"""The site-local templates say what `medflare site setup` makes of freshly provisioned kits."""

import json
import subprocess
import sys

import pytest

from e2e.provisioned import SCRIPTS, SERVER, ProvisionedFederation

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> ProvisionedFederation:
    federation = ProvisionedFederation(tmp_path_factory.mktemp("federation"), ["site-1"])
    federation.provision()
    return federation


@pytest.mark.parametrize(("kind", "party"), [("site", "site-1"), ("server", SERVER)])
def test_templates_are_what_a_kit_gets(provisioned: ProvisionedFederation, kind: str, party: str) -> None:
    local = provisioned.kit(party) / "local"
    for template in (SCRIPTS / "local" / kind).glob("*.json"):
        expected, found = json.loads(template.read_text()), json.loads((local / template.name).read_text())
        if template.name == "medflare.json":
            expected = {key: value for key, value in expected.items() if key not in ("data_root", "cache", "batch_size")}  # its own
        text = json.dumps(expected).replace("/var/lib/medflare", str(provisioned.kit(party) / "storage"))
        assert json.loads(text) == found, template


def test_keys_are_for_one_account_alone(provisioned: ProvisionedFederation) -> None:
    keys = [*provisioned.folder.rglob("*.key"), *provisioned.folder.rglob("cert.json")]
    assert {"client.key", "server.key", "cert.json"} <= {path.name for path in keys}
    assert {path.stat().st_mode & 0o077 for path in [*keys, *(path.parent for path in keys)]} == {0}


def test_a_kit_prepared_for_docker_keeps_its_launcher(provisioned: ProvisionedFederation) -> None:
    kit = provisioned.kit("site-1")
    provisioned.command("nvflare", "deploy", "prepare", kit, "--config", SCRIPTS / "runtime" / "docker.yaml")
    subprocess.run([sys.executable, SCRIPTS / "party.py", "setup", kit / "prepared" / "docker"], capture_output=True, check=True)
    resources = json.loads((kit / "prepared" / "docker" / "local" / "resources.json").read_text())
    assert "medflare.flare.executors.FedSMExecutor" in resources["class_allow_list"]
    assert any("docker" in component["path"].lower() for component in resources["components"])


def test_poc_project_has_the_same_people(provisioned: ProvisionedFederation) -> None:
    import yaml

    central, poc = (yaml.safe_load((SCRIPTS / name).read_text())["participants"] for name in ("project.yml", "project_poc.yml"))
    assert {one["role"] for one in poc if one["type"] == "admin"} == {one["role"] for one in central if one["type"] == "admin"}
    assert [one["name"] for one in poc if one["type"] == "client"] == [one["name"] for one in central if one["type"] == "client"]

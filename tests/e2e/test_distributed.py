"""Distributed provisioning as docs/deployment.md describes it: every party makes its own key, which never leaves it."""

import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.provisioned import SCRIPTS, SERVER, ProvisionedFederation
from e2e.simulation import END_TO_END

pytestmark = END_TO_END

PARTIES = {SERVER: "server.yml", "site-1": "site.yml"}


class DistributedFederation(ProvisionedFederation):
    """A server and a site whose kits come from requests; each party's folder stands for its machine."""

    def __init__(self, folder: Path):
        super().__init__(folder, ["site-1"])
        self.kits = folder / "kits"
        shutil.copytree(SCRIPTS / "distributed", folder, dirs_exist_ok=True)
        for file in folder.glob("*.yml"):
            file.write_text(file.read_text().replace("8002", str(self.port)))

    def kit(self, name: str) -> Path:
        return self.folder / name / "kits" / "medflare" / "prod_00" / name

    def certify(self, name: str, fingerprint: str) -> Path:
        """A party's request, the admin's approval and the party's kit; returns the request's archive."""
        machine = self.folder / name
        machine.mkdir()
        self.command("nvflare", "cert", "request", "-p", PARTIES[name], "--out", machine / "request")
        (archive,) = (machine / "request").glob("*.zip")
        signed = self.folder / f"{name}.signed.zip"  # what goes over the network: this and the archive
        self.command("nvflare", "cert", "approve", archive, "-c", "ca", "--profile", "project_profile.yml", "--out", signed)
        kits = ("-w", machine / "kits", "--fingerprint", fingerprint)
        self.command("nvflare", "package", signed, "--request-dir", machine / "request", *kits)
        self.command(sys.executable, SCRIPTS / "install_local.py", self.kit(name))
        return archive


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[DistributedFederation]:
    running = DistributedFederation(tmp_path)
    yield running
    running.stop()


def test_keys_stay_where_they_were_made(federation: DistributedFederation) -> None:
    init = ("nvflare", "--format", "json", "cert", "init", "--profile", "project_profile.yml", "-o", "ca")
    root = json.loads(federation.command(*init).stdout)["data"]
    fingerprint = next(value for value in root.values() if str(value).startswith("SHA256:"))
    for party in PARTIES:
        archive = federation.certify(party, fingerprint)
        with zipfile.ZipFile(archive) as request:
            assert not [name for name in request.namelist() if b"PRIVATE KEY" in request.read(name)]
    keys = [file for file in federation.folder.rglob("*.key") if "ca" not in file.relative_to(federation.folder).parts]
    assert {file.relative_to(federation.folder).parts[0] for file in keys} == set(PARTIES)
    federation.start(*PARTIES)  # until the site has registered with the server


def test_another_root_is_refused(federation: DistributedFederation) -> None:
    federation.command("nvflare", "cert", "init", "--profile", "project_profile.yml", "-o", "ca")
    with pytest.raises(AssertionError, match=r"(?i)fingerprint"):
        federation.certify("site-1", "SHA256:" + ":".join(["00"] * 32))
    assert not federation.kit("site-1").exists()

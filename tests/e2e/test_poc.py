"""The job folder that the simulator runs, unchanged, in a POC federation of real processes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.provisioned import SCRIPTS, ProvisionedFederation, wait_until
from e2e.simulation import END_TO_END
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import run_local
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

SITES = ("site-1", "site-2")


class PocFederation(ProvisionedFederation):
    """Two sites of poc_workspace/project_poc.yml, prepared and started by `nvflare poc`."""

    def __init__(self, folder: Path):
        super().__init__(folder, SITES)
        self.kits = folder / "poc" / "medflare" / "prod_00"
        self.environment = {**self.environment, "NVFLARE_POC_WORKSPACE": str(folder / "poc")}

    def kit(self, name: str) -> Path:
        return super().kit("server" if name == "localhost" else name)

    def start_all(self) -> None:
        project = yaml.safe_load((SCRIPTS / "project_poc.yml").read_text())
        project["participants"] = [one for one in project["participants"] if one["type"] != "client" or one["name"] in SITES]
        for one in project["participants"]:
            if one["type"] == "server":
                one["fed_learn_port"] = self.port
        (self.folder / "project.yml").write_text(yaml.safe_dump(project))
        self.command("nvflare", "poc", "prepare", "-i", self.folder / "project.yml", "--force")
        self.command("nvflare", "poc", "start", "--no-wait")
        wait_until(lambda: len(self.connected()) == len(SITES), "the sites do not connect", every=2)

    def stop(self) -> None:
        """`nvflare poc start` leaves its processes to themselves: those that work in this folder are this federation's."""
        self.end_all_below(self.kits)


@pytest.fixture
def poc(tmp_path: Path) -> Iterator[PocFederation]:
    running = PocFederation(tmp_path)
    try:
        running.start_all()
        yield running
    finally:
        running.stop()


def test_the_same_job_folder_gives_the_same_results(poc: PocFederation, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    job = build_job("fedsm", tiny_task, rounds=2, seed=3, out=tmp_path / "job")
    assert (job / "app" / "custom").is_dir(), "with app/custom/, as the simulator takes it"
    identity = poc.submit(job)
    assert f"{identity} FINISHED:COMPLETED" in poc.watch(poc.meta(identity)["name"]).stdout
    listed = poc.command(sys.executable, "-m", "medflare.cli", "job", "list", "--kit", poc.kit("lead")).stdout
    assert identity[:8] in listed and "FINISHED:COMPLETED  fedsm   2" in listed
    poc.script("fetch.sh", poc.kit("lead"), identity, tmp_path / "fetched")
    expected = run_local("fedsm", tiny_task, SITES, rounds=2, seed=3)
    assert load_results(tmp_path / "fetched")["sites"] == json.loads(json.dumps(expected["sites"]))

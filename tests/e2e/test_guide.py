"""docs/deployment.md, literally: every party's commands, in the order of the page, make a federation that trains and delivers.

But for the port, the folder of the data, the task (small pictures), the number of rounds, and the second hospital's name and checks.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.provisioned import PATIENCE, ProvisionedFederation
from e2e.simulation import END_TO_END, ROOT
from helpers import downloaded_folders, small_tasks
from medflare.evaluation.results import find_results, load_results
from medflare.federation.local.loop import run_local

pytestmark = END_TO_END

SECTIONS = dict(
    part.split("\n", 1)
    for part in (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8").split("\n## ")[1:]
)
SITES = ("site-1", "site-2")
PATIENTS = {"training": 8, "validation": 5, "test": 5}
ROUNDS = 2


def commands(party: str) -> str:
    """The blocks of a party's section, one after the other: what a person types."""
    actual = re.findall(r"^```bash\n(.*?)^```$", SECTIONS[party], re.MULTILINE | re.DOTALL)
    assert actual, f"nothing to do for {party}"
    return "".join(actual)


class Person:
    """Somebody at a terminal, in the folder of the checkout."""

    def __init__(self, federation: ProvisionedFederation, checkout: Path):
        self.federation, self.checkout = federation, checkout

    def types(self, text: str, **changed: str) -> str:
        """All of it in one shell that stops at the first failure; returns what was printed."""
        for word, other in changed.items():
            assert word in text, f"the page does not say {word}"
            text = text.replace(word, other)
        environment = {
            **self.federation.environment,
            "MEDFLARE_ROOT_PASSPHRASE": "correct horse battery",
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture
def task() -> dict[str, Any]:
    return {**small_tasks.SEGMENTATION, "name": "stripes", "labels": ["stripe"]}


@pytest.fixture
def checkout(tmp_path: Path, task: dict[str, Any]) -> Path:
    """Links to this checkout, and what a hospital has: pictures, and the task that the lead has sent."""
    folder = tmp_path / "checkout"
    (folder / "app_configs").mkdir(parents=True)
    (folder / "app_configs" / "brain_lgg.json").write_text(json.dumps(task))
    (folder / "custom").symlink_to(ROOT / "custom")
    (folder / "poc_workspace").mkdir()
    for file in (ROOT / "poc_workspace").iterdir():
        if file.name != "project.yml":
            (folder / "poc_workspace" / file.name).symlink_to(file)
    for number, site in enumerate(SITES):
        root = tmp_path / "data" / site
        entries = {
            split: [f"{split}-{place}" for place in range(count)]
            for split, count in PATIENTS.items()
        }
        for split in entries.values():
            for place, name in enumerate(split):
                downloaded_folders.picture(root / f"{name}.png", value=90 + 10 * place + number)
                downloaded_folders.mask(root / f"{name}-mask.png")
        listed = {
            split: [
                {"image": f"{name}.png", "label": f"{name}-mask.png", "patient": name}
                for name in names
            ]
            for split, names in entries.items()
        }
        (root / "datalist.json").write_text(json.dumps(listed))
    return folder


@pytest.fixture
def person(checkout: Path, tmp_path: Path) -> Iterator[Person]:
    """Whatever runs in the folder at the end is the federation's."""
    federation = ProvisionedFederation(tmp_path, SITES)
    project = (ROOT / "poc_workspace" / "project.yml").read_text()
    assert project.count("8002") == 1
    (checkout / "poc_workspace" / "project.yml").write_text(
        project.replace("8002", str(federation.port))
    )
    federation.environment["MISSING_PACKAGES"] = ""
    yield Person(federation, checkout)
    federation.end_all_below(checkout)


def test_the_page_leads_to_delivered_models(
    person: Person, checkout: Path, task: dict[str, Any], tmp_path: Path
) -> None:
    data = {"/data/": f"{tmp_path}/data/"}
    output = person.types(commands("Project admin"))
    assert "startup kits: federation/medflare/prod_00" in output and "localhost is up" in output
    assert (tmp_path / "medflare-storage").is_dir(), "outside of the checkout"
    first, second = SITES
    section = commands("Site administrator")
    assert f"{first} is up" in person.types(section, **data)
    # The page's checks once: each imports torch.
    needed = ("export ", "medflare site setup ", "poc_workspace/start.sh ")
    lines = [line for line in section.splitlines(keepends=True) if line.startswith(needed)]
    assert f"{second} is up" in person.types("".join(lines).replace(first, second), **data)
    output = person.types(commands("Lead"), **{"--rounds 20": f"--rounds {ROUNDS}"})
    assert "COMPLETED" in output
    assert "fedsm" in person.types(commands("Member"))

    results = load_results(checkout / "results")
    report = find_results(checkout / "results").with_name("report.html").read_text()
    assert "<svg" in report, "where nothing is missing, the report has its figures"
    plain = run_local("fedsm", task, SITES, rounds=ROUNDS, seed=0, data_root=tmp_path / "data")
    assert results["sites"] == plain["sites"]
    for site in SITES:
        (own,) = (checkout / "federation" / "medflare" / "prod_00" / site).glob(
            "medflare/*/deployed/card.json"
        )
        assert json.loads(own.read_text())["site"] == site
        kit = own.parents[3]
        strangers = [
            path
            for path in (kit, *kit.rglob("*"))
            if not path.is_symlink() and path.stat().st_mode & 0o077
        ]
        assert not strangers, "nothing under a site's folder is readable by others"

"""What cannot work is said before anything is read or trained, and what failed ends in one line."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.fixture_types import Refused
from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.core.files import write_atomically
from medflare.evaluation.report import write_results
from medflare.evaluation.results import RunRecord, SiteRecord
from medflare.flare.recipes import FedAvgRecipe, MedflareRecipe, check_place


@pytest.mark.parametrize("engine", ["flare", "local"])
def test_too_few_sites_are_no_federation(engine: str, tmp_path: Path, refused: Refused) -> None:
    call = ["run", "fedavg", "--engine", engine, "--out", str(tmp_path / "runs"), "--sites", "2"]
    assert "--min-sites 5" in refused(*call, "--min-sites", "5")
    assert "--min-sites 2" in refused(*call, "--outside", "site-2", "--min-sites", "2")
    assert "--outside" in refused(*call, "--outside", "site-1,site-2")
    assert "--weights" in refused(*call, "--weights", "nosuch.pth"), "nothing would read them"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["a/b", "siteé", "site 1", "a.b", ""])
def test_names_that_flare_cannot_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine local"):
        check_place(["site-1", name], tmp_path)


def test_a_folder_that_flare_cannot_have(tmp_path: Path, refused: Refused) -> None:
    assert "my runs" in refused("run", "fedavg", "--out", str(tmp_path / "my runs"))
    assert not list((tmp_path / "my runs").glob("*"))


@pytest.mark.parametrize("with_results", [False, True])
def test_a_simulation_that_failed(
    with_results: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def execute(recipe: MedflareRecipe, env: Any) -> None:
        if with_results:
            record = RunRecord(
                "fedavg",
                None,
                seed=0,
                rounds=1,
                sites={"site-1": SiteRecord("inside")},
                reason="lost",
            )
            write_results(
                Path(env.workspace_root) / "job" / "server" / "simulate_job" / "medflare", record
            )
        raise RuntimeError("Simulation failed with return code 2.")

    monkeypatch.setattr(FedAvgRecipe, "execute", execute)
    monkeypatch.setattr(MedflareRecipe, "execute", execute)
    command = ["run", "fedavg", "--sites", "1", "--out", str(tmp_path)]
    if not with_results:
        assert "return code 2" in refused(*command)
    else:
        assert main(command) == 1
        assert (
            json.loads((tmp_path / "fedavg-phantom-seed0" / "results.json").read_text())["reason"]
            == "lost"
        )


def test_a_job_takes_nothing_away_that_lies_beside_it(tmp_path: Path, refused: Refused) -> None:
    call = ("job", "fedavg", "--out", str(tmp_path / "job"))
    assert main(call) == 0 and main((*call, "--force")) == 0
    (tmp_path / "job/notes.txt").write_text("mine")
    assert "notes.txt" in refused(*call, "--force")
    assert (tmp_path / "job/notes.txt").read_text() == "mine"


def test_what_cannot_be_resumed_says_what_it_is(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "run/fedavg-phantom/server/simulate_job/medflare").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name, named in (("nosuch", "nosuch"), ("run", "simulator"), ("empty", "empty")):
        assert named in refused("resume", str(tmp_path / name))


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "medflare.core.files.os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "full"))
    )
    with pytest.raises(OSError, match=r"results\.json") as caught:
        write_atomically(tmp_path / "results.json", b"{}")
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())

"""What cannot work is said before anything is read or trained, and what failed ends in one line."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.core.store import make_folder, write_atomically
from medflare.evaluation.report import write_results
from medflare.evaluation.results import RunRecord, SiteRecord
from medflare.flare.recipes import FedAvgRecipe, MedflareRecipe, check_place


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command ends with."""
    assert main(arguments) == 1
    output = capsys.readouterr().err
    assert output.startswith("medflare: ") and output.count("\n") == 1
    return output


@pytest.mark.parametrize("engine", ["flare", "local"])
def test_too_few_sites_are_no_federation(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["run", "fedavg", "--engine", engine, "--out", str(tmp_path / "runs"), "--sites"]
    assert "--min-sites 5" in refused(capsys, *call, "2", "--min-sites", "5")
    assert "--min-sites 2" in refused(capsys, *call, "2", "--outside", "site-2", "--min-sites", "2")
    assert "--outside" in refused(capsys, *call, "2", "--outside", "site-1,site-2")
    assert not (tmp_path / "runs").exists()


def test_weights_that_nothing_would_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--weights" in refused(capsys, "run", "fedavg", "--weights", "nosuch.pth", "--out", str(tmp_path))


@pytest.mark.parametrize("name", ["a/b", "siteé", "site 1", "a.b", ""])
def test_names_that_flare_cannot_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FLARE"):
        check_place(["site-1", name], tmp_path)


def test_a_folder_that_flare_cannot_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = refused(capsys, "run", "fedavg", "--out", str(tmp_path / "my runs"))
    assert "my runs" in output
    assert not list((tmp_path / "my runs").glob("*"))


class TestASimulationThatFailed:
    """FLARE's environment then raises RuntimeError, with results or without."""

    @pytest.fixture(autouse=True)
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def execute(recipe: MedflareRecipe, env: Any) -> None:
            if self.results:
                record = RunRecord(method="fedavg", task=None, seed=0, rounds=1, sites={"site-1": SiteRecord("inside")}, reason="lost")
                write_results(Path(env.workspace_root) / "job" / "server" / "simulate_job" / "medflare", record)
            raise RuntimeError("Simulation failed with return code 2.")

        monkeypatch.setattr(FedAvgRecipe, "execute", execute)
        monkeypatch.setattr(MedflareRecipe, "execute", execute)

    results = False

    def test_without_results(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = refused(capsys, "run", "fedavg", "--sites", "1", "--out", str(tmp_path))
        assert "return code 2" in output

    def test_with_results(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.__class__.results = True
        try:
            assert main(["run", "fedavg", "--sites", "1", "--out", str(tmp_path)]) == 1
        finally:
            self.__class__.results = False
        assert "FAILED" in capsys.readouterr().out
        (run,) = tmp_path.iterdir()
        assert json.loads((run / "results.json").read_text())["reason"] == "lost"


def test_a_job_takes_nothing_away_that_lies_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ("job", "fedavg", "--out", str(tmp_path / "job"))
    assert main(call) == 0 and main(call) == 0
    (tmp_path / "job/notes.txt").write_text("mine")
    capsys.readouterr()
    assert "notes.txt" in refused(capsys, *call)
    assert (tmp_path / "job/notes.txt").read_text() == "mine"


def test_what_cannot_be_resumed_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nosuch" in refused(capsys, "resume", str(tmp_path / "nosuch"))
    (tmp_path / "run/fedavg-phantom/server/simulate_job/medflare").mkdir(parents=True)
    assert "simulator" in refused(capsys, "resume", str(tmp_path / "run"))
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, "resume", str(tmp_path / "empty"))


def test_results_of_the_newest_run_whatever_its_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = (tmp_path / "flare/x/server/simulate_job/medflare", tmp_path / "local")
    for age, (place, method) in enumerate(zip(places, ("fedavg", "fedprox"), strict=True)):
        sites = {"site-1": SiteRecord("inside")}
        write_results(place, RunRecord(method=method, task=None, seed=0, rounds=1, sites=sites, reason="lost"))
        os.utime(place / "results.json", (age + 1, age + 1))
    main(["results", str(tmp_path)])
    assert "fedprox on" in capsys.readouterr().out


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("medflare.core.store.os.fsync", full)
    with pytest.raises(OSError, match=r"results\.json") as caught:
        write_atomically(tmp_path / "results.json", b"{}")
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "out")

"""`medflare job fetch`: a job by its name, its results for this account alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flare.jobs.sessions import Served
from medflare import run_local
from medflare.cli import main
from medflare.flare.jobs import sessions
from small import tiny_phantom


class Download(Served):
    """A server whose one job has results."""

    def download_job_result(self, identity: str, destination: str) -> str:
        folder = Path(destination) / identity
        run_local("fedavg", tiny_phantom(), ["site-1", "site-2"], rounds=1, seed=0, out=folder / "medflare")
        (folder / "beside.txt").write_text("a file as FLARE writes it")
        return str(folder)


@pytest.fixture
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(kit: Path) -> Iterator[Served]:
        yield Download()

    monkeypatch.setattr(sessions, "session", opened)


@pytest.mark.usefixtures("_served")
def test_a_job_is_fetched_by_its_name_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "fetch", "fedsm-brain", "--kit", "lead", "--out", str(tmp_path / "results")]) == 0
    assert "COMPLETED" in capsys.readouterr().out
    assert (tmp_path / "results" / "id" / "beside.txt").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("_served")
def test_a_job_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "fetch", "fedsm-brian", "--kit", "lead", "--out", str(tmp_path / "results")]) == 1
    assert "unknown job 'fedsm-brian'; did you mean fedsm-brain" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()

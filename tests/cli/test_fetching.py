"""`medflare job fetch`: a job by its name, its results for this account alone."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from cli.fake_kits import Root, make_kit
from flare.jobs.sessions import Served, job
from helpers.fixture_types import Refused
from helpers.small_tasks import tiny_phantom
from medflare import run_local
from medflare.cli import main
from medflare.core.errors import MedflareError
from medflare.flare.jobs import sessions
from medflare.flare.jobs.sessions import fetch_job

ID = "11112222-3333-4444-8555-666677778888"


class Download(Served):
    """A server whose one job has results; they come into the kit's transfer/, as FLARE does it."""

    def __init__(self, transfer: Path, results: Path):
        super().__init__()
        self.download_dir, self._results = str(transfer), results

    def list_jobs(self, detailed: bool) -> list[dict[str, Any]]:
        return [job(ID)]

    def download_job_result(self, identity: str) -> str:
        places = (Path(self.download_dir) / name for name in (identity, f"{identity}__1"))
        location = next(place for place in places if not place.exists())
        shutil.copytree(self._results, location)
        return str(location)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    run_local(
        "fedavg", tiny_phantom(), ["site-1", "site-2"], rounds=1, seed=0, out=folder / "medflare"
    )
    before = os.umask(0o077)
    (folder / "beside.txt").write_text("a file as FLARE writes it")
    os.umask(before)
    return folder


@pytest.fixture
def transfer(tmp_path: Path) -> Path:
    folder = tmp_path / "transfer"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch, transfer: Path, results: Path) -> None:
    @contextmanager
    def opened(kit: Path) -> Iterator[Served]:
        yield Download(transfer, results)

    monkeypatch.setattr(sessions, "session", opened)


PAGES = (".html", ".htm", ".svg")
FETCH = ("job", "fetch", "fedsm-brain", "--kit", "lead", "--out")


def fetch(out: Path) -> int:
    return main([*FETCH, str(out)])


def test_a_job_is_fetched_by_its_name_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    out = tmp_path / "results"
    assert (
        "'fedsm-brian'"
        in refused("job", "fetch", "fedsm-brian", "--kit", "lead", "--out", str(out))
        and not out.exists()
    )
    assert fetch(out) == 0
    assert "COMPLETED" in capsys.readouterr().out
    assert (out / ID / "beside.txt").stat().st_mode & 0o077 == 0


def test_pages_of_a_server_are_replaced_by_one_of_its_numbers(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "server"
    shutil.copytree(results, server)
    for page in ("medflare/report.html", "index.HTM", "medflare/curve.svg"):
        (server / page).write_text("<script>alert(1)</script>")
    with (server / "medflare/metrics.jsonl").open("a") as file:
        file.write('{"cut sho')
    served = Download(tmp_path / "transfer", server)
    monkeypatch.setattr(sessions, "session", lambda kit: nullcontext(served))
    assert fetch(tmp_path / "out") == 0
    pages = [path for path in (tmp_path / "out").rglob("*.*") if path.suffix.lower() in PAGES]
    assert [str(page.relative_to(tmp_path / "out" / ID)) for page in pages] == [
        "medflare/report.html"
    ]
    text = (tmp_path / "out" / ID / "medflare/report.html").read_text()
    assert "<script" not in text and "site-2" in text and "Training loss" in text
    (server / "medflare/metrics.jsonl").write_text('{"sites": 3}\n')
    assert fetch(tmp_path / "out") == 1
    assert not [*(tmp_path / "out").rglob("*.html")]


def test_hidden_files_of_a_server_stay_away(
    tmp_path: Path, transfer: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next `git status` there would run what .git/config says."""
    sent = tmp_path / "sent"
    shutil.copytree(results, sent)
    for name in (".git/config", "medflare/.envrc", ".git/.hidden", "config", "HEAD", "x/head"):
        (sent / name).parent.mkdir(exist_ok=True)
        (sent / name).write_text("touch owned")
    folder = fetch_job(cast(Any, Download(transfer, sent)), ID, tmp_path / "out")
    assert (folder / "beside.txt").exists() and not [*folder.rglob(".*")]
    assert not {path.name.casefold() for path in folder.rglob("*")} & {"head"}


def test_a_servers_id_of_a_job_is_no_folder_of_the_lead(tmp_path: Path, transfer: Path) -> None:
    for name in ("jobs", "*", "..", "11112222"):
        with pytest.raises(MedflareError, match="no id"):
            fetch_job(cast(Any, Download(transfer, tmp_path)), name, tmp_path)


def test_fetched_again_the_results_lie_where_they_lay(tmp_path: Path, transfer: Path) -> None:
    (transfer / ID).mkdir()
    out = tmp_path / "results"
    assert fetch(out) == 0
    (out / ID / "beside.txt").write_text("cut short")
    assert fetch(out) == fetch(out) == 0
    assert [path.name for path in out.iterdir()] == [ID] and not (out / ID / ID).exists()
    assert (out / ID / "beside.txt").read_text() == "a file as FLARE writes it"
    assert [path.name for path in transfer.iterdir()] == [ID]


def test_files_of_the_users_own_stay(tmp_path: Path, transfer: Path, refused: Refused) -> None:
    out = tmp_path / "results"
    assert fetch(out) == 0
    note = out / ID / "medflare" / "notes.txt"
    note.write_text("the user's own")
    assert str(note) in refused(*FETCH, str(out))
    assert note.exists() and not [*transfer.iterdir()]
    shutil.rmtree(out / ID)
    (out / ID).write_text("a file")
    assert "--out" in refused(*FETCH, str(out))


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, transfer: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def full(source: str, place: str, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)

    out = tmp_path / "results"
    for earlier in (False, True):
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "copyfile", full)
            assert "No space left" in refused(*FETCH, str(out))
        assert [path.name for path in out.glob("*")] == [ID] * earlier
        assert not [*transfer.iterdir()]
        assert fetch(out) == 0


def test_what_flare_could_not_unpack_is_one_line(
    tmp_path: Path, transfer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Download(transfer, tmp_path)

    def broken(identity: str) -> str:
        (transfer / f"{identity}__tx").mkdir()
        raise RuntimeError("runtime error encountered: failed to unzip: no space left")

    monkeypatch.setattr(opened, "download_job_result", broken)
    with pytest.raises(MedflareError, match="no space left"):
        fetch_job(cast(Any, opened), ID, tmp_path / "out")
    monkeypatch.setattr(opened, "download_job_result", lambda identity: None)
    with pytest.raises(MedflareError, match=f"job {ID}"):
        fetch_job(cast(Any, opened), ID, tmp_path / "out")
    assert not [*transfer.iterdir()] and not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("place", ["home", "transfer", "transfer/earlier", "transfer/../home"])
def test_a_server_cannot_name_a_folder_that_it_has_not_sent(
    place: str, tmp_path: Path, transfer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / "home", transfer / "earlier"):
        folder.mkdir()
        (folder / "letters.txt").write_text("of this account")
    opened = Download(transfer, tmp_path)
    monkeypatch.setattr(opened, "download_job_result", lambda identity: str(tmp_path / place))
    with pytest.raises(MedflareError, match=f"sent no results of job {ID}"):
        fetch_job(cast(Any, opened), ID, tmp_path / "out")
    assert (tmp_path / "home" / "letters.txt").exists()
    assert (transfer / "earlier" / "letters.txt").exists()


def test_an_expired_certificate_of_the_lead_is_named(tmp_path: Path, refused: Refused) -> None:
    kit = make_kit(tmp_path / "lead", Root(), days=(-30, -3))
    for command in (["list"], ["watch", "x"], ["fetch", "x"]):
        assert refused("job", *command, "--kit", str(kit.folder)).startswith(
            "medflare: lead: client.crt "
        )

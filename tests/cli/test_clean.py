"""`medflare clean` deletes with --yes only, and never what a run is for."""

import json
import os
from pathlib import Path

import pytest

from helpers.fixture_types import Refused
from helpers.small_tasks import tiny_phantom
from medflare import run_local
from medflare.cli import main

LASTING = ("results.json", "report.html", "metrics.jsonl")


def files_of(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run in the folder of all runs, beside one that was interrupted."""
    folder = tmp_path / "runs" / "fedavg"
    run_local("fedavg", tiny_phantom(), 2, rounds=1, seed=0, out=folder)
    return folder


def test_nothing_is_deleted_without_yes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(run)
    assert main(["clean", str(run.parent)]) == 0
    printed = capsys.readouterr().out
    assert (
        files_of(run) == before
        and f"{run}: COMPLETED" in printed
        and "delete with --yes" in printed
    )
    for what in ("copies of equal models", "checkpoint", "states of the sites"):
        assert f"  {what}: " in printed


def test_states_checkpoints_and_copies_are_freed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(run)
    assert main(["clean", str(run), "--yes"]) == 0
    after = files_of(run)
    assert after == {name: size for name, size in before.items() if name in after}, (
        "nothing else was changed"
    )
    gone = {name for name in before if name not in after}
    for name in gone:
        assert (
            name == "checkpoint.safetensors"
            or "/state/" in name
            or name.endswith(("model.safetensors", "card.json"))
        )
    for name in before:
        if name.startswith("models/") or "scores/" in name or name.endswith(LASTING):
            assert name in after
    assert {
        "sites/site-1/global/model.safetensors",
        "sites/site-2/deployed/model.safetensors",
        "checkpoint.safetensors",
    } <= gone
    assert main(["clean", str(run)]) == 0
    assert capsys.readouterr().out.endswith("0 B would be freed; delete with --yes\n")
    assert main(["results", str(run)]) == 0


def test_a_model_that_only_its_site_has_stays(run: Path) -> None:
    for folder in (run / "models").iterdir():
        for file in folder.iterdir():
            file.unlink()
    assert main(["clean", str(run), "--yes"]) == 0
    left = [name for name in files_of(run) if name.endswith("model.safetensors")]
    assert left == ["sites/site-1/deployed/model.safetensors"], "all are equal: one stays"


def test_an_interrupted_run_keeps_what_resume_needs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(
        json.dumps({**results, "status": "FAILED", "reason": "interrupted from the keyboard"})
    )
    assert main(["clean", str(run), "--yes"]) == 0
    assert "medflare resume can continue it" in capsys.readouterr().out
    assert main(["results", str(run)]) == 1
    assert f"next: medflare resume {run}\n" in capsys.readouterr().out
    results["configuration"]["settings"]["engine"] = "flare"
    (run / "results.json").write_text(json.dumps({**results, "status": "FAILED", "reason": "x"}))
    assert main(["results", str(run)]) == 1
    assert "medflare resume" not in capsys.readouterr().out
    assert {"checkpoint.safetensors"} <= files_of(run).keys() and any(
        "/state/" in name for name in files_of(run)
    )


def test_a_folder_without_runs_is_refused(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "models").mkdir()
    assert "no run here" in refused("clean", str(tmp_path / "photographs"), "--yes")
    assert "no run here" in refused("clean", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("command", ["clean", "resume"])
def test_a_link_in_the_folder_of_a_run_is_refused(
    command: str, run: Path, tmp_path: Path, refused: Refused
) -> None:
    """Whoever packs a run would let another person change any file."""
    state = tmp_path / "federation" / "state"
    state.mkdir(parents=True)
    (run / "sites" / "site-9").symlink_to(state.parent)
    (run / "results.json").unlink()
    before = files_of(run)
    assert "site-9 is a link that leads elsewhere; take it out" in refused(command, str(run))
    assert state.is_dir()
    assert files_of(run) == before


@pytest.mark.parametrize("kind", ["hard link", "pipe", "unreadable"])
def test_other_entries_that_lead_elsewhere_are_refused(
    kind: str, run: Path, tmp_path: Path, refused: Refused
) -> None:
    entry = run / "sites" / "entry"
    if kind == "hard link":
        (tmp_path / "bashrc").write_text("")
        os.link(tmp_path / "bashrc", entry)
    elif kind == "pipe":
        os.mkfifo(entry)
    else:
        entry.mkdir(mode=0o300)
        if os.access(entry, os.R_OK):
            pytest.skip("this account reads every folder")
    assert "entry" in refused("clean", str(run), "--yes")


def test_links_within_a_run_and_runs_behind_links(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulator's runs have links to their own files; a link beside runs is another's."""
    (run / "again.json").symlink_to("results.json")
    other = run.rename(tmp_path / "other")
    (run.parent / "linked").symlink_to(other)
    run.mkdir()
    (run / "results.json").write_bytes((other / "results.json").read_bytes())
    assert main(["clean", str(run.parent), "--yes"]) == 0
    assert "other" not in capsys.readouterr().out
    assert (other / "checkpoint.safetensors").exists()
    assert main(["clean", str(other), "--yes"]) == 0
    assert not (other / "checkpoint.safetensors").exists()


def test_a_folder_with_escapes_in_its_name_is_shown_without(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = run.rename(run.with_name("evil\x1b[2J"))
    assert main(["clean", str(run.parent)]) == 0
    assert main(["results", str(renamed)]) == 0
    assert "\x1b" not in capsys.readouterr().out

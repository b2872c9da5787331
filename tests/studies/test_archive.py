"""A study on disk: runs, rows in their order, and the same tables without training."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from medflare.core.errors import StateError
from medflare.studies.archive import SCORES_FILE, STUDY_FILE, read_study, run_folder, write_rows, write_run
from medflare.studies.statistics.seeds import Run
from medflare.studies.tables.report import study_report


def kept(out: Path, label: str, runs: Sequence[Run]) -> Sequence[Run]:
    named = [{**run, "configuration": {**run["configuration"], "settings": {"label": label}}} for run in runs]
    for run in named:
        write_run(run_folder(out, label, run["seed"]), run)
    return named


def test_a_study_comes_back_as_it_was(runs: list[Run], tmp_path: Path) -> None:
    with_scores = [{**run, "scores": {"A": {"global": {"patients": ["p"], "values": {"dice": [run["seed"] / 10]}}}}} for run in runs]
    groups = {label: kept(tmp_path, label, with_scores) for label in ("fedsm:lam=0.3", "fedavg")}
    write_rows(tmp_path, groups)
    found = read_study(tmp_path)
    assert found == groups and list(found) == list(groups), "in the order of the rows"
    assert study_report(found) == study_report(groups)


def test_models_that_score_alike_share_their_scores(runs: list[Run], tmp_path: Path) -> None:
    one, other = ({"patients": ["p"], "values": {"dice": [value]}} for value in (0.25, 0.5))
    scores = {"A": {"global": one, "personal": other, "deployed": dict(other)}, "B": {"global": other, "deployed": dict(other)}}
    (run,) = kept(tmp_path, "fedavg", [{**runs[0], "scores": scores}])
    written = json.loads(gzip.decompress((run_folder(tmp_path, "fedavg", run["seed"]) / SCORES_FILE).read_bytes()))
    assert written == {"A": {"global": one, "personal": other, "deployed": "personal"}, "B": {"global": other, "deployed": "global"}}
    assert read_study(tmp_path)["fedavg"][0]["scores"] == scores


def test_what_single_patients_scored_lies_apart(runs: list[Run], tmp_path: Path) -> None:
    (run,) = kept(tmp_path, "fedavg", [{**runs[0], "scores": {"A": {"global": {"patients": ["Jane Doe"], "values": {}}}}}])
    folder = run_folder(tmp_path, "fedavg", run["seed"])
    assert "Jane Doe" not in (folder / "results.json").read_text()
    (folder / SCORES_FILE).unlink()
    assert "scores" not in read_study(tmp_path)["fedavg"][0]


def test_of_elections_the_rounds_are_kept_where_curves_hold_the_votes(runs: list[Run], tmp_path: Path) -> None:
    election = {"round": 1, "candidates": [{"round": 1, "value": 0.5, "votes": {"A": 0.5}}]}
    curves = {"global": {"A": [[1, 0.5]]}}
    for label, run in {"with": {**runs[0], "curves": curves}, "without": dict(runs[0])}.items():
        kept(tmp_path, label, [{**run, "elections": {"global": election}}])
    found = read_study(tmp_path)
    assert [found[label][0]["elections"]["global"] for label in ("with", "without")] == [{"round": 1}, election]


def test_rows_without_a_list_are_sorted_and_a_list_grows(runs: list[Run], tmp_path: Path) -> None:
    for label in ("b", "a"):
        kept(tmp_path, label, runs[:1])
    assert list(read_study(tmp_path)) == ["a", "b"]
    write_rows(tmp_path, ["b"])
    assert list(read_study(tmp_path)) == ["b", "a"]
    write_rows(tmp_path, ["c", "a"])
    assert json.loads((tmp_path / STUDY_FILE).read_text()) == {"rows": ["c", "a", "b"]}


def test_what_cannot_be_read_is_one_line(runs: list[Run], tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no run of a study here"):
        read_study(tmp_path)
    kept(tmp_path, "a", runs[:1])
    whole = gzip.compress(b'{"A": {"global": "personal"}}')
    damaged = (b"{", whole[:-9], whole[:12] + b"?" * 9 + whole[21:], gzip.compress(b"{"), whole)
    for file, content in ((STUDY_FILE, b"[]"), *((f"a/seed0/{SCORES_FILE}", content) for content in damaged)):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(StateError, match=file.rpartition("/")[2]) as refused:
            read_study(tmp_path)
        assert "\n" not in str(refused.value)
        (tmp_path / file).unlink()

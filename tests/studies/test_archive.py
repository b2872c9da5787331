"""A study in one file: runs, rows in their order, and the same tables without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from medflare.core.errors import StateError
from medflare.studies.archive import STUDY_FILE, read_runs, read_study, run_name, write_rows, write_run
from medflare.studies.statistics import Run
from medflare.studies.tables.report import study_report


def kept(out: Path, label: str, runs: Sequence[Run]) -> Sequence[Run]:
    named = [{**run, "configuration": {**run["configuration"], "settings": {"label": label}}} for run in runs]
    for run in named:
        write_run(out, run_name(label, run["seed"]), run)
    return named


def entry(out: Path, name: str) -> Any:
    with ZipFile(out / STUDY_FILE) as archive:
        return json.loads(archive.read(name))


def test_a_study_is_read_as_it_was_written(runs: list[Run], tmp_path: Path) -> None:
    with_scores = [{**run, "scores": {"A": {"global": {"patients": ["p"], "values": {"dice": [run["seed"] / 10]}}}}} for run in runs]
    groups = {label: kept(tmp_path, label, with_scores) for label in ("fedsm:lam=0.3", "fedavg")}
    write_rows(tmp_path, groups)
    found = read_study(tmp_path)
    assert found == groups and list(found) == list(groups), "in the order of the rows"
    assert study_report(found) == study_report(groups)
    assert [file.name for file in tmp_path.iterdir()] == [STUDY_FILE]
    before = (tmp_path / STUDY_FILE).read_bytes()
    write_run(tmp_path, "fedavg/seed0", groups["fedavg"][0])
    assert (tmp_path / STUDY_FILE).read_bytes() == before, "the same runs, the same bytes"


def test_models_with_equal_scores_share_them(runs: list[Run], tmp_path: Path) -> None:
    one, other = ({"patients": ["p"], "values": {"dice": [value]}} for value in (0.25, 0.5))
    scores = {"A": {"global": one, "personal": other, "deployed": dict(other)}, "B": {"global": other, "deployed": dict(other)}}
    kept(tmp_path, "fedavg", [{**runs[0], "scores": scores}])
    written = {"A": {"global": one, "personal": other, "deployed": "personal"}, "B": {"global": other, "deployed": "global"}}
    assert entry(tmp_path, "fedavg/seed0/scores.json") == written
    assert read_study(tmp_path)["fedavg"][0]["scores"] == scores


def test_results_name_no_patient_and_do_without_the_scores(runs: list[Run], tmp_path: Path) -> None:
    kept(tmp_path, "fedavg", [{**runs[0], "scores": {"A": {"global": {"patients": ["Jane Doe"], "values": {}}}}}])
    assert (tmp_path / STUDY_FILE).stat().st_mode & 0o077 == 0, "the scores are for this account alone"
    results = entry(tmp_path, "fedavg/seed0/results.json")
    assert "Jane Doe" not in json.dumps(results)
    with ZipFile(tmp_path / STUDY_FILE, "w") as archive:
        archive.writestr("fedavg/seed0/results.json", json.dumps(results))
    assert "scores" not in read_study(tmp_path)["fedavg"][0]


def test_of_elections_the_rounds_are_kept_where_curves_hold_the_votes(runs: list[Run], tmp_path: Path) -> None:
    election = {"round": 1, "candidates": [{"round": 1, "value": 0.5, "votes": {"A": 0.5}}]}
    curves = {"global": {"A": [[1, 0.5]]}}
    for label, run in {"with": {**runs[0], "curves": curves}, "without": dict(runs[0])}.items():
        kept(tmp_path, label, [{**run, "model_selection": {"global": election}}])
    found = read_study(tmp_path)
    assert [found[label][0]["model_selection"]["global"] for label in ("with", "without")] == [{"round": 1}, election]


def test_rows_without_a_list_are_sorted_and_a_list_grows(runs: list[Run], tmp_path: Path) -> None:
    for label in ("b", "a"):
        kept(tmp_path, label, runs[:1])
    assert list(read_study(tmp_path)) == ["a", "b"]
    write_rows(tmp_path, ["b"])
    assert list(read_study(tmp_path)) == ["b", "a"]
    write_rows(tmp_path, ["c", "a"])
    assert entry(tmp_path, "study.json") == {"rows": ["c", "a", "b"]}


def test_a_damaged_study_is_refused(runs: list[Run], tmp_path: Path) -> None:
    assert read_runs(tmp_path) == {}
    with pytest.raises(StateError, match=STUDY_FILE):
        read_study(tmp_path)
    kept(tmp_path, "a", runs[:1])
    file = tmp_path / STUDY_FILE
    whole = file.read_bytes()
    for content in (b"", whole[:-9], whole[:80] + b"?" * 9 + whole[89:]):
        file.write_bytes(content)
        with pytest.raises(StateError, match=STUDY_FILE):
            read_study(tmp_path)
    for content in (b"{", b"{}"):
        with ZipFile(file, "w") as archive:
            archive.writestr("a/seed0/results.json", content)
        with pytest.raises(StateError, match="a/seed0"):
            read_study(tmp_path)

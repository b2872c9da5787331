"""Studies: rows, the grid, its file, and that completed runs are not repeated."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from foreign.install import describe
from helpers.forked_trial import fork_trials
from helpers.small_tasks import tiny_phantom
from medflare.core import packages
from medflare.core.errors import ConfigError, StateError
from medflare.core.hyper import split_hyper
from medflare.evaluation.results import RunRecord, SiteRecord, build_results, validate_results
from medflare.methods import catalogue
from medflare.methods.catalogue import get_method
from medflare.studies import cluster as clusters
from medflare.studies import study
from medflare.studies.candidates import Candidate, rows_of
from medflare.studies.costs import PEAK
from medflare.studies.references import CENTRALISED, POOLED, REFERENCES, SINGLE_SITE, Draw, Setting
from medflare.studies.report import study_report
from medflare.studies.statistics import Results
from medflare.studies.study import (
    STUDY_FILE,
    _finished,
    _Job,
    read_runs,
    read_study,
    run_name,
    run_study,
    study_tables,
    write_rows,
    write_run,
)
from medflare.studies.tables import StudyTables
from medflare.tasks.config import load_task

TASK = load_task(tiny_phantom())
SETTING = Setting(TASK, ("site-1", "site-2"), rounds=1)


def test_a_row_is_parsed() -> None:
    row = Candidate.parse("fedsm:lam=0.3,selection=last")
    assert row.hyper == split_hyper(
        {"lam": 0.3, "selection": "last"}, get_method("fedsm").hyper_classes, "fedsm"
    )
    pair = Candidate.parse("fedavg:server_algorithm=grace,server.selection=last")
    assert (pair.server_algorithm, pair.hyper) == (
        "grace",
        {"site": {}, "server": {"selection": "last"}},
    )
    assert Candidate.parse("single-site:site.reset_optimizer=true").hyper["site"] == {
        "reset_optimizer": True
    }
    alone = Candidate.parse("single-site:method=prr,det=false")
    assert (alone.method, alone.trained_as, alone.hyper["site"]) == (
        "single-site",
        "prr",
        {"det": False},
    )


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("fedsm:lamb=1", "lam"),
        ("fedavg:site.selection=last", "site.selection"),
        ("fedavgg", "fedavgg"),
        ("single-site:site_algorithm=moon", "site_algorithm"),
        ("constant:selection=last", "selection"),
        ("fedavg:method=prr", "method"),
        ("single-site:method=prr,lam=1", "lam"),
    ],
)
def test_a_wrong_row_raises_an_error(text: str, token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        Candidate.parse(text)


def test_a_study_keeps_its_runs_and_writes_tables(tmp_path: Path) -> None:
    lines: list[str] = []
    candidates = list(map(Candidate.parse, (SINGLE_SITE, "fedavg", CENTRALISED)))
    groups = run_study(candidates, SETTING, [0], tmp_path, say=lines.append)
    for runs in groups.values():
        validate_results(runs[0])
        assert (
            set(runs[0]["sites"]) == set(runs[0]["scores"]) == {"site-1", "site-2"}
            and POOLED not in runs[0]["sites"]
        )
        assert runs[0]["mean"]["inside"]["deployed"]["dice"] is not None
    patients = [runs[0]["scores"]["site-1"]["deployed"]["patients"] for runs in groups.values()]
    assert patients[0]
    for of in patients:
        assert of == patients[0], "all rows were tested on the same patients"
    assert groups[SINGLE_SITE][0]["traffic"] == {"down_bytes": 0, "up_bytes": 0}
    titles = [
        line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("#")
    ]
    metrics = []
    for metric in ("dice", "iou", "hd95"):
        metrics += ["## " + metric, f"## {metric}, what the mean hides"]
    assert titles == [
        "# phantom, 1 rounds",
        *metrics,
        "## dice by structure or class, deployed model",
        "## dice, differences",
    ]
    assert len(lines) == 3
    assert run_study(candidates, SETTING, [0], tmp_path, say=lines.append) == groups
    assert len(lines) == 3, "nothing was run again"


def test_a_method_without_a_model_for_outside_sites_runs_without_the_left_out_one(
    tmp_path: Path,
) -> None:
    rows = [Candidate.parse("fedavg"), Candidate.parse("fedamp")]
    setting = dataclasses.replace(SETTING, sites=("site-1", "site-2", "site-3"))
    groups = run_study(rows, setting, [0], tmp_path, left_out=["site-3"])
    roles = {}
    for label, of_label in groups.items():
        roles[label] = {name: site["role"] for name, site in of_label[0]["sites"].items()}
    for of_label in groups.values():  # what it cost is on record
        assert of_label[0]["seconds"]["processor"] > 0 and 2**26 < of_label[0][PEAK] < 2**36
    inside = {"site-1": "inside", "site-2": "inside"}
    assert roles == {"fedavg": {**inside, "site-3": "outside"}, "fedamp": inside}


def test_each_left_out_site_is_outside(tmp_path: Path) -> None:
    groups = run_study(
        list(map(Candidate.parse, ("fedavg", "constant"))),
        SETTING,
        [1],
        tmp_path,
        left_out=SETTING.sites,
    )
    for runs in groups.values():
        for run in runs:
            assert run["configuration"]["task"]["resplit"] == 1, "the seed draws the split"
        roles = []
        for run in runs:
            roles.append({name: site["role"] for name, site in run["sites"].items()})
        assert roles == [
            {"site-1": "outside", "site-2": "inside"},
            {"site-1": "inside", "site-2": "outside"},
        ]
    table = (tmp_path / "table.md").read_text().splitlines()
    (line,) = [
        line for line in table if line.startswith("| constant | global, deployed | outside |")
    ]
    cells = line.split(" | ")
    assert cells[4:7] == ["–", "–", "1"], "one seed has no spread"
    assert " to " in cells[7] and "Wilcoxon" in cells[8]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rows that were run; a run only records how it was called."""
    rows: list[str] = []

    def run(candidate: Candidate, draw: Draw) -> dict[str, Any]:
        rows.append(candidate.row)
        metrics = {"deployed": {"dice": 0.5}}
        sites = {}
        for site in draw.setting.sites:
            sites[site] = SiteRecord(draw.role(site), metrics=metrics)
        return build_results(
            RunRecord(
                candidate.method,
                draw.task,
                draw.seed,
                draw.setting.rounds,
                sites,
                hyper=candidate.effective,
                seconds={"total": 1.0},
            )
        )

    monkeypatch.setattr(Candidate, "run", run)
    return rows


def test_an_unknown_reference_names_the_references() -> None:
    with pytest.raises(ConfigError, match="unknown reference 'constnt'; did you mean constant"):
        rows_of(["fedavg"], ["constnt"], TASK)


@pytest.mark.parametrize(
    "text",
    ["fedsm", "fedavg:server_algorithm=grace", "single-site:method=prr,det=false", *REFERENCES],
)
def test_a_row_has_the_hyper_parameters_of_its_runs(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_trials(monkeypatch)
    task = dataclasses.replace(TASK, network={**TASK.network, "norm": "batch"}, size=(8, 8))
    row = Candidate.parse(text, None if text == "constant" else "last")
    run = row.run(Draw(Setting(task, SETTING.sites, 1), 0))
    assert run["configuration"]["hyper"] == json.loads(json.dumps(row.effective))


@pytest.mark.parametrize(
    ("selection", "setting", "token"),
    [
        (None, {"rounds": 4}, "rounds = 1"),
        (None, {"sites": ("site-1", "site-2", "site-3")}, "sites"),
        (None, {"task": dataclasses.replace(TASK, size=(16, 16))}, "task.size"),
        ("last", {}, "server.selection"),
        (None, {"rounds": 2, "task": dataclasses.replace(TASK, batch_size=2)}, "task.batch_size"),
    ],
)
def test_kept_runs_with_other_settings_raise_an_error(
    selection: str | None, setting: dict[str, Any], token: str, tmp_path: Path, trained: list[str]
) -> None:
    run_study([Candidate.parse("fedavg")], SETTING, [0], tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert files.keys() == {"table.md", "study.html", STUDY_FILE, study._LOCK}
    candidates = [Candidate.parse("fedprox", selection), Candidate.parse("fedavg", selection)]
    with pytest.raises(StateError, match=rf"fedavg/seed0.*{token}"):
        run_study(candidates, dataclasses.replace(SETTING, **setting), [0], tmp_path)
    assert trained == ["fedavg"]
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_a_kept_run_of_an_earlier_version_has_the_defaults_of_new_settings(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = [Candidate.parse("fedavg")]
    run_study(candidates, SETTING, [0], tmp_path)
    results = read_runs(tmp_path)["fedavg/seed0"]
    del (
        results["configuration"]["task"]["accumulate"],
        results["configuration"]["hyper"]["server"]["weighting"],
    )
    del results["configuration"]["settings"]["datalists"]  # not compared
    write_run(tmp_path, "fedavg/seed0", results)
    run_study(candidates, SETTING, [0], tmp_path)
    with monkeypatch.context() as environment:
        environment.setenv("MEDFLARE_DATA_ROOT", str(datalists(tmp_path / "data", "p")))
        run_study(candidates, SETTING, [0], tmp_path)
    with pytest.raises(StateError, match="accumulate"):
        run_study(
            candidates,
            dataclasses.replace(SETTING, task=dataclasses.replace(TASK, accumulate=2)),
            [0],
            tmp_path,
        )
    results["configuration"]["task"]["removed"] = 3
    write_run(tmp_path, "fedavg/seed0", results)
    with pytest.raises(StateError, match="removed"):
        run_study(candidates, SETTING, [0], tmp_path)
    assert trained == ["fedavg"]


def datalists(root: Path, patient: str) -> Path:
    """A folder for each of the study's sites."""
    for site in SETTING.sites:
        (root / site).mkdir(parents=True)
        (root / site / "datalist.json").write_text(
            json.dumps({"training": [{"image": "a.png", "label": 0, "patient": patient}]})
        )
    return root


def test_kept_runs_on_other_images_raise_an_error(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the data root was moved; without one, images are embedded in the task."""
    rows = [Candidate.parse("fedavg")]
    out = tmp_path / "out"
    root = datalists(tmp_path / "first", "p")
    monkeypatch.setenv("MEDFLARE_DATA_ROOT", str(root))
    run_study(rows, SETTING, [0], out)
    monkeypatch.setenv("MEDFLARE_DATA_ROOT", str(root.rename(tmp_path / "moved")))
    run_study(rows, SETTING, [0], out)
    assert trained == ["fedavg"] and str(tmp_path) not in json.dumps(read_runs(out))
    for other in ("", str(datalists(tmp_path / "second", "q"))):
        monkeypatch.setenv("MEDFLARE_DATA_ROOT", other)
        with pytest.raises(StateError, match=r"datalist\.site-1"):
            run_study(rows, SETTING, [0], out)


def fork_processes(patch: pytest.MonkeyPatch) -> None:
    """Processes of a study are forks, which need not import torch and MONAI again; test_a_process_that_ends_fails_its_run starts new ones."""
    patch.setattr(study, "get_context", lambda method: get_context("fork"))


def test_results_can_be_sent_by_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """IOP-FL's results once held keys with validators, so that --processes 2 failed."""
    fork_processes(monkeypatch)
    setting = Setting(TASK, ("site-1", "site-2", "site-3"), rounds=1)
    job = _Job(
        Candidate.parse("iop_fl:route_epochs=1"), Draw(setting, 0, ("site-3",)), tmp_path / "errors"
    )
    ((_, results),) = _finished([job], 2)
    assert (
        results["sites"]["site-3"]["role"] == "outside"
        and json.loads(json.dumps(results)) == results
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_stops_the_study(processes: int, tmp_path: Path) -> None:
    jobs: list[Any] = [
        partial(signal.raise_signal, signal.SIGINT),
        *(partial(os.system, f"sleep 0.3; touch {tmp_path / str(n)}") for n in range(12)),
    ]
    # A shell starts what it runs in the background with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(_finished(jobs, processes))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len([*tmp_path.iterdir()]) < 6


def test_ctrl_c_waits_for_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_processes(monkeypatch)
    jobs: list[Any] = [partial(signal.raise_signal, signal.SIGINT), *[partial(time.sleep, 60)] * 3]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(_finished(jobs, 2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 30


BUGGY: Final = """
from medflare.methods import FedAvgSite, Method
class BuggySite(FedAvgSite):
    def fit(self, *arguments, **options):
        raise KeyError("first line\\nlast line")
METHOD = Method("buggy", "Buggy", "-", site=BuggySite, server="medflare.methods.fedavg.server:FedAvgServer")
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a package with the method "buggy", also for processes that this one starts."""
    folder = describe(tmp_path / "site", "buggy-methods", {"buggy": "buggy_methods:METHOD"})
    (folder / "buggy_methods").mkdir()
    (folder / "buggy_methods" / "__init__.py").write_text(BUGGY)
    monkeypatch.syspath_prepend(str(folder))
    caches = (catalogue._foreign, packages._code_hash, packages._distribution)
    for cache in caches:
        cache.cache_clear()
    yield folder / "buggy_methods" / "__init__.py"
    sys.modules.pop("buggy_methods", None)
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_row_that_fails_fails_alone(
    foreign: Path, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_processes(monkeypatch)
    rows = list(map(Candidate.parse, ("fedavg", "buggy", "constant")))
    groups = run_study(rows, SETTING, [0], tmp_path / "out", processes=processes)
    status = {label: runs[0]["status"] for label, runs in groups.items()}
    assert status == {"fedavg": "COMPLETED", "buggy": "FAILED", "constant": "COMPLETED"}
    (failed,) = groups["buggy"]
    validate_results(failed)
    where = "method 'buggy' fails at site site-1 in 'train' of round 1: KeyError: "
    assert (
        failed["reason"].startswith(where)
        and "(buggy_methods/__init__.py, line" in failed["reason"]
    )
    assert (tmp_path / "out" / "errors.log").read_text().count("Traceback") == 2, "and its cause"
    assert failed["versions"]["buggy-methods"] == "0.1"
    table = (tmp_path / "out" / "table.md").read_text()
    assert f"FAILED: buggy, seed 0: {failed['reason']}" in table and "| fedavg |" in table
    assert "KeyError" in (tmp_path / "out" / "study.html").read_text()
    lines: list[str] = []
    run_study(rows, SETTING, [0], tmp_path / "out", say=lines.append)
    lines = [line for line in lines if line.startswith("[")]
    assert len(lines) == 1 and "buggy/seed0: FAILED" in lines[0], "it alone is repeated"
    assert failed["reason"] in lines[0]


@pytest.mark.slow
def test_a_process_that_ends_fails_its_run(foreign: Path, tmp_path: Path) -> None:
    foreign.write_text(BUGGY.replace("raise KeyError(", "import os; os._exit(3 or "))
    jobs = [_Job(Candidate.parse("buggy"), Draw(SETTING, 0), tmp_path / "errors")]
    ((job, results),) = _finished(jobs, 2)
    assert job is jobs[0] and results["reason"].startswith("BrokenProcessPool")


def test_a_study_of_failed_rows_has_tables(foreign: Path, tmp_path: Path) -> None:
    groups = run_study([Candidate.parse("buggy")], SETTING, [0], tmp_path)
    assert groups["buggy"][0]["status"] == "FAILED"
    assert "FAILED: buggy" in (tmp_path / "table.md").read_text()


def test_tables_show_the_whole_folder(tmp_path: Path, trained: list[str]) -> None:
    rows = {text: [Candidate.parse(text)] for text in ("fedavg", "constant", "fedprox")}
    run_study([*rows["fedavg"], *rows["constant"]], SETTING, [0], tmp_path)
    groups = run_study(rows["fedprox"], SETTING, [1], tmp_path)
    assert list(groups) == ["fedprox"]
    study = study_tables(tmp_path)
    assert list(study.groups) == ["fedprox", "fedavg", "constant"]
    for file in ("table.md", "study.html"):
        text = (tmp_path / file).read_text()
        for label in rows:
            assert label in text
    run_study(rows["fedavg"], SETTING, [2], tmp_path)
    assert len(study_tables(tmp_path).groups["fedavg"]) == 2, "seeds 0 and 2"


def test_a_link_in_the_folder_of_a_study_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "authorized_keys"
    keys.write_text("ssh-ed25519 AAAA")
    out = tmp_path / "study"
    out.mkdir()
    (out / ".study.lock").symlink_to(keys)
    with pytest.raises(StateError, match="is a link that leads elsewhere"):
        run_study([Candidate.parse("constant")], SETTING, [0], out)
    assert keys.read_text() == "ssh-ed25519 AAAA"


def test_a_row_is_not_mixed_of_two_versions_of_its_code(
    foreign: Path, tmp_path: Path, trained: list[str]
) -> None:
    rows = [Candidate.parse("fedavg"), Candidate.parse("buggy")]
    lines: list[str] = []
    run_study(rows, SETTING, [0, 1], tmp_path)
    foreign.write_text(f"{BUGGY}# edited")
    packages._code_hash.cache_clear()
    del trained[:]
    run_study(rows[:1], SETTING, [0, 1, 2], tmp_path)
    for seeds in ([0, 1, 2], [2]):
        with pytest.raises(StateError, match=r"buggy/seed0.*buggy-methods code.*--rerun buggy"):
            run_study(rows, SETTING, seeds, tmp_path)
    assert trained == ["fedavg"]
    run_study(rows, SETTING, [2], tmp_path, rerun=["buggy"])
    assert sorted(trained) == ["buggy", "buggy", "buggy", "fedavg"], "seeds 0 and 1, too"
    run_study(rows, SETTING, [0, 1, 2], tmp_path, say=lines.append)
    for line in lines:
        assert "buggy" not in line
    with pytest.raises(ConfigError, match="--rerun fedprox"):
        run_study(rows, SETTING, [2], tmp_path, rerun=["fedprox"])


def test_all_rows_of_another_version_are_named_at_once(tmp_path: Path, trained: list[str]) -> None:
    rows = list(map(Candidate.parse, ("fedavg", "constant", "fedprox")))
    run_study(rows, SETTING, [0], tmp_path)
    for row in ("fedavg", "fedprox"):
        results = read_runs(tmp_path)[f"{row}/seed0"]
        results["versions"]["medflare"] = "0.0"
        write_run(tmp_path, f"{row}/seed0", results)
    remedy = "with --rerun fedavg --rerun fedprox, or"
    with pytest.raises(StateError, match=rf"rows .*: fedavg, fedprox \(fedavg/seed0 .*{remedy}"):
        run_study(rows, SETTING, [0], tmp_path)


@pytest.mark.parametrize(
    ("name", "warned"), [("medflare", None), ("medflare code", True), ("removed", False)]
)
def test_kept_runs_of_other_code_of_medflare(
    name: str, warned: bool | None, tmp_path: Path, trained: list[str]
) -> None:
    rows = [Candidate.parse("fedavg")]
    lines: list[str] = []
    run_study(rows, SETTING, [0], tmp_path)
    results = read_runs(tmp_path)["fedavg/seed0"]
    if name == "removed":  # results of earlier versions
        del results["versions"]["medflare code"]
        name = "medflare"
    results["versions"][name] = "0.0"
    write_run(tmp_path, "fedavg/seed0", results)
    if warned is None:
        with pytest.raises(StateError, match=r"medflare 0\.0.*--rerun fedavg"):
            run_study(rows, SETTING, [0], tmp_path)
    else:
        run_study(rows, SETTING, [0], tmp_path, say=lines.append)
        assert [line.startswith("warning: kept runs of fedavg") for line in lines] == [
            True
        ] * warned


def test_a_failed_run_is_repeated(runs: list[Results], tmp_path: Path, trained: list[str]) -> None:
    write_run(
        tmp_path,
        "fedavg/seed0",
        {**runs[0], "status": "FAILED", "reason": "A: no images are mounted"},
    )
    lines: list[str] = []
    for _ in range(2):
        groups = run_study([Candidate.parse("fedavg")], SETTING, [0], tmp_path, say=lines.append)
        assert [run["status"] for run in groups["fedavg"]] == ["COMPLETED"]
    assert len(lines) == 1 and "COMPLETED" in lines[0]
    assert trained == ["fedavg"], "once, and then it is kept"


def test_rows_whose_names_differ_in_punctuation_are_refused(
    tmp_path: Path, trained: list[str]
) -> None:
    candidate = Candidate.parse("fedavg")
    candidates = [dataclasses.replace(candidate, row=row) for row in ("lab/mean", "lab+mean")]
    with pytest.raises(ConfigError, match=r"'lab/mean' and 'lab\+mean' would have one place"):
        run_study(candidates, SETTING, [0], tmp_path)
    assert not trained


@pytest.mark.parametrize(
    ("rows", "seeds", "left_out", "token"),
    [
        (["fedavg", "constant", "fedavg"], [0], [], "row 'fedavg'"),
        (["fedavg"], [1, 0, 0], [], "seed 0"),
        (["fedavg"], [0], ["site-2", "site-2"], "left-out site 'site-2'"),
        (["fedavg", "batch-statistics"], [0], [], "batch-statistics"),
    ],
)
def test_a_study_that_cannot_run_is_not_started(
    rows: list[str],
    seeds: list[int],
    left_out: list[str],
    token: str,
    tmp_path: Path,
    trained: list[str],
) -> None:
    with pytest.raises(ConfigError, match=token):
        run_study(
            list(map(Candidate.parse, rows)), SETTING, seeds, tmp_path / "out", left_out=left_out
        )
    with pytest.raises(ConfigError, match="site-1"):
        run_study(
            [Candidate.parse("fedavg")],
            Setting(TASK, ("site-1",), 1),
            [0],
            tmp_path / "out",
            left_out=["site-1"],
        )
    assert not trained and not (tmp_path / "out").exists()


def kept(out: Path, label: str, runs: Sequence[Results]) -> Sequence[Results]:
    labelled = [
        {**run, "configuration": {**run["configuration"], "settings": {"label": label}}}
        for run in runs
    ]
    for run in labelled:
        write_run(out, run_name(label, run["seed"]), run)
    return labelled


def entry(out: Path, name: str) -> Any:
    with ZipFile(out / STUDY_FILE) as archive:
        return json.loads(archive.read(name))


def test_a_study_is_read_as_it_was_written(runs: list[Results], tmp_path: Path) -> None:
    with_scores = []
    for run in runs:
        scores = {"patients": ["p"], "values": {"dice": [run["seed"] / 10]}}
        with_scores.append({**run, "scores": {"A": {"global": scores}}})
    groups = {label: kept(tmp_path, label, with_scores) for label in ("fedsm:lam=0.3", "fedavg")}
    write_rows(tmp_path, groups, {})
    study = read_study(tmp_path)
    assert study == groups and list(study) == list(groups), "in the order of the rows"
    assert study_report(StudyTables(study)) == study_report(StudyTables(groups))
    content = (tmp_path / STUDY_FILE).read_bytes()
    write_run(tmp_path, "fedavg/seed0", groups["fedavg"][0])
    assert (tmp_path / STUDY_FILE).read_bytes() == content, "the same runs, the same bytes"


def test_models_with_equal_scores_share_them(runs: list[Results], tmp_path: Path) -> None:
    first = {"patients": ["p"], "values": {"dice": [0.25]}}
    second = {"patients": ["p"], "values": {"dice": [0.5]}}
    scores = {
        "A": {"global": first, "personal": second, "deployed": dict(second)},
        "B": {"global": second, "deployed": dict(second)},
    }
    kept(tmp_path, "fedavg", [{**runs[0], "scores": scores}])
    written = {
        "A": {"global": first, "personal": second, "deployed": "personal"},
        "B": {"global": second, "deployed": "global"},
    }
    assert entry(tmp_path, "fedavg/seed0/scores.json") == written
    assert read_study(tmp_path)["fedavg"][0]["scores"] == scores


def test_only_the_scores_name_patients(runs: list[Results], tmp_path: Path) -> None:
    kept(
        tmp_path,
        "fedavg",
        [{**runs[0], "scores": {"A": {"global": {"patients": ["Jane Doe"], "values": {}}}}}],
    )
    assert (tmp_path / STUDY_FILE).stat().st_mode & 0o077 == 0, "readable by this account alone"
    results = entry(tmp_path, "fedavg/seed0/results.json")
    assert "Jane Doe" not in json.dumps(results)
    with ZipFile(tmp_path / STUDY_FILE, "w") as archive:
        archive.writestr("fedavg/seed0/results.json", json.dumps(results))
    assert "scores" not in read_study(tmp_path)["fedavg"][0]


def test_the_order_of_rows_is_extended(runs: list[Results], tmp_path: Path) -> None:
    for label in ("b", "a"):
        kept(tmp_path, label, runs[:1])
    assert list(read_study(tmp_path)) == ["a", "b"]
    write_rows(tmp_path, ["b"], {})
    assert list(read_study(tmp_path)) == ["b", "a"]
    write_rows(tmp_path, ["c", "a"], {})
    assert entry(tmp_path, "study.json") == {"rows": ["c", "a", "b"]}


def test_a_damaged_study_raises_an_error(runs: list[Results], tmp_path: Path) -> None:
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
    with ZipFile(file, "w", ZIP_DEFLATED) as archive:
        for number in range(6):
            archive.writestr(str(number), bytes(10**8))
    with pytest.raises(StateError, match=r"more than 500 MB"):
        read_study(tmp_path)


@pytest.mark.slow
def test_a_study_runs_as_jobs_of_a_cluster(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By submitit's processes on this machine."""
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", str(foreign.parent.parent))
    foreign.write_text(BUGGY.replace("raise KeyError(", "import os; os._exit(3 or "))
    rows = [Candidate.parse("constant"), Candidate.parse("buggy")]
    out = tmp_path / "out"
    for cluster, text in (("cloud", "slurm"), ("local:no_such=1", "no_such")):
        with pytest.raises(ConfigError, match=text):
            run_study(rows, SETTING, [0], out, cluster=cluster)
    groups = run_study(rows, SETTING, [0], out, cluster="local:timeout_min=5")
    assert [runs[0]["status"] for runs in groups.values()] == ["COMPLETED", "FAILED"]
    assert (out / "cluster").stat().st_mode & 0o077 == 0
    logs = sorted((out / "cluster").iterdir())
    assert logs and not [file for file in logs if file.name.endswith("result.pkl")]
    monkeypatch.setattr(clusters, "finished_jobs", None)
    del rows[1]
    assert list(run_study(rows, SETTING, [0], out, cluster="local")) == ["constant"], "it is kept"


def test_two_processes_write_one_study(
    runs: list[Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write waits between reading the file and replacing it, so that both overlap."""
    contents = study._contents

    def read_slowly(out: Path) -> dict[str, bytes]:
        entries = contents(out)
        time.sleep(0.05)
        return entries

    def write(label: str) -> None:
        write_rows(tmp_path, [label], {label: [f"{label}:lr=1"]})
        for seed in range(3):
            write_run(tmp_path, f"{label}/seed{seed}", runs[0])

    monkeypatch.setattr(study, "_contents", read_slowly)
    labels = ("fedavg", "fedsm")
    context = get_context("fork")
    processes = [context.Process(target=write, args=[label]) for label in labels]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    names = set()
    for label in labels:
        for seed in range(3):
            names.add(f"{label}/seed{seed}")
    assert read_runs(tmp_path).keys() == names
    with ZipFile(tmp_path / STUDY_FILE) as archive:
        content = json.loads(archive.read("study.json"))
    assert set(content["rows"]) == content["grids"].keys() == set(labels)

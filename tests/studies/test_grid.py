"""Studies: candidates, the grid, and that finished runs are not run again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from medflare.cli import main
from medflare.core.errors import ConfigError, StateError
from medflare.core.hyper import halved
from medflare.evaluation.contract import validate_results
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.methods.catalogue import get_method
from medflare.studies.archive import run_folder, write_run
from medflare.studies.candidates import REFERENCES, Candidate
from medflare.studies.grid import _finished, run_study
from medflare.studies.references import CENTRALISED, POOLED, SINGLE_SITE
from medflare.studies.setting import Setting
from medflare.tasks.config import load_task
from studies.jobs import Broken, Touching

TASK = load_task(
    {
        **load_task("phantom").to_dict(),
        "size": [32, 32],
        "network": {"name": "unet", "channels": [4, 8], "norm": "instance"},
        "batch_size": 16,
    }
)
SETTING = Setting(TASK, ("site-1", "site-2"), rounds=1)


def test_candidates_are_checked_before_anything_runs() -> None:
    chosen = Candidate.parse("fedsm:lam=0.3,selection=last")
    assert chosen.hyper == halved({"lam": 0.3, "selection": "last"}, get_method("fedsm").hyper_classes, "fedsm")
    swapped = Candidate.parse("fedavg:server_half=grace,server.selection=last")
    assert (swapped.server_half, swapped.hyper) == ("grace", {"site": {}, "server": {"selection": "last"}})
    assert Candidate.parse("single-site:site.reset_optimizer=true").hyper["site"] == {"reset_optimizer": True}
    alone = Candidate.parse("single-site:method=prr,det=false")
    assert (alone.method, alone.trained_as, alone.hyper["site"]) == ("single-site", "prr", {"det": False})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fedsm:lamb=1", "did you mean 'lam'"),
        ("fedsm:lam", "has no value"),
        ("fedsm:selection=worst", "selection"),
        ("fedavg:site.selection=last", "'site.selection'"),
        ("fedavgg", "unknown method 'fedavgg'"),
        ("centralised:server_half=grace", "leave the halves out"),
        ("constant:selection=last", "trains nothing"),
        ("centralised:method=prr", "leave 'method' out"),
        ("fedavg:method=prr", "leave 'method' out"),
        ("single-site:method=prrr", "unknown method 'prrr'"),
        ("single-site:method=prr,lam=1", "has no hyper-parameter 'lam'"),
    ],
)
def test_a_wrong_candidate_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        Candidate.parse(text)
    assert "\n" not in str(refused.value)


def test_leaving_out_the_only_site_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two sites"):
        run_study([Candidate.parse("fedavg")], Setting(TASK, ("site-1",), 1), [0], tmp_path, left_out=["site-1"])


def test_a_study_keeps_its_runs_and_tabulates_them(tmp_path: Path) -> None:
    said: list[str] = []
    candidates = [Candidate.parse(text) for text in (SINGLE_SITE, "fedavg", CENTRALISED)]
    groups = run_study(candidates, SETTING, [0], tmp_path, say=said.append)
    assert len(said) == 3
    for runs in groups.values():
        validate_results(runs[0])
        assert set(runs[0]["sites"]) == {"site-1", "site-2"} and POOLED not in runs[0]["sites"]
        assert runs[0]["mean"]["inside"]["deployed"]["dice"] is not None
        assert set(runs[0]["scores"]) == {"site-1", "site-2"}, "patient by patient, for tests that pair rows"
    patients = [runs[0]["scores"]["site-1"]["deployed"]["patients"] for runs in groups.values()]
    assert patients[0] and all(of == patients[0] for of in patients), "all rows were tested on the same patients"
    assert groups[SINGLE_SITE][0]["traffic"] == {"down_bytes": 0, "up_bytes": 0}
    table = (tmp_path / "table.md").read_text()
    assert all(label in table for label in groups)
    assert [line for line in table.splitlines() if line.startswith("#")] == [
        "# phantom, 1 rounds",
        "## dice",
        "## dice, what the mean hides",
        "## iou",
        "## iou, what the mean hides",
        "## hd95",
        "## hd95, what the mean hides",
        "## dice, differences",
        "## dice, learning curves",
    ]
    assert run_study(candidates, SETTING, [0], tmp_path, say=said.append) == groups
    assert len(said) == 3  # nothing was run again


def test_a_row_that_the_task_cannot_have_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch-statistics: .* no BatchNorm"):
        run_study([Candidate.parse("fedavg"), Candidate.parse("batch-statistics")], SETTING, [0], tmp_path)
    assert not [*tmp_path.iterdir()]


def test_leaving_one_site_out_measures_it_as_outside(tmp_path: Path) -> None:
    groups = run_study([Candidate.parse(row) for row in ("fedavg", "constant")], SETTING, [0], tmp_path, left_out=SETTING.sites)
    for runs in groups.values():
        roles = [{name: site["role"] for name, site in run["sites"].items()} for run in runs]
        assert roles == [{"site-1": "outside", "site-2": "inside"}, {"site-1": "inside", "site-2": "outside"}]
    (line,) = [
        line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| constant | global, deployed | outside |")
    ]
    over_seeds, over_patients = line.split(" | ")[4:7], line.split(" | ")[7:]
    assert over_seeds == ["–", "–", "1"], "one seed has no spread"
    assert " to " in over_patients[0] and "Wilcoxon" in over_patients[1]


def test_the_seed_draws_the_split_anew(tmp_path: Path) -> None:
    runs = run_study([Candidate.parse("fedavg")], SETTING, [0, 1], tmp_path)["fedavg"]
    first, second = (run["configuration"]["task"]["resplit"] for run in runs)
    assert (first, second) == (0, 1)


# ---- runs that are kept ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the rows that were run, in their order; instead of training a run only says how it was asked for."""
    labels: list[str] = []

    def run(row: Candidate, setting: Setting, seed: int, outside: tuple[str, ...] = ()) -> dict[str, Any]:
        labels.append(row.label)
        task = dataclasses.replace(setting.task, resplit=seed)
        sites = {site: SiteRecord("outside" if site in outside else "inside") for site in setting.sites}
        return build_results(RunRecord(row.method, task, seed, setting.rounds, sites, hyper=row.effective, seconds={"total": 1.0}))

    monkeypatch.setattr(Candidate, "run", run)
    return labels


@pytest.mark.parametrize("text", ["fedsm", "fedavg:server_half=grace", "single-site:method=prr,det=false", *REFERENCES])
def test_a_row_knows_the_hyper_parameters_of_its_runs(text: str) -> None:
    task = dataclasses.replace(TASK, network={**TASK.network, "norm": "batch"}, size=(8, 8))
    row = Candidate.parse(text, None if text == "constant" else "last")
    assert row.run(Setting(task, SETTING.sites, 1), seed=0)["configuration"]["hyper"] == json.loads(json.dumps(row.effective))


@pytest.mark.parametrize(
    ("selection", "setting", "named"),
    [
        (None, {"rounds": 4}, "rounds = 1, this study has rounds = 4;"),
        (None, {"sites": ("site-1", "site-2", "site-3")}, "sites = ['site-1', 'site-2'], this study has sites = ['site-1', "),
        (None, {"task": dataclasses.replace(TASK, size=(16, 16))}, "task.size = [32, 32], this study has task.size = [16, 16];"),
        ("last", {}, "server.selection = 'median', this study has server.selection = 'last';"),
        (None, {"rounds": 2, "task": dataclasses.replace(TASK, batch_size=2)}, "rounds = 1, task.batch_size = 16, this study has "),
    ],
)
def test_kept_runs_of_another_study_are_not_its_answer(
    selection: str | None, setting: dict[str, Any], named: str, tmp_path: Path, trained: list[str]
) -> None:
    run_study([Candidate.parse("fedavg")], SETTING, [0], tmp_path)
    kept, rows = (tmp_path / "table.md").read_text(), (tmp_path / "study.json").read_text()
    candidates = [Candidate.parse(text, selection) for text in ("fedprox", "fedavg")]
    with pytest.raises(StateError) as refused:
        run_study(candidates, dataclasses.replace(SETTING, **setting), [0], tmp_path)
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / 'fedavg' / 'seed0'} holds a run with {named}") and "another --out" in said and "\n" not in said
    assert trained == ["fedavg"]
    assert ((tmp_path / "table.md").read_text(), (tmp_path / "study.json").read_text()) == (kept, rows)


def test_a_kept_run_of_an_earlier_version_is_what_its_settings_mean_now(tmp_path: Path, trained: list[str]) -> None:
    candidates = [Candidate.parse("fedavg")]
    run_study(candidates, SETTING, [0], tmp_path)
    file = run_folder(tmp_path, "fedavg", 0) / "results.json"
    results = json.loads(file.read_text())
    del results["configuration"]["task"]["accumulate"], results["configuration"]["hyper"]["server"]["weighting"]
    file.write_text(json.dumps(results))
    run_study(candidates, SETTING, [0], tmp_path)
    with pytest.raises(StateError, match=r"holds a run with task.accumulate = 1, this study has task.accumulate = 2;"):
        run_study(candidates, dataclasses.replace(SETTING, task=dataclasses.replace(TASK, accumulate=2)), [0], tmp_path)
    results["configuration"]["task"]["of_old"] = 3
    file.write_text(json.dumps(results))
    with pytest.raises(StateError, match=r"task.of_old = 3, "):
        run_study(candidates, SETTING, [0], tmp_path)
    assert trained == ["fedavg"]


def datalists(root: Path, patient: str) -> Path:
    """A folder for each of the study's sites."""
    for site in SETTING.sites:
        (root / site).mkdir(parents=True)
        (root / site / "datalist.json").write_text(json.dumps({"training": [{"image": "a.png", "label": 0, "patient": patient}]}))
    return root


def test_runs_on_other_images_are_not_its_answer(tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the data root is named, and wherever it has moved; no root means the images that the task has embedded."""
    rows, out = [Candidate.parse("fedavg")], tmp_path / "out"
    root = datalists(tmp_path / "first", "p")
    monkeypatch.setenv("MEDFLARE_DATA_ROOT", str(root))
    run_study(rows, SETTING, [0], out)
    monkeypatch.delenv("MEDFLARE_DATA_ROOT")
    run_study(rows, dataclasses.replace(SETTING, data_root=root.rename(tmp_path / "moved")), [0], out)
    assert trained == ["fedavg"] and str(tmp_path) not in (run_folder(out, "fedavg", 0) / "results.json").read_text()
    for other in (None, datalists(tmp_path / "second", "q")):
        with pytest.raises(
            StateError, match=r"holds a run with datalist of site-1 = '\w+', .*, this study has datalist of .*; give another"
        ):
            run_study(rows, dataclasses.replace(SETTING, data_root=other), [0], out)


def test_of_an_earlier_run_nobody_can_tell_what_its_images_were(tmp_path: Path, trained: list[str]) -> None:
    rows, said = [Candidate.parse("fedavg")], list[str]()
    run_study(rows, SETTING, [0], tmp_path)
    file = run_folder(tmp_path, "fedavg", 0) / "results.json"
    results = json.loads(file.read_text())
    del results["configuration"]["settings"]["datalists"]
    file.write_text(json.dumps(results))
    run_study(rows, dataclasses.replace(SETTING, data_root=datalists(tmp_path / "data", "p")), [0], tmp_path, say=said.append)
    assert said == ["1 kept runs are of an earlier version and do not say what images they had: they are taken for runs on this study's"]
    assert trained == ["fedavg"]


def test_the_reason_of_a_run_that_cannot_be_is_not_held_up(tmp_path: Path) -> None:
    """What had not begun is not begun."""
    jobs: list[Any] = [Broken(), *(Touching(tmp_path / str(number)) for number in range(12))]
    said: list[str] = []
    with pytest.raises(RuntimeError, match="no images are mounted"):
        said.extend(_finished(jobs, 2))
    assert said[-1] == "the broken run: cannot be run; the study stops after the runs at work"
    assert len([*tmp_path.iterdir()]) < 6


def test_a_run_that_failed_is_tried_again(runs: list[dict[str, Any]], tmp_path: Path, trained: list[str]) -> None:
    failed = {**runs[0], "status": "FAILED", "reason": "A: no images are mounted"}
    write_run(run_folder(tmp_path, "fedavg", 0), failed)
    said: list[str] = []
    for _ in range(2):
        groups = run_study([Candidate.parse("fedavg")], SETTING, [0], tmp_path, say=said.append)
        assert [run["status"] for run in groups["fedavg"]] == ["COMPLETED"]
    assert said == ["fedavg, seed 0 had failed and is run again: A: no images are mounted", "[1/1] fedavg, seed 0: COMPLETED, 1 s"]
    assert trained == ["fedavg"], "once, and then it is kept"


@pytest.mark.parametrize(
    ("rows", "seeds", "left_out", "named"),
    [
        (["fedavg", "constant", "fedavg"], [0], [], "row 'fedavg'"),
        (["fedavg"], [1, 0, 0], [], "seed 0"),
        (["fedavg"], [0], ["site-2", "site-2"], "left-out site 'site-2'"),
    ],
)
def test_what_is_given_twice_is_no_repetition(
    rows: list[str], seeds: list[int], left_out: list[str], named: str, tmp_path: Path, trained: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"{named} is given twice") as refused:
        run_study([Candidate.parse(row) for row in rows], SETTING, seeds, tmp_path / "out", left_out=left_out)
    assert "\n" not in str(refused.value) and not trained and not (tmp_path / "out").exists()


# ---- before anything is trained ----------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["study", *options]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and not said.out
    return said.err


def test_what_cannot_end_is_not_begun(tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    study = ("constant", "fedavg", "--sites", "2", "--seeds", "0", "--out", str(tmp_path / "out"))
    assert "fedavg: rounds is 0, which trains nothing" in refused(capsys, *study, "--rounds", "0")
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(capsys, *study, "--rounds", "1", "--figures", str(tmp_path / "file"))
    assert "seed 0 is given twice" in refused(capsys, *study, "--rounds", "1", "--seeds", "0,0")
    assert not trained

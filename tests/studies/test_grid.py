"""Studies: candidates, the grid, and that finished runs are not run again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from medflare.cli import main
from medflare.core.errors import ConfigError, StateError
from medflare.core.hyper import split_hyper
from medflare.evaluation.results import RunRecord, SiteRecord, build_results, validate_results
from medflare.methods.catalogue import get_method
from medflare.studies.archive import STUDY_FILE, read_runs, write_run
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


def test_a_row_is_read_from_its_text() -> None:
    chosen = Candidate.parse("fedsm:lam=0.3,selection=last")
    assert chosen.hyper == split_hyper({"lam": 0.3, "selection": "last"}, get_method("fedsm").hyper_classes, "fedsm")
    swapped = Candidate.parse("fedavg:server_algorithm=grace,server.selection=last")
    assert (swapped.server_algorithm, swapped.hyper) == ("grace", {"site": {}, "server": {"selection": "last"}})
    assert Candidate.parse("single-site:site.reset_optimizer=true").hyper["site"] == {"reset_optimizer": True}
    alone = Candidate.parse("single-site:method=prr,det=false")
    assert (alone.method, alone.trained_as, alone.hyper["site"]) == ("single-site", "prr", {"det": False})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fedsm:lamb=1", "lam"),
        ("fedsm:lam", "lam"),
        ("fedsm:selection=worst", "selection"),
        ("fedavg:site.selection=last", "site.selection"),
        ("fedavgg", "fedavgg"),
        ("centralised:server_algorithm=grace", "centralised"),
        ("constant:selection=last", "selection"),
        ("centralised:method=prr", "method"),
        ("fedavg:method=prr", "method"),
        ("single-site:method=prrr", "prrr"),
        ("single-site:method=prr,lam=1", "lam"),
    ],
)
def test_a_wrong_row_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Candidate.parse(text)


def test_leaving_out_the_only_site_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="site-1"):
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
    ]
    assert run_study(candidates, SETTING, [0], tmp_path, say=said.append) == groups
    assert len(said) == 3  # nothing was run again


def test_a_row_that_the_task_cannot_have_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch-statistics"):
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


@pytest.mark.parametrize("text", ["fedsm", "fedavg:server_algorithm=grace", "single-site:method=prr,det=false", *REFERENCES])
def test_a_row_knows_the_hyper_parameters_of_its_runs(text: str) -> None:
    task = dataclasses.replace(TASK, network={**TASK.network, "norm": "batch"}, size=(8, 8))
    row = Candidate.parse(text, None if text == "constant" else "last")
    assert row.run(Setting(task, SETTING.sites, 1), seed=0)["configuration"]["hyper"] == json.loads(json.dumps(row.effective))


@pytest.mark.parametrize(
    ("selection", "setting", "named"),
    [
        (None, {"rounds": 4}, "rounds = 1"),
        (None, {"sites": ("site-1", "site-2", "site-3")}, "sites"),
        (None, {"task": dataclasses.replace(TASK, size=(16, 16))}, "task.size"),
        ("last", {}, "server.selection"),
        (None, {"rounds": 2, "task": dataclasses.replace(TASK, batch_size=2)}, "task.batch_size"),
    ],
)
def test_kept_runs_of_another_study_are_refused(
    selection: str | None, setting: dict[str, Any], named: str, tmp_path: Path, trained: list[str]
) -> None:
    run_study([Candidate.parse("fedavg")], SETTING, [0], tmp_path)
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert kept.keys() == {"table.md", STUDY_FILE}
    candidates = [Candidate.parse(text, selection) for text in ("fedprox", "fedavg")]
    with pytest.raises(StateError, match=rf"fedavg/seed0.*{named}"):
        run_study(candidates, dataclasses.replace(SETTING, **setting), [0], tmp_path)
    assert trained == ["fedavg"]
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == kept


def test_a_kept_run_of_an_earlier_version_is_what_its_settings_mean_now(tmp_path: Path, trained: list[str]) -> None:
    candidates = [Candidate.parse("fedavg")]
    run_study(candidates, SETTING, [0], tmp_path)
    results = read_runs(tmp_path)["fedavg/seed0"]
    del results["configuration"]["task"]["accumulate"], results["configuration"]["hyper"]["server"]["weighting"]
    del results["configuration"]["settings"]["datalists"]  # what images it had cannot be told
    write_run(tmp_path, "fedavg/seed0", results)
    run_study(candidates, SETTING, [0], tmp_path)
    run_study(candidates, dataclasses.replace(SETTING, data_root=datalists(tmp_path / "data", "p")), [0], tmp_path)
    with pytest.raises(StateError, match="accumulate"):
        run_study(candidates, dataclasses.replace(SETTING, task=dataclasses.replace(TASK, accumulate=2)), [0], tmp_path)
    results["configuration"]["task"]["of_old"] = 3
    write_run(tmp_path, "fedavg/seed0", results)
    with pytest.raises(StateError, match="of_old"):
        run_study(candidates, SETTING, [0], tmp_path)
    assert trained == ["fedavg"]


def datalists(root: Path, patient: str) -> Path:
    """A folder for each of the study's sites."""
    for site in SETTING.sites:
        (root / site).mkdir(parents=True)
        (root / site / "datalist.json").write_text(json.dumps({"training": [{"image": "a.png", "label": 0, "patient": patient}]}))
    return root


def test_kept_runs_on_other_images_are_refused(tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the data root is named, and wherever it has moved; no root means the images that the task has embedded."""
    rows, out = [Candidate.parse("fedavg")], tmp_path / "out"
    root = datalists(tmp_path / "first", "p")
    monkeypatch.setenv("MEDFLARE_DATA_ROOT", str(root))
    run_study(rows, SETTING, [0], out)
    monkeypatch.delenv("MEDFLARE_DATA_ROOT")
    run_study(rows, dataclasses.replace(SETTING, data_root=root.rename(tmp_path / "moved")), [0], out)
    assert trained == ["fedavg"] and str(tmp_path) not in json.dumps(read_runs(out))
    for other in (None, datalists(tmp_path / "second", "q")):
        with pytest.raises(StateError, match="datalist of site-1"):
            run_study(rows, dataclasses.replace(SETTING, data_root=other), [0], out)


def test_the_reason_of_a_run_that_cannot_be_is_not_held_up(tmp_path: Path) -> None:
    """What had not begun is not begun."""
    jobs: list[Any] = [Broken(), *(Touching(tmp_path / str(number)) for number in range(12))]
    with pytest.raises(RuntimeError, match="no images are mounted"):
        list(_finished(jobs, 2))
    assert len([*tmp_path.iterdir()]) < 6


def test_a_run_that_failed_is_tried_again(runs: list[dict[str, Any]], tmp_path: Path, trained: list[str]) -> None:
    write_run(tmp_path, "fedavg/seed0", {**runs[0], "status": "FAILED", "reason": "A: no images are mounted"})
    said: list[str] = []
    for _ in range(2):
        groups = run_study([Candidate.parse("fedavg")], SETTING, [0], tmp_path, say=said.append)
        assert [run["status"] for run in groups["fedavg"]] == ["COMPLETED"]
    assert len(said) == 2 and "A: no images are mounted" in said[0] and "COMPLETED" in said[1]
    assert trained == ["fedavg"], "once, and then it is kept"


@pytest.mark.parametrize(
    ("rows", "seeds", "left_out", "named"),
    [
        (["fedavg", "constant", "fedavg"], [0], [], "row 'fedavg'"),
        (["fedavg"], [1, 0, 0], [], "seed 0"),
        (["fedavg"], [0], ["site-2", "site-2"], "left-out site 'site-2'"),
    ],
)
def test_a_row_seed_or_site_given_twice_is_refused(
    rows: list[str], seeds: list[int], left_out: list[str], named: str, tmp_path: Path, trained: list[str]
) -> None:
    with pytest.raises(ConfigError, match=named):
        run_study([Candidate.parse(row) for row in rows], SETTING, seeds, tmp_path / "out", left_out=left_out)
    assert not trained and not (tmp_path / "out").exists()


# ---- before anything is trained ----------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["study", *options]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and not said.out
    return said.err


def test_a_study_that_cannot_be_run_or_written_is_not_begun(tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    study = ("constant", "fedavg", "--sites", "2", "--seeds", "0", "--out", str(tmp_path / "out"))
    assert "rounds is 0" in refused(capsys, *study, "--rounds", "0")
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(capsys, *study, "--rounds", "1", "--figures", str(tmp_path / "file"))
    assert "seed 0" in refused(capsys, *study, "--rounds", "1", "--seeds", "0,0")
    assert not trained

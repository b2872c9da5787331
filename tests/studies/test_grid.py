"""Studies: candidates, the grid, and that finished runs are not run again."""

from pathlib import Path

import pytest

from medflare.core.errors import ConfigError
from medflare.core.hyper import halved
from medflare.evaluation.contract import validate_results
from medflare.methods.catalogue import get_method
from medflare.studies.candidates import Candidate
from medflare.studies.grid import run_study
from medflare.studies.references import CENTRALISED, POOLED, SINGLE_SITE
from medflare.studies.setting import Setting
from medflare.tasks.config import load_task

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
        ("fedsm:selection=worst", "selection must be one of"),
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

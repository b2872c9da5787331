"""Studies: references, the grid, and that finished runs are not run again."""

from pathlib import Path

import pytest
import torch

from medflare.core.errors import ConfigError
from medflare.data.splits import SiteData, Split
from medflare.evaluation.contract import validate_results
from medflare.studies.grid import CENTRALISED, POOLED, SINGLE_SITE, Candidate, Setting, pooled, run_study
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


def split(count: int, value: float) -> Split:
    return Split(torch.full((count, 1, 2, 2), value), torch.zeros(count, 2, 2), tuple("p" * count), tuple(map(str, range(count))))


def test_pooled_patients_of_two_sites_stay_two_patients() -> None:
    one = SiteData(split(2, 0.0), split(1, 0.0), split(1, 0.0))
    other = SiteData(split(3, 1.0), split(1, 1.0), split(2, 1.0))
    both = pooled([one, other])
    assert [len(both.split(name)) for name in ("train", "validation", "test")] == [5, 2, 3]
    assert set(both.train.patients) == {"0/p", "1/p"}
    assert both.train.images.flatten(1).mean(1).tolist() == [0, 0, 1, 1, 1]


def test_candidates_are_checked_before_anything_runs() -> None:
    chosen = Candidate.parse("fedsm:lam=0.3,selection=last")
    assert chosen.hyper == {"lam": 0.3, "selection": "last"}
    swapped = Candidate.parse("fedavg:server_half=grace,selection=last")
    assert (swapped.server_half, swapped.hyper) == ("grace", {"selection": "last"})
    with pytest.raises(ConfigError, match="did you mean 'lam'"):
        Candidate.parse("fedsm:lamb=1")
    with pytest.raises(ConfigError, match="has no value"):
        Candidate.parse("fedsm:lam")


def test_a_study_keeps_its_runs_and_tabulates_them(tmp_path: Path) -> None:
    said: list[str] = []
    candidates = [Candidate.parse(text) for text in (SINGLE_SITE, "fedavg", CENTRALISED)]
    groups = run_study(candidates, SETTING, [0], tmp_path, say=said.append)
    assert len(said) == 3
    for runs in groups.values():
        validate_results(runs[0])
        assert set(runs[0]["sites"]) == {"site-1", "site-2"} and POOLED not in runs[0]["sites"]
        assert runs[0]["mean"]["inside"]["deployed"]["dice"] is not None
    assert groups[SINGLE_SITE][0]["traffic"] == {"down_bytes": 0, "up_bytes": 0}
    table = (tmp_path / "table.md").read_text()
    assert all(label in table for label in groups)
    assert [line for line in table.splitlines() if line.startswith("#")] == [
        "# phantom, 1 rounds",
        "## dice",
        "## iou",
        "## hd95",
        "## dice, differences seed by seed",
    ]
    assert run_study(candidates, SETTING, [0], tmp_path, say=said.append) == groups
    assert len(said) == 3  # nothing was run again


def test_leaving_one_site_out_measures_it_as_outside(tmp_path: Path) -> None:
    groups = run_study([Candidate.parse("fedavg")], SETTING, [0], tmp_path, leave_one_out=True)
    roles = [{name: site["role"] for name, site in run["sites"].items()} for run in groups["fedavg"]]
    assert roles == [{"site-1": "outside", "site-2": "inside"}, {"site-1": "inside", "site-2": "outside"}]


def test_the_seed_draws_the_split_anew(tmp_path: Path) -> None:
    runs = run_study([Candidate.parse("fedavg")], SETTING, [0, 1], tmp_path)["fedavg"]
    first, second = (run["configuration"]["task"]["resplit"] for run in runs)
    assert (first, second) == (0, 1)

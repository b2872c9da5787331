"""Coordinate-wise median and trimmed mean: values by hand, degenerate cases, and a liar among honest sites."""

import pytest
import torch

import medflare
from medflare.core.errors import ConfigError
from medflare.methods.baselines.robust import robust_mean
from small import tiny_phantom

TINY = tiny_phantom(batch_size=32)


def states(*rows: list[float]) -> dict[str, dict[str, torch.Tensor]]:
    return {f"site-{number}": {"w": torch.tensor(row)} for number, row in enumerate(rows)}


def test_median_by_hand() -> None:
    """Coordinate by coordinate: (1, 2, 9) -> 2, (30, 10, 20) -> 20; of four values the mean of the middle two."""
    assert robust_mean(states([1.0, 30.0], [2.0, 10.0], [9.0, 20.0]), "median")["w"].tolist() == [2.0, 20.0]
    assert robust_mean(states([1.0], [2.0], [4.0], [100.0]), "median")["w"].tolist() == [3.0]


def test_trimmed_mean_by_hand() -> None:
    """β = 0.2 of five sites: one off at either end, (0, 1, 2, 6, 1000) -> 3."""
    assert robust_mean(states([6.0], [0.0], [1000.0], [1.0], [2.0]), "trimmed", 0.2)["w"].tolist() == [3.0]


def test_nothing_trimmed_is_the_mean() -> None:
    assert robust_mean(states([1.0], [2.0], [6.0]), "trimmed", 0.0)["w"].tolist() == [3.0]
    assert robust_mean(states([1.0], [2.0], [6.0]), "trimmed", 0.3)["w"].tolist() == [3.0], "floor(0.9) = 0"


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_one_or_two_sites(rule: str) -> None:
    assert robust_mean(states([5.0]), rule)["w"].tolist() == [5.0]
    assert robust_mean(states([5.0], [7.0]), rule)["w"].tolist() == [6.0]


def test_counters_and_dtypes() -> None:
    given = {
        site: {"n": torch.tensor(count), "w": torch.tensor([0.5], dtype=torch.float16)} for site, count in (("a", 3), ("b", 8), ("c", 4))
    }
    mean = robust_mean(given, "median")
    assert mean["n"].item() == 8 and mean["n"].dtype == torch.int64 and mean["w"].dtype == torch.float16


def test_errors() -> None:
    with pytest.raises(ValueError, match="at least one"):
        robust_mean({}, "median")
    with pytest.raises(ValueError, match="leaves none of 2 sites"):
        robust_mean(states([1.0], [2.0]), "trimmed", 0.5)
    with pytest.raises(ConfigError, match=r"trim = 0\.5 cuts off everybody; choose it below 0.5"):
        medflare.run_local("robust", TINY, 3, rounds=1, seed=0, rule="trimmed", trim=0.5)
    with pytest.raises(ConfigError, match="trim"):
        medflare.run_local("robust", TINY, 3, rounds=1, seed=0, trim=0.7)


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_a_plausible_liar_does_not_move_the_model_far(rule: str) -> None:
    """Four honest sites around 1, a fifth at 50: the mean follows the liar, the robust means stay among the honest."""
    honest = torch.linspace(0.9, 1.1, 4).tolist()
    given = states(*([value] for value in honest), [50.0])
    assert 0.9 <= robust_mean(given, rule, 0.2)["w"].item() <= 1.1
    assert torch.stack([state["w"] for state in given.values()]).mean() > 10


def test_a_federation_trains_and_serves_other_site_halves() -> None:
    assert medflare.run_local("robust", TINY, 3, rounds=1, seed=0)["status"] == "COMPLETED"
    assert medflare.run_local("moon", TINY, 3, rounds=1, seed=0, server_half="robust")["status"] == "COMPLETED"
    (event,) = medflare.run_local("robust", TINY, 2, rounds=1, seed=0)["events"]
    assert "robustness needs three or more" in event["message"]

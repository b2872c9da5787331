"""The network of a proposed task, chosen by a short training."""

from pathlib import Path
from typing import Any

import pytest

from helpers.fixture_types import SiteOf
from helpers.small_tasks import CLASSIFICATION
from medflare.federation.local import trial
from medflare.federation.local.trial import propose_by_trial, validated
from medflare.preparation.planning import Choice, ProposedTask
from medflare.preparation.proposing import TaskHints


def proposal(rate: float, *frozen: str) -> ProposedTask:
    """A task whose rounds take a second each."""
    optimizer = {"name": "adam", "lr": rate}
    settings: dict[str, Any] = {**CLASSIFICATION, "metric": "f1_macro", "optimizer": optimizer}
    if frozen:
        settings["freeze"] = [*frozen]
    network = Choice("network", settings["network"], "planned")
    return ProposedTask(settings, (network, Choice("metric", "f1_macro", "")), seconds=1.0)


@pytest.fixture
def sites(make_site: SiteOf) -> Path:
    for name in ("A", "B"):
        folder = make_site(None, "classification", name)
    return folder.parent


@pytest.mark.parametrize("minutes", [0.5, 0.1])
@pytest.mark.parametrize(("rate", "other"), [(1e-9, 0.05), (0.05, 1e-9)])
def test_the_network_with_the_better_validation_images_is_proposed(
    minutes: float, rate: float, other: float, sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a time for fewer than three rounds nothing is compared."""
    tasks = {"": proposal(rate, "body"), "small_cnn": proposal(other)}
    monkeypatch.setattr(trial, "propose", lambda root, hints: tasks[hints.network])
    chosen = propose_by_trial(sites, TaskHints(minutes=minutes))
    compared = minutes == 0.5
    better = max(rate, other) if compared else rate
    assert chosen.settings["optimizer"]["lr"] == better
    reason = chosen.choices[0].reason
    assert reason.startswith("f1_macro of validation images after 10 s: ") == compared
    assert chosen.choices[1].reason == ""
    given = propose_by_trial(sites, TaskHints(minutes=minutes, pretrained=True))
    assert given is tasks[""], "the user has chosen"


def test_a_task_that_trains_all_weights_is_not_compared(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = proposal(0.05)
    monkeypatch.setattr(trial, "propose", lambda root, hints: whole)
    monkeypatch.setattr(trial, "validated", lambda *words: pytest.fail("it is not trained"))
    assert propose_by_trial(sites, TaskHints()) is whole


def test_validation_images_of_a_trained_task_are_better(sites: Path) -> None:
    values = [validated(sites, proposal(rate), 10) for rate in (1e-9, 0.05)]
    assert 0 <= values[0] < values[1] <= 1

"""Confusion counts and curves on their way: kept back where they tell of few patients, taken only as what they are."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.small_tasks import small_task, stacked
from medflare.core.message import Message
from medflare.data.loading import SiteData, Split
from medflare.federation.final_models import evaluated
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.participant import Participant
from medflare.federation.run import Run
from medflare.federation.settings import run_settings
from medflare.federation.update_validation.messages import DELIVERS, declaration_problem
from medflare.federation.update_validation.suppression import has_small_class, small_classes, suppress_splits
from medflare.inference.deployed import plain_message
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.tasks.classes import Cases
from medflare.training.site import Site
from methods import squares


def curve(**changes: Any) -> dict[str, Any]:
    return {"auc": None, "low": None, "high": None, "sensitivity": [], **changes}


def answers(**changes: Any) -> dict[str, Any]:
    return {"classes": {"global": {"confusion": [], "roc": [], **changes}}}


def test_class_reports_pass_kept_back_or_not() -> None:
    whole = answers(confusion=[[[1, 0], [2, 3]]], roc=[curve(auc=0.5, low=0.1, high=1, sensitivity=[0.5] * 21)])
    empty: dict[str, Any] = {"classes": {}}
    for meta in (whole, answers(), empty):
        assert declaration_problem(Message({}, meta), DELIVERS) is None
    suppress_splits(whole, DELIVERS, ("test",))
    assert whole["classes"]["global"]["confusion"] == [] == whole["classes"]["global"]["roc"]
    assert declaration_problem(Message({}, whole), DELIVERS) is None


@pytest.mark.parametrize(
    "meta",
    [
        {"classes": {"global": {}}},
        answers(confusion=[[[1, 2]]]),
        answers(confusion=[[[-1]]]),
        answers(confusion=[[[1]]] * 17),
        answers(roc=[{"auc": 0.5}]),
        answers(roc=[curve(auc=2)]),
        answers(roc=[curve(sensitivity=[0.5])]),
    ],
)
def test_what_is_no_class_report_is_named(meta: dict[str, Any]) -> None:
    assert "classes: global" in str(declaration_problem(Message({}, meta), DELIVERS))


def test_counts_of_a_rare_class_stay_at_the_site() -> None:
    """Five patients, of whom one has class 1: with the accuracy, the others' counts would tell how that one was taken."""
    task = small_task("classification")
    cases = Cases("abcde", {}, torch.full((5, 3), 1 / 3, dtype=torch.float64), torch.tensor([0, 0, 2, 2, 1]))
    assert has_small_class(cases, task, 2) and not has_small_class(cases, task, 1) and not has_small_class(cases, task, 0)
    common = replace(cases, targets=torch.tensor([0, 0, 2, 2, 2]))
    assert not has_small_class(common, task, 2) and has_small_class(common, task, 3), "a class that nobody has tells of nobody"
    assert not has_small_class(Cases("ab", {"dice": torch.ones(2)}), task, 9), "masks have no counts"


@pytest.mark.parametrize(("minimum", "told"), [(0, True), (2, True), (3, False)])
def test_a_site_tells_of_common_classes_alone(minimum: int, told: bool) -> None:
    """Four test patients, two of each of two classes."""
    task = small_task("classification", labels=["dark", "bright"])
    part = Split(torch.rand(4, 1, 16, 16), torch.tensor([0, 0, 1, 1]), tuple("abcd"), tuple("abcd"))
    site = Site("A", task, SiteData(part, part, part))
    model = plain_message(site.network().state_dict())
    meta = evaluated(site, {"global": model, "deployed": model}, lambda *kept: None, minimum, method=get_method("fedavg"))
    assert meta["metrics"]["global"]["accuracy"] is not None
    assert ("classes" in meta) == told
    if told:
        assert meta["classes"]["global"] == meta["classes"]["deployed"] and "personal" not in meta["classes"]
        assert sum(map(sum, meta["classes"]["global"]["confusion"][0])) == 4
        assert declaration_problem(Message({}, meta), DELIVERS) is None


@pytest.mark.parametrize(("minimum", "kept"), [(0, False), (2, False), (4, False), (5, True), (9, True)])
def test_counts_by_class_of_few_training_patients_stay_too(minimum: int, kept: bool) -> None:
    """Twelve patients in three classes: four show each of them, eight the others."""
    assert bool(small_classes(squares.site("A", squares.CLASSIFICATION), "train", minimum)) is kept


def test_in_segmentation_those_without_a_class_are_not_told_of() -> None:
    site = squares.site("A", squares.MULTILABEL)
    targets = stacked(site.data.train).targets.clone()
    targets[:10, 1] = 0
    site.data = replace(site.data, train=replace(stacked(site.data.train), targets=targets))
    assert not small_classes(site, "train", 2) and small_classes(site, "train", 3), "two patients have a corner"
    targets[:10, 1], targets[10:, 1] = 1, 0
    assert not small_classes(site, "train", 3), "ten have one"


def test_a_federation_whose_sites_keep_their_counts() -> None:
    """PRR, which needs the counts, says what it does instead, and models are finite."""
    options: dict[str, Any] = {"outside_model": "personal"}
    found = get_method("prr")
    members = {name: _member(name, found, options) for name in ("A", "B", "C", "O")}
    run = Run(found, squares.SEGMENTATION, options, run_settings({"rounds": 1, "seed": squares.SEED, "outside": ["O"]}), ("A", "B", "C"))
    results = run.execute(LocalExchange(tuple(members), members.__getitem__))
    assert results["status"] == "COMPLETED", results["reason"]
    said = [event["message"] for event in results["events"] if event["kind"] == "warning" and event["site"] == "A"]
    assert "no counts by class leave the site: a class has fewer than 13 training patients" in said
    assert any("keeps its counts by class (minimum_patients)" in line for line in said)
    assert not any("is in no site's training images" in event["message"] for event in results["events"])


def _member(name: str, method: Method, options: dict[str, Any]) -> Participant:
    return Participant(name, lambda role: squares.site(name), method, options, minimum_patients=13)

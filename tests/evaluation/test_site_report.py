"""A site's own page: what each patient scored, whatever there is of it, escaped and self-contained."""

import math

import pytest
import torch

from evaluation.pages import faults
from helpers.small_tasks import small_task
from medflare.evaluation import site_report
from medflare.evaluation.site_report import SiteReport, deployed_heading, mean_interval, patient_values, render_site_report, worst
from medflare.tasks.classes import Cases

NAMES = ("Meier", "<b>Roe</b>", "Xu")


def segmented(**changes: object) -> SiteReport:
    def cases(*dice: float) -> Cases:
        return Cases(NAMES, {"dice": torch.tensor(dice, dtype=torch.float64)})

    metrics = {"global": {"dice": 0.5}, "personal": {"dice": 0.8}, "deployed": {"dice": 0.8}}
    found = {"global": cases(0.4, 0.5, 0.6), "personal": cases(0.9, 0.7, math.nan), "deployed": cases(0.9, 0.7, math.nan)}
    whole = {"method": "fedsm", "site": "A", "role": "inside", "task": small_task(), "n": {"train": 4, "validation": 2, "test": 3}}
    return SiteReport(**{**whole, "metrics": metrics, "cases": found, **changes})  # type: ignore[arg-type]


def test_patients_are_shown_model_by_model() -> None:
    events = [{"round": None, "site": None, "kind": "warning", "message": "m"}]
    html = render_site_report(segmented(pictures={"worst: Xu": b"\x89PNG"}, events=events))
    assert html.startswith("<!doctype html>") and "<b>Roe" not in html and "&lt;b&gt;Roe" in html
    assert "personal = deployed" in html and "0.800 (0.700 to 0.900)" in html
    assert html.count("<svg") == 1 and 'alt="worst: Xu"' in html
    assert not faults(html) and len(html) < 200_000
    assert html.index("&lt;b&gt;Roe") < html.index("Meier"), "the lowest first"


def test_a_site_without_anything_has_a_page() -> None:
    nothing = {role: {"dice": None} for role in ("global", "personal", "deployed")}
    html = render_site_report(segmented(metrics=nothing, cases={role: Cases() for role in nothing}))
    assert "Patient by patient" not in html


def test_without_matplotlib_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_report, "installed", lambda module: module != "matplotlib")
    assert "<svg" not in render_site_report(segmented())


def test_classification_shows_counts_and_how_sure_the_model_was() -> None:
    task = small_task("classification")
    probabilities = torch.tensor([[0.8, 0.1, 0.1], [0.4, 0.5, 0.1], [0.2, 0.6, 0.2], [0.2, 0.2, 0.6]])
    cases = Cases(("a", "a", "b", "c"), {}, probabilities, torch.tensor([0, 0, 1, 2]))
    assert patient_values(cases, task) == pytest.approx({"a": 0.6, "b": 0.6, "c": 0.6})
    html = render_site_report(segmented(task=task, metrics={"global": {"accuracy": 0.75}}, cases={"global": cases}))
    assert "probability of what is true" in html and "Class by class" in html and html.count("<svg") == 2


def test_labels_that_do_not_exclude_each_other() -> None:
    task = small_task("classification", target="multilabel")
    cases = Cases(("a", "b"), {}, torch.tensor([[0.9, 0.2, 0.5], [0.5, 0.5, 0.5]]), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    assert patient_values(cases, task) == pytest.approx({"a": (0.9 + 0.8 + 0.5) / 3, "b": 0.5})


def test_an_interval_needs_two_patients_and_lies_within_them() -> None:
    assert mean_interval({}) is None and mean_interval({"a": 0.3}) is None
    values = {str(place): place / 20 for place in range(20)}
    low, high = mean_interval(values) or (0.0, 0.0)
    assert 0.3 < low < 0.475 < high < 0.65, "about 1.96 x 0.288 / sqrt(20) on either side"
    assert mean_interval(dict(reversed(values.items()))) == (low, high), "whatever the order"


def test_the_lowest_are_those_of_the_deployed_model() -> None:
    """Wherever its column stands; the page says whose they are."""
    shared = {"global = deployed": {"a": 0.1, "b": 0.9}, "personal": {"a": 0.9, "b": 0.2}}
    assert list(worst(shared)) == ["a", "b"] and deployed_heading(shared) == "global = deployed"
    assert deployed_heading(["global", "undeployed", "personal"]) == "personal", "the last where none is that model's"
    metrics = {"global": {"dice": 0.5}, "personal": {"dice": 0.8}, "deployed": {"dice": 0.5}}
    html = render_site_report(segmented(metrics=metrics))
    assert "global = deployed" in html and html.index("Meier") < html.index("&lt;b&gt;Roe") < html.index("Xu")

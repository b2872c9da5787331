"""Unusual federations with every method: they complete with finite models, and undefined metrics are named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import medflare
from helpers import small_tasks
from helpers.rounds import read_rounds
from medflare.core.states import StateDict
from medflare.data.loading import SiteData
from medflare.evaluation.results import validate_results
from medflare.inference.deployed import load_model
from medflare.tasks.config import load_task
from medflare.training.site import Site
from methods import squares

METHODS = ("fedavg", "fedsm", "prr", "grace", "iop_fl", "feddag")
QUICK: dict[str, dict[str, Any]] = {
    "feddag": {"generator_width": 4},
    "fedsm": {"selector": "compact_selector", "selector_updates": 1},
}
SEED = 5
DISC = {**small_tasks.SEGMENTATION, "name": "disc", "labels": ["disc"]}
GRADE = {
    **small_tasks.CLASSIFICATION,
    "name": "grade",
    "network": {"name": "small_cnn", "channels": [4, 8], "batch_norm": True},
}
DISC_WITHOUT_BATCH_NORM = {**DISC, "network": small_tasks.INSTANCE_UNET}
GRADE_WITHOUT_BATCH_NORM = {**GRADE, "network": small_tasks.CLASSIFICATION["network"]}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


def federation(
    method: str,
    task: Mapping[str, Any],
    sites: tuple[str, ...] = ("A", "B"),
    *,
    counts: tuple[int, int, int] = (8, 4, 4),
    outside: int = 0,
    missing: int | None = None,
    twins: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """One run of the plain loop.

    Args:
        counts: training, validation and test images of every inside site.
        outside: test images of the outside site X; 0: there is none.
        missing: the class that does not occur.
        twins: all inside sites have the same images and, but for FedSM, whose sites must tell themselves apart, the same random numbers.
    """
    config = load_task(task)

    def opened(name: str, role: str) -> Site:
        twin = twins and role == "inside"
        seed = 0 if twin else 100 * ord(name)
        parts = counts if role == "inside" else (0, 0, outside)
        train, validation, test = (
            squares.split(config, count, seed + place, 0.0, missing)
            for place, count in enumerate(parts)
        )
        return Site(
            "twin" if twin and method != "fedsm" else name,
            config,
            SiteData(train, validation, test),
            SEED,
        )

    settings = {
        "rounds": 1,
        "seed": SEED,
        "outside": ("X",) * bool(outside),
        "opener": opened,
        **QUICK.get(method, {}),
        **options,
    }
    results = medflare.run_local(method, config, sites, **settings)
    validate_results(results)
    assert results["status"] == "COMPLETED", results["reason"]
    files = sorted(Path(options["out"]).rglob("model.safetensors"))
    states: list[StateDict] = []
    for file in files:
        states += load_model(file.parent).message.states.values()
    assert states
    for state in states:
        for tensor in state.values():
            if tensor.is_floating_point():
                assert tensor.isfinite().all()
    if outside:
        assert results["sites"]["X"]["metrics"]["deployed"][config.metric] is not None
    return results


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have separate tests, and drawing one takes as long as these runs."""
    monkeypatch.setattr("medflare.evaluation.report.render_report", lambda *_: "")
    monkeypatch.setattr("medflare.federation.final_models.examples", lambda *_: {})


@pytest.mark.parametrize("task", [DISC, GRADE, DISC_WITHOUT_BATCH_NORM, GRADE_WITHOUT_BATCH_NORM])
@EVERY_METHOD
def test_an_outside_site_with_one_image_with_and_without_batch_norm(
    method: str, task: dict[str, Any], tmp_path: Path
) -> None:
    federation(method, task, outside=1, out=tmp_path)


@EVERY_METHOD
def test_one_site_alone(method: str, tmp_path: Path) -> None:
    federation(method, DISC, ("A",), rounds=2, out=tmp_path)


@EVERY_METHOD
def test_two_sites_with_the_same_images_have_equal_weights(method: str, tmp_path: Path) -> None:
    results = federation(method, DISC, rounds=2, twins=True, out=tmp_path)
    assert method == "fedsm" or results["sites"]["A"]["metrics"] == results["sites"]["B"]["metrics"]
    weights = []
    for step in read_rounds(tmp_path):
        for numbers in step["aggregation"].values():
            weights.append(numbers["weight"])
    assert weights == pytest.approx([0.5] * (4 if method in ("grace", "feddag") else 0))


@EVERY_METHOD
def test_a_class_that_no_site_has(method: str, tmp_path: Path) -> None:
    results = federation(method, GRADE, missing=2, counts=(9, 6, 6), out=tmp_path)
    metrics = results["sites"]["A"]["metrics"]["deployed"]
    assert metrics["accuracy"] is not None
    messages = []
    for event in results["events"]:
        if event["kind"] == "undefined" and event["site"] == "A":
            messages.append(event["message"])
    for name, value in metrics.items():
        if value is None:
            assert any(f"deployed {name}: " in line for line in messages)


def test_feddag_weighs_models_equally_that_no_site_can_score(tmp_path: Path) -> None:
    results = federation("feddag", DISC, ("A", "B", "C"), counts=(8, 0, 4), out=tmp_path)
    (noted,) = [step["aggregation"] for step in read_rounds(tmp_path) if step["aggregation"]]
    assert [noted[site]["weight"] for site in "ABC"] == pytest.approx([1 / 3] * 3)
    assert {
        event["site"] for event in results["events"] if "no site scored" in event["message"]
    } == {"A", "B", "C"}

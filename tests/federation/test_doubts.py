"""Events that question a deployed model, and their suppression."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_tasks import small_task
from medflare.core.events import DOUBTS
from medflare.core.message import Message
from medflare.data.loading import SiteData, Split
from medflare.data.local import LocalSettings
from medflare.evaluation.findings import findings_of
from medflare.federation.final_models import SiteFolder
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.participant import Participant
from medflare.federation.run import Run
from medflare.federation.settings import run_settings
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

FEDAVG = get_method("fedavg")
SITES = ("A", "B")
Doubts = dict[str, list[str]]


def grades(of: Sequence[int], blank: bool = False) -> Split:
    """Images whose brightness is their class; blank ones are all the same."""
    names = tuple(map(str, range(len(of))))
    labels = torch.tensor(of, dtype=torch.long)
    brightness = labels.view(-1, 1, 1, 1).expand(-1, 1, 16, 16).float() - 1
    return Split(brightness * (not blank), labels, names, names)


BALANCED = [0, 1, 2] * 4


def federated(
    task: TaskConfig,
    data: dict[str, SiteData],
    *,
    rounds: int = 1,
    minimum: int = 0,
    method: str = "fedavg",
    **options: Any,
) -> dict[str, Any]:
    chosen = get_method(method)
    members = {}
    for name, split in data.items():
        site = Site(name, task, split)
        members[name] = Participant(
            name,
            lambda role, site=site: site,  # type: ignore[misc]
            chosen,
            options,
            local=LocalSettings(minimum_patients=minimum),
        )
    run = Run(
        chosen, task, options, run_settings({"rounds": rounds, "seed": 0}), tuple(sorted(data))
    )
    results = run.execute(LocalExchange(tuple(members), members.__getitem__))
    assert results["status"] == "COMPLETED", results["reason"]
    return results


def doubts(results: dict[str, Any]) -> Doubts:
    """Kind -> sites."""
    by_kind: Doubts = {}
    for event in results["events"]:
        if event["kind"] in DOUBTS:
            by_kind.setdefault(event["kind"], []).append(event["site"])
    return by_kind


def data(train: list[int], validation: list[int], test: list[int], blank: bool = False) -> SiteData:
    return SiteData(grades(train, blank), grades(validation, blank), grades(test, blank))


def test_the_same_class_for_every_image_is_noted() -> None:
    results = federated(
        small_task("classification"),
        dict.fromkeys(SITES, data(BALANCED, BALANCED, BALANCED, blank=True)),
    )
    assert doubts(results) == {"constant_output": ["A", "B"], "at_chance": ["A", "B"]}
    (confusion,) = results["sites"]["A"]["classes"]["deployed"]["confusion"]
    shown = []
    for name, column in zip(
        small_task("classification").labels, zip(*confusion, strict=True), strict=True
    ):
        if any(column):
            shown.append(name)
    event = next(event for event in results["events"] if event["kind"] == "constant_output")
    assert len(shown) == 1 and shown[0] in event["message"]


def test_a_trained_model_is_not_questioned() -> None:
    task = small_task("classification", optimizer={"name": "adam", "lr": 0.02}, local_epochs=8)
    results = federated(
        task, dict.fromkeys(SITES, data(BALANCED * 2, BALANCED, BALANCED)), rounds=3
    )
    assert results["sites"]["A"]["metrics"]["deployed"]["accuracy"] > 0.9 and doubts(results) == {}


def test_events_about_few_test_patients_are_suppressed(tmp_path: Any) -> None:
    task = small_task("classification")
    split = data(BALANCED, BALANCED, BALANCED[:6], blank=True)
    results = federated(task, dict.fromkeys(SITES, split), minimum=7)
    assert results["sites"]["A"]["metrics"]["deployed"]["accuracy"] is None
    assert not doubts(results).keys() & {"constant_output", "at_chance"}
    artifacts = SiteFolder(tmp_path, "A", FEDAVG, task, 0)
    site = Participant(
        "A",
        lambda role: Site("A", task, split),
        FEDAVG,
        {},
        folder=artifacts,
        local=LocalSettings(minimum_patients=7),
    )
    site.reply("enrol", 0, Message({}, {"role": "inside", "sites": ["A"]}))
    model = Site("A", task, split).network().state_dict()
    for step, (phase, round) in enumerate([("validate", 1), ("finalize", 1)]):
        site.reply(phase, round, Message({"model": model}, {"step": step, "run_rounds": 1}))
    assert "status doubtful" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("minimum", [5, 7])
def test_that_a_model_overflows_for_one_of_few_test_patients_is_no_event(minimum: int) -> None:
    """A lead could make the overflow depend on a pixel; of enough patients the site says it."""
    task = small_task("classification")
    split = data(BALANCED, BALANCED, BALANCED[:6])
    site = Participant(
        "A",
        lambda role: Site("A", task, split),
        FEDAVG,
        {},
        local=LocalSettings(minimum_patients=minimum),
    )
    site.reply("enrol", 0, Message({}, {"role": "inside", "sites": ["A"]}))
    state = Site("A", task, split).network().state_dict()
    overflowing = {name: tensor * 1e30 for name, tensor in state.items()}
    for step, (phase, round) in enumerate([("validate", 1), ("finalize", 1)]):
        message = Message({"model": overflowing}, {"step": step, "run_rounds": 1})
        reply = site.reply(phase, round, message)
    assert reply.meta["metrics"]["global"]["accuracy"] is None
    said = [event["message"] for event in reply.meta["events"] if event["kind"] == "undefined"]
    assert any("NaN" in line for line in said) == (minimum == 5)
    assert minimum == 5 or said == ["test metrics: too few patients"]


def test_an_event_does_not_name_a_small_class() -> None:
    results = federated(
        small_task("classification"),
        dict.fromkeys(SITES, data(BALANCED, BALANCED, BALANCED, blank=True)),
        minimum=5,
    )
    text = " ".join(
        event["message"]
        for event in results["events"]
        if event["kind"] in ("constant_output", "at_chance")
    )
    assert doubts(results).keys() >= {"constant_output", "at_chance"}
    for name in ("dark", "medium", "bright"):
        assert name not in text
    assert "one class" in text


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ((4, 5), {}, [None]),
        ((10, 12), {}, []),
        ((4, 5), {"selection": "last"}, []),
        ((6, 6), {"selection": "mean"}, []),  # twelve images together
        ((0, 0), {}, [None]),
    ],
)
def test_few_validation_images_are_noted(
    sizes: tuple[int, ...], options: dict[str, Any], expected: list[str]
) -> None:
    split = {
        site: data(BALANCED, BALANCED[:size], BALANCED)
        for site, size in zip(SITES, sizes, strict=True)
    }
    results = federated(small_task("classification"), split, rounds=2, **options)
    by_kind = doubts(results)
    assert by_kind.get("few_validation_images", []) == expected
    (text,) = [e["message"] for e in results["events"] if e["kind"] == "few_validation_images"] or [
        ""
    ]
    assert ("no site sent a metric" in text) == (not any(sizes))


def test_a_site_that_selects_alone_is_named() -> None:
    split = {
        "A": data(BALANCED, BALANCED[:4], BALANCED),
        "B": data(BALANCED, BALANCED, BALANCED),
        "C": data(BALANCED, BALANCED, BALANCED),
    }
    by_kind = doubts(federated(small_task("classification"), split, rounds=2, method="ditto"))
    assert by_kind["few_validation_images"] == ["A"]


def test_a_rare_class_is_not_named_if_its_count_is_suppressed() -> None:
    split = {
        "A": data([*[0] * 6, *[1] * 6, 2, 2], BALANCED, BALANCED),
        "B": data(BALANCED, BALANCED, BALANCED),
    }
    results = federated(small_task("classification"), split, minimum=4)
    (event,) = [event for event in results["events"] if event["kind"] == "rare_class"]
    assert event["site"] == "A"
    for word in ("bright", "2"):
        assert word not in event["message"]


def test_the_page_of_a_site_has_the_findings_of_the_training(tmp_path: Path) -> None:
    """All sites have few validation images; A alone has two training images of a class."""
    task = small_task("classification")
    members = {}
    rare = [*[0] * 6, *[1] * 6, 2, 2]
    for name, train in (("A", rare), ("B", BALANCED)):
        site = Site(name, task, data(train, BALANCED[:4], BALANCED))
        folder = SiteFolder(tmp_path / name, name, FEDAVG, task, 0)
        members[name] = Participant(
            name,
            lambda role, site=site: site,  # type: ignore[misc]
            FEDAVG,
            {},
            folder=folder,
        )
    run = Run(FEDAVG, task, {}, run_settings({"rounds": 2, "seed": 0}), SITES)
    results = run.execute(LocalExchange(SITES, members.__getitem__))
    problems = {finding.kind: finding.problem for finding in findings_of(results)}
    pages = {name: (tmp_path / name / "report.html").read_text() for name in SITES}
    for name in SITES:
        assert (
            problems["few_validation_images"] in pages[name]
            and "4 validation images at this site" in pages[name]
        )
    assert problems["rare_class"] in pages["A"] and problems["rare_class"] not in pages["B"]

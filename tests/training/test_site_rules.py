"""What a site demands before it trains, whatever classes, images and weights the lead chooses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.loading import SiteData, Split
from medflare.data.local import Bounds, LocalSettings
from medflare.federation.participant import Participant
from medflare.methods.catalogue import get_method
from medflare.tasks.config import Sampling, TaskConfig
from medflare.training.site import Site
from medflare.training.site_rules import (
    check_inside_sites,
    check_selection,
    loss_factors,
    weighty_patients,
)

TASK = small_task("classification")  # dark, medium, bright
RARE = [0] * 12 + [1] * 8 + [2]  # one patient of the last class
ALONE = 1e-9


def site_of(
    labels: Sequence[int], task: TaskConfig = TASK, patients: Sequence[str] | None = None
) -> Site:
    names = tuple(patients or map(str, range(len(labels))))
    split = Split(torch.zeros(len(labels), 1, 16, 16), torch.tensor(labels), names, names)
    return Site("A", task, SiteData(split, split, split))


def weighted(*weights: float) -> TaskConfig:
    return replace(TASK, sampling=Sampling("weighted", weights))


def lossy(*weights: float) -> TaskConfig:
    return replace(TASK, loss={"name": "ce", "weights": list(weights)})


def problem(site: Site, minimum: int = 5, sites: Sequence[str] = ("A", "B"), **bounds: Any) -> str:
    try:
        check_inside_sites("A", len(sites), Bounds(**bounds))
        check_selection("A", site.task, site.data, minimum, Bounds(**bounds))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("minimum", [0, 1, 4, 5, 6, 20])
def test_a_site_trains_on_at_least_its_minimum_of_patients(minimum: int) -> None:
    assert bool(problem(site_of([0, 1, 2, 0, 1]), minimum)) == (minimum > 5)
    assert not problem(site_of([0] * 20), minimum)


def test_patients_count_and_not_images() -> None:
    assert problem(site_of([0] * 40, patients=["one", "two"] * 20))
    assert not problem(
        site_of([0] * 44, patients=["one"] * 40 + ["two", "three", "four", "five"])
    ), "the lead did not choose that"


@pytest.mark.parametrize(
    "task",
    [
        weighted(0, 0, 1),
        weighted(ALONE, ALONE, 1),
        lossy(ALONE, ALONE, 1.0),
        lossy(1e-3, 1e-3, 1.0),
    ],
)
def test_weights_do_not_make_a_model_of_one_patient(task: TaskConfig) -> None:
    """The patient of the rare class has nearly all of the gradient."""
    assert weighty_patients(task, site_of(RARE, task).data) == 1
    assert "minimum_patients" in problem(site_of(RARE, task))
    assert not problem(site_of([0] * 12 + [1] * 8 + [2] * 6, task))


@pytest.mark.parametrize(
    "task", [TASK, replace(TASK, sampling=Sampling("balanced")), lossy(1.0, 1.5, 10.0)]
)
def test_usual_weights_for_a_rare_class_are_allowed(task: TaskConfig) -> None:
    assert not problem(site_of(RARE, task))


def test_weights_of_positives_of_several_labels() -> None:
    """Two of four images have a label; the others count once."""
    task = small_task(
        "classification",
        target="multilabel",
        labels=["oedema", "nodule"],
        loss={"name": "ce", "weights": [2.0, 1e6]},
    )
    present = torch.tensor([[True, False], [False, True], [False, False], [True, True]])
    assert loss_factors(task, present).tolist() == [2.0, 1e6, 1.0, 1e6]


def test_a_task_that_leaves_out_most_images_is_refused() -> None:
    site = site_of([0] * 20)
    site.data = replace(
        site.data, dropped=("a",) * 90, left_out={str(number): "b" for number in range(10)}
    )
    assert not problem(site, drop_share=0.625)  # 100 of 160
    assert "drop_share" in problem(site, drop_share=0.6)
    for number in ("100", "160", "20"):
        assert number not in problem(site, drop_share=0.6)


@pytest.mark.parametrize(
    ("sites", "refused"), [(("A",), True), (("A", "B"), False), (("A", "B", "C"), False)]
)
def test_a_job_has_as_many_inside_sites_as_the_site_demands(
    sites: tuple[str, ...], refused: bool
) -> None:
    assert ("inside_sites" in problem(site_of([0] * 20), sites=sites, inside_sites=2)) == refused


@pytest.mark.parametrize("method", ["fedavg", "fedsm", "ditto"])
def test_a_site_that_refuses_to_train_enrols_with_nobody_and_sends_no_model(method: str) -> None:
    site = site_of([0, 1, 2])
    participant = Participant(
        "A", lambda role: site, get_method(method), {}, local=LocalSettings(minimum_patients=5)
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not train, and sends no model"):
            participant.answer("enrol", 0, Message({}, {"role": "inside", "sites": ["A", "B"]}))
    with pytest.raises(Exception, match="not enrolled"):
        participant.answer(
            "train",
            0,
            Message({"model": site.network().state_dict()}, {"step": 0, "run_rounds": 1}),
        )

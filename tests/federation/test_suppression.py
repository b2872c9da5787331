"""Small-cell suppression: values of a class with few patients stay at the site; test_every_method.py has every message."""

from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from helpers.small_tasks import small_task
from medflare.core.message import Message
from medflare.core.phases import Phase
from medflare.core.specs import MetaSpec, PerClass, TensorSpec
from medflare.data.loading import SiteData, Split
from medflare.data.local import LocalSettings
from medflare.federation.builtin_messages import FINAL_REPLY_META
from medflare.federation.exchange import with_step_number
from medflare.federation.final_models import evaluate_final_models
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.participant import Participant
from medflare.federation.protocol import declaration_problem
from medflare.federation.run import Run
from medflare.federation.settings import run_settings
from medflare.federation.suppression import Suppression, has_small_class, small_classes
from medflare.inference.deployed import plain_message
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site
from methods import squares

# ---- prototypes of PRR -----------------------------------------------------------------------------------------------------------


def rare_square(task: TaskConfig, name: str = "A") -> Site:
    """A site with two of twelve training patients in the last class."""
    site = squares.site(name, task)
    split = site.data.train
    targets = split.targets.clone()
    if task.target == "multilabel":
        targets[:10, 1] = 0
    else:
        last = len(task.classes) - 1
        targets[:10] = torch.where(targets[:10] == last, last - 1, targets[:10])
        if task.kind == "classification":
            targets[10:] = last
    site.data = replace(site.data, train=replace(split, targets=targets))
    return site


KINDS: Final = {
    "binary classification": (squares.BINARY_CLASSIFICATION, "bright", 1),
    "multiclass classification": (squares.CLASSIFICATION, "bright", 2),
    "binary segmentation": (squares.SEGMENTATION, "square", 1),
    "multiclass segmentation": (squares.MULTICLASS, "corner", 2),
    "multilabel segmentation": (squares.MULTILABEL, "corner", 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prototype_of_few_patients_is_suppressed(kind: str) -> None:
    task, rare, row = KINDS[kind]
    site = rare_square(task)
    method = get_method("prr")
    for minimum, small in ((3, {rare}), (2, set())):
        site.minimum_patients = minimum
        assert small_classes(site, "train") == small
    participants = []
    for minimum in (0, 3):
        local = LocalSettings(minimum_patients=minimum)
        participants.append(squares.participant(site, method, local=local))
    server = squares.server(
        method.server_class,
        task,
        algorithms={"A": squares.algorithm(method.site_class, "A", task)},
        outside=(),
    )
    replies = []
    for participant in participants:
        squares.enrol(participant, "A", "B", "C")
        replies.append(
            participant.reply(
                "train", 0, with_step_number(server.configure(Step("train", 0), "A"), 0, 1)
            )
        )
    whole, suppressed = (reply.states["prototypes"] for reply in replies)
    assert whole["present"].all() and whole["prototypes"][row].any()
    assert not suppressed["present"][row] and not suppressed["prototypes"][row].any()
    others = [other for other in range(len(whole["present"])) if other != row]
    assert suppressed["present"][others].all() and suppressed["prototypes"][others].equal(
        whole["prototypes"][others]
    )
    for name, tensor in replies[1].states["model"].items():
        assert replies[0].states["model"][name].equal(tensor)
    stored = participants[1]._algorithm.recall(1).memory.states["prototypes"]["prototypes"]
    assert stored.equal(whole["prototypes"]), "the site itself uses all of them"


def test_suppressed_statistics_do_not_change_the_ridge_selector() -> None:
    log, server, algorithms = squares.run("fedsm", rounds=1, selector="ridge", gamma=0.5)
    step, _, replies = next(turn for turn in log if turn.step.phase == "selector_features")
    phase = get_method("fedsm").site_class.phase("selector_features")

    def solved(replies: dict[str, Message]) -> dict[str, torch.Tensor]:
        server.aggregate(step, replies)
        return dict(server.selector)

    def suppressed_at(name: str, reply: Message) -> Message:
        algorithm = algorithms[name]
        algorithm.site.minimum_patients = 13
        return Suppression(algorithm.site).suppressed(reply, phase, algorithm.plan)

    without = solved({name: replies[name] for name in ("A", "C")})
    suppressed = {**replies, "B": suppressed_at("B", replies["B"])}
    for tensor in suppressed["B"].states["selector_statistics"].values():
        assert not tensor.any()
    assert squares.equal(solved(suppressed), without) and not squares.equal(
        solved(replies), without
    )
    all_suppressed = {name: suppressed_at(name, reply) for name, reply in replies.items()}
    assert squares.equal(solved(all_suppressed), solved(replies)), "the selector does not change"


# ---- any declaration --------------------------------------------------------------------------------------------------------------


def reply_of(
    per_class: PerClass,
    states: dict[str, Any],
    meta: dict[str, Any],
    measured: str = "",
    minimum: int = 3,
) -> Message:
    entry = TensorSpec("cells", "for a test", per_class=per_class, measured=measured)
    table: MetaSpec[Any] = MetaSpec("table", per_class=per_class, measured=measured)
    phase = Phase("train", reply=(entry, TensorSpec("model")), meta=(table,))
    site = rare_square(squares.CLASSIFICATION)
    site.minimum_patients = minimum
    return Suppression(site).suppressed(
        Message(states, meta), phase, squares.plan_of(FedAvgSite, FedAvgServer)
    )


def test_values_of_a_small_class_and_all_counts_are_suppressed() -> None:
    cells = {
        "mean": torch.ones(3, 2),
        "count": torch.tensor([6, 4, 2]),
        "total": torch.tensor(12.0),
        "pair": torch.ones(2, 3),
    }
    model = {"w": torch.ones(3)}
    values = reply_of(
        "values",
        {"cells": cells, "model": model},
        {"table": {"dark": 1.0, "bright": 2.0, "more": {"medium": 3.0, "sum": 9}}},
    )
    assert values.states["cells"]["mean"].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert (
        not values.states["cells"]["count"].any()
        and values.states["cells"]["count"].dtype == torch.int64
    )
    assert not values.states["cells"]["total"].any() and not values.states["cells"]["pair"].any()
    assert values.meta["table"] == {"dark": 1.0, "more": {"medium": 3.0, "sum": None}}
    counts = reply_of(
        "counts", {"cells": {"share": torch.ones(3)}, "model": model}, {"table": [0.5, 0.3, 0.2]}
    )
    assert not counts.states["cells"]["share"].any() and counts.meta["table"] == []
    assert reply_of("values", {}, {"table": [[1.0], [2.0], [3.0]]}).meta["table"] == [
        [1.0],
        [2.0],
        [],
    ]
    for kept in (values, counts):
        assert kept.states["model"] is model
    assert cells["mean"].all() and cells["count"].tolist() == [6, 4, 2]


def test_an_entry_measured_on_few_patients_is_zero() -> None:
    cells = {"mean": torch.ones(3, 2)}
    assert (
        reply_of("", {"cells": cells}, {}, measured="validation", minimum=4).states["cells"]
        is cells
    )
    assert (
        not reply_of("", {"cells": cells}, {}, measured="validation", minimum=5)
        .states["cells"]["mean"]
        .any()
    )


# ---- counts by class -------------------------------------------------------------------------------------------------------------


def test_confusion_counts_of_a_small_class_are_suppressed() -> None:
    """Five patients, one of them in class 1."""
    task = small_task("classification")
    cases = Cases(
        "abcde", {}, torch.full((5, 3), 1 / 3, dtype=torch.float64), torch.tensor([0, 0, 2, 2, 1])
    )
    assert (
        has_small_class(cases, task, 2)
        and not has_small_class(cases, task, 1)
        and not has_small_class(cases, task, 0)
    )
    common = replace(cases, targets=torch.tensor([0, 0, 2, 2, 2]))
    assert not has_small_class(common, task, 2) and has_small_class(common, task, 3)
    assert not has_small_class(Cases("ab", {"dice": torch.ones(2)}), task, 9)


def measured(
    task: TaskConfig, targets: torch.Tensor, minimum: int, always: tuple[float, ...] = ()
) -> dict[str, Any]:
    """The final metadata of a site with a test patient for each target; its network answers `always` for each pixel, if given."""
    names = tuple("abcdefgh"[: len(targets)])
    images = torch.rand(len(targets), 1, 16, 16, generator=torch.Generator().manual_seed(0))
    part = Split(images, targets, names, names)
    site = Site("A", task, SiteData(part, part, part), minimum_patients=minimum)
    state = site.network().state_dict()
    if always:
        state |= {
            "head.weight": torch.zeros_like(state["head.weight"]),
            "head.bias": torch.tensor(always),
        }
    model = plain_message(state)
    meta = evaluate_final_models(
        site, {"global": model, "deployed": model}, lambda *kept: None, method=get_method("fedavg")
    )
    assert declaration_problem(Message({}, meta), FINAL_REPLY_META) is None
    return meta


@pytest.mark.parametrize(("minimum", "sent"), [(0, True), (2, True), (3, False)])
def test_confusion_counts_are_sent_if_no_class_is_small(minimum: int, sent: bool) -> None:
    meta = measured(
        small_task("classification", labels=["dark", "bright"]), torch.tensor([0, 0, 1, 1]), minimum
    )
    assert meta["metrics"]["global"]["accuracy"] is not None
    assert ("classes" in meta) == sent
    if sent:
        assert (
            meta["classes"]["global"] == meta["classes"]["deployed"]
            and "personal" not in meta["classes"]
        )
        assert sum(map(sum, meta["classes"]["global"]["confusion"][0])) == 4


@pytest.mark.parametrize(("minimum", "sent"), [(1, True), (2, False)])
def test_a_false_alarm_everywhere_does_not_send_the_overlap_of_one_patient(
    minimum: int, sent: bool
) -> None:
    """Where a structure is found that is not there, the overlap is 0, and defined: a mean of these and of one patient's tells how large the patient's structure is."""
    task = small_task(metrics=["iou"])  # without hd95, which is undefined there
    targets = torch.zeros(8, 16, 16, dtype=torch.long)
    targets[3, 2:6, 2:9] = 1
    meta = measured(task, targets, minimum, always=(1.0,))
    overlaps = {"dice": 2 * 28 / (28 + 256), "iou": 28 / 256}
    for metric, overlap in overlaps.items():
        expected = pytest.approx(overlap / 8) if sent else None
        assert meta["metrics"]["deployed"][metric] == expected
    assert ("by_label" in meta) == ("intervals" in meta) == ("constant" in meta) == sent


@pytest.mark.parametrize(("minimum", "sent"), [(6, True), (7, False)])
def test_metrics_of_structures_are_sent_if_no_structure_is_small(minimum: int, sent: bool) -> None:
    """Six of eight patients have a cup; the network predicts none."""
    task = small_task(target="multiclass", labels=["background", "disc", "cup"])
    targets = torch.ones(8, 16, 16, dtype=torch.long)
    targets[:6, 0, 0] = 2
    meta = measured(task, targets, minimum, always=(0.0, 1.0, -1.0))
    assert ("by_label" in meta) == ("intervals" in meta) == sent and meta["metrics"]["global"][
        "dice"
    ] is not None
    if sent:
        assert (
            meta["by_label"]["deployed"]["cup"]["dice"]
            == 0
            < meta["by_label"]["deployed"]["disc"]["dice"]
        )
        assert meta["intervals"]["deployed"]["cup"]["dice"] == [0, 0]
        for item, wrong in {"by_label": 2.0, "intervals": [0.0, 2.0]}.items():
            invalid = {**meta, item: {"global": {"cup": {"dice": wrong}}}}
            assert item in str(declaration_problem(Message({}, invalid), FINAL_REPLY_META))


def test_no_interval_of_five_patients_leaves_the_site() -> None:
    """The interval of a few patients is their lowest and highest value."""
    meta = measured(small_task(), torch.ones(5, 16, 16, dtype=torch.long), 0)
    assert meta["metrics"]["deployed"]["dice"] is not None and "intervals" not in meta


def test_small_classes_of_a_multilabel_segmentation() -> None:
    """All patients have pixels without a structure; two of twelve have all their pixels without this one."""
    site = rare_square(squares.MULTILABEL)
    targets = site.data.train.targets
    targets[:10, 1] = 1
    targets[10:, 1] = 0
    site.minimum_patients = 3
    assert not small_classes(site, "train")


@pytest.mark.parametrize("method", ["prr", "iop_fl"])
def test_a_federation_without_counts_by_class(method: str) -> None:
    options: dict[str, Any] = {"outside_model": "personal"} if method == "prr" else {}
    chosen = get_method(method)

    def member(name: str) -> Participant:
        local = LocalSettings(minimum_patients=3)
        return Participant(
            name, lambda role: rare_square(squares.SEGMENTATION, name), chosen, options, local=local
        )

    run = Run(
        chosen,
        squares.SEGMENTATION,
        options,
        run_settings({"rounds": 1, "seed": squares.SEED, "outside": ["O"]}),
        ("A", "B", "C"),
    )
    results = run.execute(LocalExchange("ABCO", member))
    assert results["status"] == "COMPLETED", results["reason"]
    warnings = []
    for event in results["events"]:
        if event["kind"] == "warning" and event["site"] == "A":
            warnings.append(event["message"])
    assert (
        "no counts by class leave the site: a class has fewer than 3 training patients" in warnings
    )
    assert method == "iop_fl" or any("minimum_patients" in line for line in warnings)
    for event in results["events"]:
        assert "is in no site's training images" not in event["message"]


@pytest.mark.parametrize(("minimum", "sent"), [(3, True), (4, False)])
def test_a_metric_that_is_defined_for_few_patients_stays_at_the_site(
    minimum: int, sent: bool
) -> None:
    """Three of eight patients have a structure; the network predicts one for all."""
    task = small_task(metrics=["dice", "hd95"])
    targets = torch.zeros(8, 16, 16, dtype=torch.long)
    targets[:3, 4:8, 4:8] = 1
    names = tuple("abcdefgh")
    part = Split(torch.rand(8, 1, 16, 16), targets, names, names)
    site = Site("A", task, SiteData(part, part, part), minimum_patients=minimum)
    state = site.network().state_dict()
    state |= {
        "head.weight": torch.zeros_like(state["head.weight"]),
        "head.bias": torch.full_like(state["head.bias"], 5.0),
    }
    summaries: dict[str, Any] = {}
    meta = evaluate_final_models(
        site,
        {"global": plain_message(state)},
        lambda role, model, summary: summaries.update({role: summary}),
        method=get_method("fedavg"),
    )
    defined = summaries["global"].cases.values["hd95"]
    assert int((~defined.isnan()).sum()) == 3 and summaries["global"].metrics["hd95"] > 0
    lines = [event["message"] for event in meta["events"] if event["kind"] == "undefined"]
    for metric in ("dice", "hd95"):  # dice is 0, and defined, for the other five
        assert (meta["metrics"]["global"][metric] is not None) == sent
        assert (f"global {metric}: too few patients" in lines) != sent


@pytest.mark.parametrize(("minimum", "sent"), [(0, True), (3, True), (4, False)])
def test_a_validation_metric_that_is_defined_for_few_patients_is_none(
    minimum: int, sent: bool
) -> None:
    """Three of four validation patients have a structure."""
    algorithm = squares.algorithm(FedAvgSite)
    data = algorithm.site.data
    targets = data.validation.targets.clone()
    targets[3] = 0
    algorithm.site.data = replace(data, validation=replace(data.validation, targets=targets))
    algorithm.site.minimum_patients = minimum
    network = algorithm.site.network()
    state = network.state_dict()
    state["head.weight"].zero_()
    state["head.bias"].fill_(5.0)
    for metric in ("dice", "hd95"):  # dice is 0, and defined, for the fourth
        assert (algorithm.validation(network, metric) is not None) == sent

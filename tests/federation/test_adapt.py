"""`adapt`: every site also tests its deployed model with a test-time adaptation, without labels."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_tasks import tiny_phantom
from medflare import run_local
from medflare.adaptation.registry import adapted_at, with_adaptation, with_tent
from medflare.cli.run import FederationOptions, resolve_federation
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.federation.enrolment import reported_class_shares
from medflare.federation.final_models import with_adapted
from medflare.flare.jobs.building import build_job
from medflare.inference.deployed import load_model, plain_message, save_model
from medflare.inference.predict import adapted
from medflare.methods.catalogue import build_deployed
from medflare.tasks.config import Sampling
from methods import squares

TASK = squares.CLASSIFICATION_WITH_BATCH_NORM
Models = dict[tuple[str, str], Message]


def run(method: str = "fedavg", task: Any = TASK, **settings: Any) -> tuple[dict[str, Any], Models]:
    """Results and final models of a round of sites A and B, and O outside."""
    models: Models = {}
    results = run_local(
        method,
        task,
        ["A", "B"],
        **{"outside": ["O"], "rounds": 1, "seed": squares.SEED, **settings},
        opener=lambda name, role: squares.site(name, task),
        delivered=lambda site, role, model, cases: models.update({(site, role): model}),
    )
    assert results["status"] == "COMPLETED", results["reason"]
    return results, models


@pytest.mark.parametrize("adapt", ["dsbn", "tent", "sar,rate=0.05", "memo,copies=2", "labelshift"])
def test_a_further_model_is_tested(adapt: str) -> None:
    plain, _ = run()
    results, models = run(adapt=adapt)
    name = adapt.partition(",")[0]
    for site, of_site in results["sites"].items():
        metrics = dict(of_site["metrics"])
        adapted_metrics = metrics.pop(name)
        assert metrics == plain["sites"][site]["metrics"]
        deployed = models[site, "deployed"]
        message = adapted_at(
            squares.site(site, TASK), deployed, adapt, partial(build_deployed, TASK)
        )
        scores = squares.site(site, TASK).score(build_deployed(TASK, message), "test")
        assert adapted_metrics == pytest.approx(scores.values, nan_ok=True)
        assert models[site, name].meta["base"] == deployed.meta["kind"] == "plain"
    assert results["configuration"]["settings"]["adapt"] == adapt


def test_class_shares_are_those_of_the_draws() -> None:
    enrolled = {
        "A": {"role": "inside", "class_counts": [9, 1, 0]},
        "B": {"role": "inside", "class_counts": [1, 4, 5]},
    }
    balanced = replace(TASK, sampling=Sampling("balanced"))
    assert reported_class_shares(enrolled, balanced) == [0.417, 0.417, 0.167]
    weighted = replace(TASK, sampling=Sampling("weighted", (2.0, 1.0, 1.0)))
    assert reported_class_shares(enrolled, weighted) == [0.583, 0.292, 0.125]


def test_class_shares_are_those_of_the_weights_in_the_loss() -> None:
    enrolled = {"A": {"role": "inside", "class_counts": [8, 1, 1]}}
    loss = {"name": "ce", "weights": [1.0, 8.0, 4.0]}
    assert reported_class_shares(enrolled, replace(TASK, loss=loss)) == [0.4, 0.4, 0.2]
    binary = replace(squares.BINARY_CLASSIFICATION, loss={"name": "ce", "weights": [9.0]})
    rare = {"A": {"role": "inside", "class_counts": [9, 1]}}
    assert reported_class_shares(rare, binary) == [0.5, 0.5]


def test_class_shares_come_with_label_shift_only() -> None:
    enrolled = {
        "A": {"role": "inside", "class_counts": [1, 2, 0]},
        "B": {"role": "inside", "class_counts": [2, 2, 2]},
        "O": {"role": "outside", "class_counts": [9, 0, 0]},
    }
    assert reported_class_shares(enrolled, TASK) == [0.333, 0.444, 0.222]
    unknown: dict[str, Any] = {**enrolled, "B": {"role": "inside", "class_counts": []}}
    assert reported_class_shares(unknown, TASK) is None
    results, models = run(adapt="labelshift")
    counts = sum(squares.site(name, TASK).class_counts() for name in "AB")
    expected = torch.as_tensor(counts / torch.as_tensor(counts).sum()).tolist()
    for message in models.values():
        assert message.meta["class_shares"] == pytest.approx(expected, abs=1e-3)
    for event in results["events"]:
        assert "equal" not in event["message"]
    _, models = run(adapt="tent")
    for message in models.values():
        assert "class_shares" not in message.meta
    site = squares.site("O", TASK)
    final, notes = with_adapted(
        site, {"deployed": plain_message(squares.start(TASK))}, "labelshift"
    )
    assert "labelshift" in final and "taken as equal" in notes[0]


@pytest.mark.parametrize(
    ("adapt", "task", "named"),
    [
        ("tent", squares.WITHOUT_BATCH_NORM, "BatchNorm"),
        ("labelshift", squares.SEGMENTATION, "exclusive classes"),
        ("ttt", TASK, "rotation head"),
        ("routing", TASK, "experts"),
        ("tnt", TASK, "did you mean tent"),
        ("tent,rat=1", TASK, "rate"),
        ("tent,rate", TASK, "NAME,ARGUMENT=VALUE"),
        ("memo,copies=0", TASK, "copies"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_training(
    adapt: str, task: Any, named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        run(task=task, adapt=adapt)
    assert "\n" not in str(refused.value)


def test_an_adaptation_of_the_method_is_replaced() -> None:
    settings = {"client": "erm", "tta": "dsbn"}
    _, expected = run("grace", client="erm")
    _, models = run("grace", adapt="tent", **settings)
    assert models["O", "deployed"].meta["kind"] == "dsbn"
    assert models["O", "tent"].meta["base"] == "plain" and models["O", "tent"].states.keys() == {
        "model"
    }
    images = squares.site("O", TASK).data.test.images
    actual = build_deployed(TASK, models["O", "tent"])(images)
    reference = build_deployed(TASK, with_tent(expected["O", "global"], TASK))(images)
    assert torch.equal(actual, reference)


def test_routing_is_that_of_iop_fl() -> None:
    task = squares.SEGMENTATION
    results, models = run("iop_fl", task, adapt="routing", route_epochs=1)
    assert models["O", "routing"] is models["O", "deployed"]
    metrics = results["sites"]["O"]["metrics"]
    assert metrics["routing"].items() <= metrics["deployed"].items()
    assert results["sites"]["A"]["metrics"]["routing"]["dice"] is None
    noted = {event["site"] for event in results["events"] if "experts" in event["message"]}
    assert noted == {"A", "B"}
    with pytest.raises(ConfigError, match="experts"):
        run("iop_fl", task, adapt="routing", outside=[])
    _, notes = with_adapted(squares.site("O", task), {"deployed": models["O", "deployed"]}, "tent")
    assert "normalizes by the test images already" in notes[0]


def test_a_delivered_model_is_evaluated_and_predicts_with_it(tmp_path: Path) -> None:
    message = plain_message(squares.start(TASK))
    save_model(tmp_path, TASK, message, {})
    options = FederationOptions(method="evaluate", model=tmp_path)
    _, task, hyper, arguments = resolve_federation(options, {"adapt": "memo"})
    assert arguments["adapt"] == "memo"
    results = run_local(
        task=task,
        sites=["A"],
        opener=lambda name, role: squares.site(name, task),
        weights=tmp_path,
        **{**arguments, "seed": squares.SEED},
        **hyper,
    )
    assert {"deployed", "memo"} <= results["sites"]["A"]["metrics"].keys()
    for adapt in ("ttt", "routing"):
        with pytest.raises(ConfigError, match=adapt):
            resolve_federation(options, {"adapt": adapt})
    stored = load_model(tmp_path)
    assert adapted(stored, build_deployed, "sar,rho=0.1").message.meta["sar"] == {"rho": 0.1}
    assert adapted(stored, build_deployed, "none") is stored
    with pytest.raises(ConfigError, match="experts"):
        adapted(stored, build_deployed, "routing")
    routed = Message(message.states, {"kind": "routed"})
    assert with_adaptation(routed, "routing") is routed


def test_a_job_has_it(tmp_path: Path) -> None:
    folder = build_job("fedavg", tiny_phantom(), out=tmp_path / "job", adapt="memo,copies=2")
    server = json.loads((folder / "app/config/config_fed_server.json").read_text())
    assert server["workflows"][0]["args"]["adapt"] == "memo,copies=2"
    with pytest.raises(ConfigError, match="adaptation"):
        build_job("fedavg", tiny_phantom(), out=tmp_path / "other", adapt="tnt")

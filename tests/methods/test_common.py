"""What several methods have in common: FedAvg without their parts, options that count, one image, refusals."""

import importlib
import math
from typing import Any

import pytest
import torch

from helpers import volume_sites
from helpers.small_tasks import INSTANCE_UNET, small_task
from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.catalogue import get_method
from methods import squares
from methods.squares import equal, one_by_one


@pytest.mark.parametrize("name", ["fedavg", "feddag", "fedsm", "grace", "iop_fl", "prr"])
def test_a_package_offers_its_public_names(name: str) -> None:
    package = importlib.import_module(f"medflare.methods.{name}")
    assert {*package.__all__} >= {*dir(package)} != set()
    for word in package.__all__:
        assert callable(getattr(package, word)) or word.isupper()


@pytest.fixture(scope="module")
def fedavg() -> StateDict:
    return squares.run("fedavg", rounds=3).model


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        # The personal model learns from the same batches and gives no gradient to it.
        ("apfl", {}),
        ("ditto", {}),
        ("fedrod", {}),
        ("fml", {"beta": 1.0}),
        ("fedlws", {"tau_max": 0.0}),
        ("fedprox", {"mu": 0.0}),
        ("fets_pid", {"alpha": 1.0, "beta": 0.0, "gamma": 0.0}),
        ("fedsm", {"selector": "compact_selector", "selector_updates": 1}),
        ("iop_fl", {}),
        ("moon", {"mu": 0.0}),
        ("grace", {"consistency": False, "client": "erm"}),
        ("sha", {"sha": False}),
        # The teacher no slower than its student: Table V's last row.
        ("feddag", {"sha": False, "ndag": False, "ema": 0.0}),
    ],
)
def test_the_global_model_is_fedavgs(fedavg: StateDict, name: str, hyper: dict[str, Any]) -> None:
    assert equal(squares.run(name, rounds=3, **hyper).model, fedavg)


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("feddag", {}),
        ("grace", {}),
        ("grace", {"client": "mmd"}),
        ("grace", {"client": "adv"}),
        ("prr", {}),
    ],
    ids=str,
)
def test_a_site_with_one_image_trains(name: str, hyper: dict[str, Any]) -> None:
    task = squares.task("classification")
    log, _, _ = squares.run(name, task, counts={"C": (1, 1, 1)}, **hyper)
    for turn in (turn for turn in log if turn.step.phase == "train"):
        reply = turn.replies["C"]
        assert math.isfinite(reply.meta["loss"])
        for tensor in reply.states["model"].values():
            assert tensor.isfinite().all()


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "feddag": [
        {},
        *one_by_one(
            alpha=0.1,
            m=0.001,
            train_on="perturbation",
            ema=0.99,
            sam_rho=0.1,
            generator_width=8,
            ndag=False,
        ),
    ],
    "grace": [
        *one_by_one(client=("erm", "meta", "coral", "mmd", "adv")),
        *one_by_one(beta=0.1, swap=False, inner="sgd"),  # with coral, the default
        {"client": "meta", "reset_optimizer": True},
    ],
}


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_changes_the_sites_training(name: str, kind: str) -> None:
    common = {"ema": 0.9} if name == "feddag" else {}  # the teacher differs from the student
    site_class = get_method(name).site_class
    task = squares.task(kind)
    models = [
        squares.trained(site_class, task, rounds=2, **{**common, **option})[0]
        for option in OPTIONS[name]
    ]
    for i, model in enumerate(models):
        for tensor in model.values():
            assert torch.isfinite(tensor).all()
        for other in models[:i]:
            assert not equal(model, other), OPTIONS[name][i]


@pytest.mark.parametrize(
    ("name", "metric", "own"),
    [
        ("ditto", "personal", "personal"),
        ("iop_fl", "personal", "personal"),
        ("fedrep", "global", "local"),
    ],
)
def test_a_model_of_the_sites_own_is_of_the_best_round_by_its_validation(
    name: str, metric: str, own: str
) -> None:
    log, server, algorithms = squares.run(name, rounds=4)
    for site, algorithm in algorithms.items():
        values = [turn.replies[site].meta["validation"][metric] for turn in log[1:]]
        last_of_equals = max(
            round for round, value in enumerate(values, start=1) if value == max(values)
        )
        assert (algorithm.selection.value, algorithm.selection.round) == (
            max(values),
            last_of_equals,
        )
        models = algorithm.finalize(server.configure_final(site))
        state = models["personal"].states["model"]
        assert models["deployed"] is models["personal"] and equal(state, algorithm.selection.state)
        assert algorithm.validation(algorithm.network("again", state)) == pytest.approx(
            algorithm.selection.value
        )
    last = squares.run(name, rounds=4, selection="last")
    state = (
        last.algorithms["A"].finalize(last.server.configure_final("A"))["personal"].states["model"]
    )
    for entry, tensor in getattr(last.algorithms["A"], own).items():
        assert torch.equal(state[entry], tensor)


@pytest.mark.parametrize(
    ("method", "hyper", "task", "offender"),
    [
        ("fedsm", {"selector": "auto"}, {}, "selector"),
        ("fedsm_extra", {"selector": "ridge"}, {}, "selector"),
        ("fedsm", {"selector_updates": 0}, {}, "selector_updates"),
        ("fedsm", {"gamma": "often"}, {}, "gamma"),
        ("fedsm", {"gamma": 1.5}, {}, "gamma"),
        ("prr", {"r0": 0.4, "r1": 0.3}, {}, "r0"),
        ("prr", {"lam1": 0.9, "lam2": 0.7}, {}, "lam1"),
        ("prr", {"r1": 0.6}, {}, "r1"),
        ("prr", {"tau": 0.5}, {}, "tau"),
        ("prr", {"components": "amp"}, {}, "components"),
        ("prr", {"site": {"dp_delta": 1e-5}}, {}, "dp_"),
        ("robust", {"trim": 0.5}, {}, "trim"),
        ("robust", {"trim": -0.5}, {}, "trim"),
        ("robust", {"trim": math.nan}, {}, "trim"),
        ("fedbn", {}, {"network": INSTANCE_UNET}, "norm=batch"),
        ("grace", {"tta": "tent"}, {"network": INSTANCE_UNET}, "BatchNorm"),
        ("grace", {"tta": "dsbn"}, {"network": INSTANCE_UNET}, "BatchNorm"),
        ("fedsm", {}, {"freeze": {"parts": ["body"], "rounds": 2}}, "freeze"),
        ("mixstyle", {}, {"freeze": ["body"]}, "freeze"),
        ("fedavg", {}, {"freeze": {"parts": ["boddy"], "rounds": 2}}, "boddy"),
        ("fedavg", {}, {"freeze": {"parts": ["body", "head"], "rounds": 2}}, "freeze.parts"),
        ("fedavg", {}, {"freeze": {"parts": ["body"]}}, "freeze"),
        (
            "fedavg",
            {"dp_noise": 1.0},
            {"freeze": {"parts": ["body"], "rounds": 2}, "network": INSTANCE_UNET},
            "dp_noise",
        ),
        ("fedsm_extra", {}, volume_sites.PATCHES, "combine"),
        (
            "prr",
            {},
            {**volume_sites.PATCHES, "target": "multilabel", "labels": ["a", "b"]},
            "multilabel",
        ),
        ("fedavg", {}, {**volume_sites.TASK, "network": {"name": "deeplab"}}, "deeplab"),
        ("fedavg", {}, {**volume_sites.TASK, "size": [8, 7, 8]}, "size"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    method: str, hyper: dict[str, Any], task: dict[str, Any], offender: str
) -> None:
    with pytest.raises(ConfigError, match=offender):
        get_method(method).check(hyper, small_task(**task))


@pytest.mark.parametrize("name", ["grace", "moon"])
class TestLocalModel:
    def test_inside_the_best_one_is_used_and_outside_the_global_one(self, name: str) -> None:
        site_class = get_method(name).site_class
        start = squares.start()
        algorithm = squares.algorithm(site_class)
        incoming = Message({"model": start})
        assert equal(algorithm.finalize(incoming)["deployed"].states["model"], start), (
            "a site that never trained"
        )
        values = iter([0.1, 0.4, 0.2, 0.9, 0.3, 0.5])
        algorithm.validation = lambda model: next(values)  # global, personal, ... of three rounds
        states = [
            algorithm.perform("train", round, Message({"model": copy_state(start)})).states["model"]
            for round in range(3)
        ]
        final = algorithm.finalize(incoming)
        assert equal(final["global"].states["model"], start) and equal(
            final["personal"].states["model"], states[1]
        )
        assert final["deployed"] is final["personal"]
        outside = squares.algorithm(site_class, "O").finalize(incoming)
        assert outside.keys() == {"global", "deployed"} and equal(
            outside["deployed"].states["model"], start
        )

    @pytest.mark.parametrize(
        ("hyper", "counts"),
        [({"selection": "last"}, (12, 4, 5)), ({}, (12, 0, 5))],
        ids=["last", "unvalidated"],
    )
    def test_the_last_one(self, name: str, hyper: Any, counts: tuple[int, int, int]) -> None:
        algorithm = squares.algorithm(get_method(name).site_class, counts=counts, **hyper)
        start = squares.start()
        states = [
            algorithm.perform("train", round, Message({"model": copy_state(start)})).states["model"]
            for round in range(2)
        ]
        assert equal(
            algorithm.finalize(Message({"model": start}))["personal"].states["model"], states[1]
        )

"""Deputy-Enhanced Transfer at a site: stages, who teaches whom; every option of PRR has its effect."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from medflare.core.errors import ConfigError
from medflare.core.states import StateDict
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.prr.server import PRRServer
from medflare.methods.prr.site import PRRSite
from medflare.tasks.config import TaskConfig
from methods import squares
from methods.squares import equal

federation = partial(squares.federation, PRRSite, PRRServer)


def server_of(algorithms: dict[str, Any], rounds: int = 2, **hyper: Any) -> Any:
    return squares.server(PRRServer, rounds=rounds, outside=(), algorithms=algorithms, **hyper)


# ---- DET ----------------------------------------------------------------------------------------------------------------------


def stages_of(epochs: int, **hyper: Any) -> list[list[int]]:
    log, _, _ = federation(squares.task(local_epochs=epochs), sites=("A",), rounds=2, **hyper)
    return [replies["A"].meta["stages"] for step, _, replies in log if step.phase == "train"]


def test_stages_of_a_round() -> None:
    assert stages_of(3, lam1=0.0, lam2=0.0) == [[1, 2, 3], [1, 2, 3]]
    assert stages_of(3, lam1=0.0, lam2=0.0, det_steps="RE") == [[1, 2, 2], [1, 2, 2]]
    assert stages_of(3, lam1=0.0, lam2=0.0, det_steps="E") == [[2, 2, 2], [2, 2, 2]]
    assert stages_of(3, lam1=9.0, lam2=9.0)[1] == [1, 1, 1]
    assert stages_of(2, det=False) == [[], []]


def test_one_epoch_a_round_goes_through_all_stages() -> None:
    """The code's machine begins every round anew, so a round of one epoch would never recover nor sublimate."""
    assert stages_of(1, lam1=9.0, lam2=9.0)[1] == [1]
    assert stages_of(1, lam1=0.0, lam2=9.0)[1] == [2]
    assert stages_of(1, lam1=0.0, lam2=0.0)[1] == [3]
    assert stages_of(1, lam1=0.0, lam2=0.0, det_steps="RE")[1] == [2]


def after_one_round(clip: float | None, epochs: int = 2, **hyper: Any) -> tuple[StateDict, StateDict]:
    changes = {"local_epochs": epochs} if clip is None else {"local_epochs": epochs, "clip": {"norm": clip}}
    algorithm = squares.algorithms(PRRSite, squares.task(**changes), cpa="global", **hyper)["A"]
    server = server_of({"A": algorithm}, **hyper)
    reply = algorithm.perform("train", 0, server.configure(Step("train", 0), "A"))
    return algorithm.personal, {**algorithm.normalisation, **reply.states["model"]}


@pytest.mark.parametrize("clip", [None, 0.01])
def test_teachers_are_not_touched_by_their_students(clip: float | None) -> None:
    """Nor by the length of their gradients, where a step limits it."""
    alone, _ = after_one_round(clip, det=False)
    personal, deputy = after_one_round(clip, lam1=9.0, lam2=9.0)  # Recover only: P_k learns from labels alone
    assert equal(personal, alone)
    assert not equal(deputy, alone)
    alone, _ = after_one_round(clip, epochs=1, det=False)
    personal, deputy = after_one_round(clip, epochs=1, lam1=0.0, lam2=0.0)  # Sublimate only: D_k does
    assert equal(deputy, alone)
    assert not equal(personal, alone)


def test_the_personal_model_is_never_overwritten() -> None:
    algorithms = squares.algorithms(PRRSite)
    server = server_of(algorithms, rounds=3)
    for step in server.steps()[:3]:
        before = {name: algorithm.personal for name, algorithm in algorithms.items()}
        started = {}
        for name, algorithm in algorithms.items():
            personal, deputy = algorithm._models(server.configure(step, name))
            started[name] = dict(personal.state_dict())
            if before[name] is not None:
                assert equal(started[name], before[name])
                assert not equal(deputy.state_dict(), before[name])
        server.aggregate(
            step, {name: algorithm.perform("train", step.round, server.configure(step, name)) for name, algorithm in algorithms.items()}
        )


def rates(task: TaskConfig, rounds: int, **hyper: Any) -> list[list[float]]:
    """The learning rate of every step, by round."""
    found: list[list[float]] = []
    for round in range(rounds):
        algorithm = squares.algorithms(PRRSite, task, cpa="off", det=False, **hyper)["A"]
        optimizer, steps = algorithm.site.optimizer, list[float]()

        def spied(parameters: Any, optimizer: Any = optimizer, steps: list[float] = steps, **override: Any) -> torch.optim.Optimizer:
            made = optimizer(parameters, **override)
            made.register_step_pre_hook(lambda used, _args, _options: steps.append(used.param_groups[0]["lr"]))
            return made

        algorithm.site.optimizer = spied
        algorithm.perform("train", round, server_of({"A": algorithm}).configure(Step("train", round), "A"))
        found.append(steps)
    return found


def test_the_paper_halves_the_rate_after_every_25_epochs() -> None:
    found = rates(squares.task(local_epochs=10, batch_size=12), rounds=6)
    assert found[0] == found[1] == [0.01] * 10
    assert found[2] == [0.01] * 5 + [0.005] * 5, "the 25th epoch ends in the middle of a round"
    assert found[5] == [0.0025] * 10
    assert rates(squares.task(local_epochs=10, batch_size=12), rounds=6, halve_every=0)[5] == [0.01] * 10


# ---- curves -------------------------------------------------------------------------------------------------------------------


def test_the_retrogress_of_a_round_is_measured_on_request() -> None:
    """Fig. 1a: the model before aggregation beside the model that the next round begins with."""
    log, _, algorithms = federation(rounds=3, retrogress=True)
    for before, after in pairwise(log):
        for name in algorithms:
            trained = before.replies[name].meta["validation_trained"]
            assert trained.keys() == {"global", "personal"}
            assert trained["personal"] == after.replies[name].meta["validation"]["personal"], "P_k is never overwritten"
    for name, algorithm in algorithms.items():  # of the last round both parts of the trained deputy are at hand
        reply = log[-2].replies[name]
        deputy = algorithm.network("expected", {**algorithm.normalisation, **reply.states["model"]})
        assert algorithm.validation(deputy) == reply.meta["validation_trained"]["global"]
    assert "validation_trained" not in federation(rounds=1)[0][0].replies["A"].meta


def test_gamma_has_a_curve_for_every_class() -> None:
    log, _, _ = federation(squares.task(local_epochs=3), rounds=3, tau=1.0)
    first, last = log[0].replies["A"].meta, log[2].replies["A"].meta
    assert "gammas" not in first, "there is no refinement before there are prototypes"
    assert last["gammas"].keys() == {"not square", "square"} and all(len(curve) == 3 for curve in last["gammas"].values())
    assert last["gamma"] == {name: curve[-1] for name, curve in last["gammas"].items()}
    assert all(value >= 0.999 for curve in last["gammas"].values() for value in curve) and max(last["gamma"].values()) > 1.0
    assert "gammas" not in federation(rounds=3, cpa="global")[0][2].replies["A"].meta


# ---- options ------------------------------------------------------------------------------------------------------------------

CHANGES: list[dict[str, Any]] = [
    {"pfa": False},
    {"r0": 0.1},
    {"r1": 0.5},
    {"components": "amplitude"},
    {"components": "phase"},
    {"det": False},
    {"det_steps": "E"},
    {"det_steps": "RE"},
    {"lam1": 0.0, "lam2": 5.0},
    {"lam2": 5.0},
    {"cpa": "global"},
    {"cpa": "local"},
    {"cpa": "off"},
    {"cpa": "off", "plain_loss": "ce"},
    {"cpa": "off", "plain_loss": "focal"},
    {"cpa": "off", "plain_loss": "fedeamc"},
    {"beta": 0.2},
    {"tau": 1.0},
    {"warm_up": 2},
    {"halve_every": 1},
]


@pytest.fixture(scope="module")
def outcomes() -> Callable[..., StateDict]:
    """What two rounds of three epochs leave behind, by setting: site A's personal model and the one it would be sent next."""
    known = {}

    def outcome(**hyper: Any) -> StateDict:
        key = tuple(sorted(hyper.items()))
        if key not in known:
            settings: dict[str, Any] = {"lam1": 0.0, "lam2": 0.0, **hyper}
            _, server, algorithms = federation(squares.task(local_epochs=3), sites=("A", "B"), rounds=2, **settings)
            known[key] = algorithms["A"].personal | {f"next/{name}": tensor for name, tensor in server.aggregated["A"].items()}
        return known[key]

    return outcome


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_option_changes_the_result(outcomes: Callable[..., StateDict], change: dict[str, Any]) -> None:
    found = outcomes(**change)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert not equal(found, outcomes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r0": 0.4, "r1": 0.3}, "r0"),
        ({"lam1": 0.9, "lam2": 0.7}, "lam1"),
        ({"r1": 0.6}, "r1"),
        ({"tau": 0.5}, "tau"),
        ({"components": "amp"}, "components"),
    ],
)
def test_impossible_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_method("prr").check(change)

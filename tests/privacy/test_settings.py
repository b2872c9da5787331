"""DP-SGD as part of methods: who may, who may not and why, what is told, what it costs, and what the site itself forbids."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("opacus", reason="needs medflare[privacy]")

from opacus.accountants import RDPAccountant

import medflare
from helpers.small_tasks import INSTANCE_UNET, tiny_phantom
from medflare.core.errors import ConfigError, PrivacyError
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.core.store import StateStore
from medflare.federation.enrolment import identity_of
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.participant import Participant
from medflare.federation.run import Run
from medflare.federation.settings import run_settings
from medflare.methods.catalogue import get_method, method_names
from medflare.methods.fedavg import FedAvgSite
from medflare.privacy import rounds
from medflare.privacy import settings as privacy
from medflare.privacy.ledger import Budget, Release, training_patients
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.computing import Computing
from medflare.training.opening import open_site
from methods import squares

TINY = tiny_phantom()
PRIVATE: dict[str, Any] = {"dp_noise": 1.0}
ALLOWED: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "robust": {},
    "iop_fl": {},
    "moon": {},
    "sha": {"rho": 0.0},
    # Rules of the server: sites train as in FedAvg.
    **{key: {} for key in ("fedadagrad", "fedadam", "fedavgm", "fedawa", "fedce", "feddg_ga")},
    **{key: {} for key in ("fedlws", "fednova", "fedyogi", "fets_pid", "ida")},
}
# One method for each site algorithm and its settings.
TRAINED = {(get_method(name).site, *hyper): name for name, hyper in reversed(ALLOWED.items())}


def epsilon(noise: float, rate: float, steps: int, delta: float = 1e-5) -> float:
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    return accountant.get_epsilon(delta)


@pytest.fixture
def task() -> TaskConfig:
    """Of twelve training patients in batches of six: two steps an epoch."""
    return squares.WITHOUT_BATCH_NORM


class TestSupport:
    def test_every_method_supports_it_or_gives_a_reason(self, task: TaskConfig) -> None:
        with pytest.raises(ConfigError, match=r"^dp_noise: .*perturbed model"):
            get_method("sha").check({"rho": 0.3, **PRIVATE}, task)
        for name in method_names():
            method = get_method(name)
            if name in ALLOWED:
                method.check({**PRIVATE, **ALLOWED[name]}, task)
                hypers = [
                    method.plan(task, ("A",), {**hyper, **ALLOWED[name]}).site_hyper
                    for hyper in (PRIVATE, {})
                ]
                assert list(map(privacy.is_private, hypers)) == [True, False]
            else:
                with pytest.raises(ConfigError, match=rf"dp_noise.*'{name}'.{{40}}"):
                    method.check(PRIVATE)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"network": {**INSTANCE_UNET, "norm": "batch"}}, "BatchNorm2d.*unet"),
            ({"network": {"name": "deeplab"}}, "BatchNorm2d.*deeplab"),
            ({"loss": {"name": "dice", "batch": True}}, "loss dice"),
            # A norm that was rounded might exceed the clipping norm.
            ({"precision": "bf16"}, "precision 'bf16'"),
            ({"accumulate": 2}, "accumulate"),
            ({"sampling": "balanced"}, "sampling"),
        ],
    )
    def test_what_mixes_images_rounds_or_draws_otherwise_is_refused(
        self, changes: dict[str, Any], reason: str, tmp_path: Path
    ) -> None:
        from medflare.flare.jobs.building import build_job

        mixed = squares.task(**{"network": INSTANCE_UNET, **changes})
        get_method("fedavg").check({}, mixed)
        for refused in (
            lambda: medflare.run_local("fedavg", mixed, 2, rounds=1, seed=0, **PRIVATE),
            lambda: build_job("fedavg", mixed, out=tmp_path / "job", hyper=PRIVATE),
        ):
            with pytest.raises(ConfigError, match=reason) as caught:
                refused()
            assert "\n" not in str(caught.value)
        assert not (tmp_path / "job").exists()

    def test_without_opacus(self, task: TaskConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "medflare.privacy.dp_sgd", raising=False)
        monkeypatch.delattr("medflare.privacy.dp_sgd", raising=False)
        monkeypatch.setitem(sys.modules, "opacus", None)
        squares.algorithm(FedAvgSite, task=task)
        with pytest.raises(ConfigError, match="Opacus"):
            squares.algorithm(FedAvgSite, task=task, **PRIVATE)

    def test_delta_must_be_below_one_by_patients(self, task: TaskConfig) -> None:
        with pytest.raises(ConfigError, match="dp_delta") as caught:
            squares.algorithm(FedAvgSite, task=task, **PRIVATE, dp_delta=0.09)
        assert "12" not in str(caught.value), "the lead reads the line, and not how many they are"
        # outside: it never trains.
        squares.algorithm(FedAvgSite, "O", task=task, **PRIVATE, dp_delta=0.09)


class TestTraining:
    @pytest.mark.parametrize("method", TRAINED.values())
    def test_every_method_trains_through_the_mechanism(
        self, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Noise so large that nothing else could have moved the weights so far, in every round."""
        monkeypatch.setattr(rounds, "system_generator", lambda: np.random.default_rng(5))
        task = squares.task(network=INSTANCE_UNET, optimizer={"name": "sgd", "lr": 1.0})
        algorithm = squares.algorithm(
            get_method(method).site_class, task=task, dp_noise=100.0, **ALLOWED[method]
        )
        for round in range(2):
            start = squares.start(task)
            reply = algorithm.perform("train", round, Message({"model": copy_state(start)}))
            moves = torch.cat(
                [(reply.states["model"][name] - start[name]).flatten() for name in start]
            )
            deviation = 100.0 / 6 * 2**0.5  # σ C / L a step, two steps
            assert moves.std().item() == pytest.approx(deviation, rel=0.2)
            assert reply.meta["loss"] is None
            assert reply.meta["privacy"]["steps"] == 2 * (round + 1)

    def test_a_hook_that_changes_gradients_is_refused(self, task: TaskConfig) -> None:
        class Hooked(FedAvgSite):
            def round_hook(self, *arguments: Any) -> Any:
                return lambda: None

        with pytest.raises(ConfigError, match="gradient hook"):
            squares.trained(Hooked, task=task, **PRIVATE)

    def test_the_server_cannot_reproduce_the_noise(self, task: TaskConfig) -> None:
        """Everything that the server knows is the same, and still it cannot tell what the noise was."""
        first, second = (squares.trained(FedAvgSite, task=task, **PRIVATE)[0] for _ in range(2))
        assert not squares.equal(first, second)
        assert len({rounds.system_generator().integers(2**63) for _ in range(50)}) == 50

    def test_epsilon_is_in_every_round_and_in_the_results(self, tmp_path: Path) -> None:
        output: list[str] = []
        results = medflare.run_local(
            "fedavg",
            TINY,
            2,
            rounds=2,
            seed=3,
            outside=["site-9"],
            out=tmp_path,
            say=output.append,
            **PRIVATE,
        )
        assert results["status"] == "COMPLETED"
        assert {event["kind"] for event in results["events"]} <= {"at_chance"}, (
            "noise leaves little to learn"
        )
        lines = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
        told = {}
        for site in ("site-1", "site-2"):
            told[site] = [
                line["sites"][site]["privacy"] for line in lines if line["phase"] == "train"
            ]
        for name, costs in told.items():
            patients = training_patients(open_site(name, load_task(TINY)))
            steps = -(-patients // 16)
            assert [cost["steps"] for cost in costs] == [steps, 2 * steps]
            assert costs[1]["epsilon"] == pytest.approx(
                epsilon(1.0, min(1, 16 / patients), 2 * steps)
            )
            assert results["sites"][name]["privacy"] == costs[1]
            assert f"ε {costs[1]['epsilon']:.3f}" in output[1] and "loss" not in output[1]
            assert (
                f"ε = {costs[1]['epsilon']:.3f} at δ = 1e-05"
                in (tmp_path / "report.html").read_text()
            )
        assert "privacy" not in results["sites"]["site-9"]


class TestAccount:
    """A participant that lives from process to process on what lies in its folder."""

    @pytest.fixture
    def ask(self, task: TaskConfig, tmp_path: Path) -> Any:
        method = get_method("fedavg")
        start = squares.start(task)

        def ask(
            phase: str,
            step: int = 0,
            budget: Budget | None = None,
            finished: int = 0,
            run: str = "state",
        ) -> Message:
            site = squares.site("A", task)
            participant = squares.participant(
                site, method, PRIVATE, store=StateStore(tmp_path / run), budget=budget
            )
            if phase == "enrol":
                meta = {
                    **identity_of(method, PRIVATE, task.fingerprint(), squares.site().seed),
                    "role": "inside",
                    "sites": ["A"],
                }
                return participant.reply("enrol", 0, Message({}, {**meta, "finished": finished}))
            return participant.reply(
                phase, step, Message({"model": copy_state(start)}, {"step": step, "run_rounds": 3})
            )

        return ask

    @pytest.mark.parametrize(
        ("asked", "steps"),
        [
            (["new", 0, 1, 2], [2, 4, 6]),
            # Of a repeated step, the first answer has left the site all the same.
            (["new", 0, 1, 1, 1], [2, 4, 6, 8]),
            # The server cannot begin anew: a ledger only grows.
            (["new", 0, "resumed", 1, "new", 2], [2, 4, 6]),
        ],
    )
    def test_the_account_of_a_run_continues_from_process_to_process(
        self, ask: Any, asked: list[Any], steps: list[int]
    ) -> None:
        told = []
        for step in asked:
            if step in (0, 1, 2):
                told.append(ask("train", step))
            else:
                told.append(ask("enrol", finished=int(step == "resumed")))
        trained = []
        for step, answer in zip(asked, told, strict=True):
            if step in (0, 1, 2):
                trained.append(answer.meta["privacy"]["steps"])
        assert trained == steps
        last = ask("finalize", 3).meta["privacy"]
        assert last["steps"] == steps[-1] and last["epsilon"] == pytest.approx(
            epsilon(1.0, 0.5, steps[-1])
        )

    def test_a_crashed_round_is_counted(self, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        ask("enrol")
        with monkeypatch.context() as patched:
            patched.setattr("medflare.privacy.dp_sgd.train_dp_sgd", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ask("train", 0)
        assert ask("train", 0).meta["privacy"]["steps"] == 4

    def test_the_sites_budget_counts_over_all_runs(self, ask: Any, tmp_path: Path) -> None:
        budget = Budget(epsilon(1.0, 0.5, 7), 1e-5, tmp_path / "kept", "A")
        for run in "123":  # runs of one round; the budget is for three
            ask("enrol", budget=budget, run=run)
            ask("train", 0, budget=budget, run=run)
        ask("enrol", budget=budget, run="4")
        with pytest.raises(PrivacyError, match="ε"):
            ask("train", 0, budget=budget, run="4")
        assert budget.ledger.releases() == [Release(1.0, 0.5, 6)]
        assert (
            ask("validate", 3, budget=budget, run="4").meta["validation"]["global"] is not None
        ), "measuring costs no training patient anything"


def test_a_run_continues_without_a_site_whose_budget_is_spent(tmp_path: Path) -> None:
    method = get_method("fedavg")
    sites = ("site-1", "site-2", "site-3")

    def opened(name: str) -> Participant:
        budget = Budget(1e-3, 1e-5, tmp_path, name) if name == "site-2" else None
        return Participant(
            name, lambda role: open_site(name, load_task(TINY)), method, PRIVATE, budget=budget
        )

    run = Run(method, load_task(TINY), PRIVATE, run_settings({"rounds": 1, "seed": 0}), sites)
    results = run.execute(LocalExchange(sites, opened))
    assert results["status"] == "COMPLETED"
    (event,) = [event for event in results["events"] if event["kind"] == "failed"]
    assert event["site"] == "site-2" and "its own budget is 0.001" in event["message"]
    assert (
        "privacy" not in results["sites"]["site-2"]
        and results["sites"]["site-1"]["privacy"]["steps"]
    )


def test_compiled_networks_are_refused() -> None:
    site = squares.site("A", squares.task(network=INSTANCE_UNET))
    site.computing = Computing(site.device, compiled=True)
    with pytest.raises(ConfigError, match="compile"):
        privacy.check_private_site(site, privacy.PrivacyHyper(dp_noise=1.0))


@pytest.mark.parametrize("name", ["UNet", "SegResNet"])
def test_monai_networks_get_each_image_alone(name: str) -> None:
    """Also one whose activations change their input in place."""
    own = {
        "UNet": {"channels": [4, 8], "strides": [2]},
        "SegResNet": {"blocks_down": [1, 1], "blocks_up": [1]},
    }[name]
    task = tiny_phantom(network={"name": name, **own})
    results = medflare.run_local("fedavg", task, 2, rounds=1, seed=0, dp_noise=1.0)
    assert results["status"] == "COMPLETED"

"""Transport as bfloat16: rounded values, no accumulated error, and runs that end like those in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_tasks import INSTANCE_UNET, tiny_phantom
from medflare.core.errors import MessageError
from medflare.core.manifest import violation
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.federation.exchange import numbered
from medflare.federation.local.loop import run_local
from medflare.federation.update_validation.messages import RequestValidator
from medflare.federation.update_validation.rounding import TRANSPORT_DTYPE, Rounding
from medflare.inference.deployed import load_model
from medflare.methods.base import Plan
from medflare.methods.catalogue import get_method
from medflare.tasks.config import load_task
from methods import squares

TASK = tiny_phantom(network={"name": "unet", "channels": [4, 8], "norm": "batch"})
SITES = ("A", "B")
HALF = torch.bfloat16


def planned(method: str = "fedavg", **hyper: Any) -> Plan[Any, Any]:
    return get_method(method).plan(load_task(TASK), SITES, hyper)


def model(plan: Plan[Any, Any], seed: int) -> StateDict:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(tensor.shape, generator=generator) if tensor.is_floating_point() else torch.tensor(seed)
        for name, tensor in plan.template().items()
    }


def large(state: StateDict) -> list[str]:
    return [name for name, tensor in state.items() if tensor.ndim > 1]


class TestConversion:
    plan = planned()
    train = get_method("fedavg").site_class.phase("train")
    rounding = Rounding(plan)

    def test_only_kernels_are_rounded(self) -> None:
        weights = model(self.plan, 1)
        sent = self.rounding.down(self.train, Message({"model": weights}, {"step": 0}), {})
        assert sent.meta == {"step": 0, TRANSPORT_DTYPE: "bf16"}
        assert 0 < len(large(weights)) < len(weights)
        for name, tensor in weights.items():
            received = sent.states["model"][name]
            assert torch.equal(received, tensor.to(HALF)) and received.dtype == HALF if tensor.ndim > 1 else received is tensor
        assert not violation(
            Message(sent.states), {"model": self.rounding.sent(self.train.request[0], self.train.request[0].spec(self.plan))}
        )

    def test_a_rounded_update_is_added_to_the_servers_weights(self) -> None:
        weights, trained = model(self.plan, 1), model(self.plan, 2)
        incoming = self.rounding.widened(self.rounding.down(self.train, Message({"model": weights}), {}))
        assert all(incoming.states["model"][name].dtype == tensor.dtype for name, tensor in weights.items())
        reply = self.rounding.up(self.train, Message({"model": trained}, {"loss": 1.0}), incoming)
        assert not violation(reply, self.rounding.manifest(self.train)) and reply.meta == {"loss": 1.0}
        restored = self.rounding.restored(reply, Message({"model": weights})).states["model"]
        for name, tensor in trained.items():
            update = (tensor - weights[name].to(HALF).float()).to(HALF) if tensor.ndim > 1 else None
            assert torch.equal(restored[name], tensor if update is None else update.float() + weights[name])

    def test_small_updates_of_large_weights_are_not_lost(self) -> None:
        weights = {name: torch.ones_like(tensor) for name, tensor in model(self.plan, 1).items()}
        incoming = self.rounding.widened(self.rounding.down(self.train, Message({"model": weights}), {}))
        trained = {name: tensor + 2**-12 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
        assert all(torch.equal(trained[name].to(HALF), weights[name].to(HALF)) for name in large(trained)), "would vanish as weights"
        restored = self.rounding.restored(self.rounding.up(self.train, Message({"model": trained}), incoming), Message({"model": weights}))
        assert all(torch.equal(restored.states["model"][name], trained[name]) for name in large(trained))

    @pytest.mark.parametrize(
        ("method", "phase", "rounded", "exact"),
        [
            ("scaffold", "train", {"model"}, {"control_update"}),
            ("fedsm", "train", {"model", "personal"}, set()),
            ("fedsm", "selector_features", set(), {"selector_statistics"}),
            ("prr", "train", {"model"}, {"prototypes"}),
            ("prr", "share_normalisation", set(), {"normalisation"}),
            ("fedrep", "share", set(), {"local"}),
            ("fedrep", "train", {"model"}, set()),
        ],
    )
    def test_only_new_versions_of_weights_are_replied_rounded(self, method: str, phase: str, rounded: set[str], exact: set[str]) -> None:
        chosen = get_method(method)
        manifest = Rounding(planned(method)).manifest(chosen.site_class.phase(phase))
        algorithms = {entry for entry, spec in manifest.items() if HALF in {dtype for _, dtype in spec.tensors.values()}}
        assert algorithms == rounded and exact <= manifest.keys()


# -- runs ----------------------------------------------------------------------------------------------------------------------


def run(method: str = "fedavg", folder: Path | None = None, transport_dtype: str = "bf16", rounds: int = 3, **more: Any) -> dict[str, Any]:
    results = run_local(method, TASK, 2, rounds=rounds, seed=1, out=folder, transport_dtype=transport_dtype, **more)
    assert results["status"] == "COMPLETED", results["reason"]
    return results


def delivered(folder: Path, role: str = "global") -> StateDict:
    return load_model(folder / "models" / role).message.states["model"]


@pytest.mark.parametrize("method", ["fedavg", "prr"])
def test_a_run_ends_with_the_dice_of_one_in_fp32(method: str) -> None:
    """Bright squares, which six rounds learn: every site's test Dice within .01, and the same events."""
    task = squares.task(network=INSTANCE_UNET, local_epochs=4)
    summary = []
    fresh: dict[str, Any] = {} if method == "prr" else {"reset_optimizer": True}  # as prr: with it six rounds are enough
    for transport_dtype in ("fp32", "bf16"):
        results = run_local(
            method,
            task,
            ["A", "B"],
            rounds=6,
            seed=squares.SEED,
            transport_dtype=transport_dtype,
            opener=lambda name, role: squares.site(name, task),
            **fresh,
        )
        assert results["status"] == "COMPLETED" and results["configuration"]["settings"]["transport_dtype"] == transport_dtype, results[
            "reason"
        ]
        summary.append([site["metrics"]["deployed"]["dice"] for site in results["sites"].values()])
        summary.append([event["kind"] for event in results["events"]])
    exact, events, rounded, same_events = summary
    assert events == same_events and min(exact) > 0.9
    assert all(abs(one - other) < 0.01 for one, other in zip(exact, rounded, strict=True)), summary


def test_traffic_of_the_rounds_halves_and_final_models_are_fp32(tmp_path: Path) -> None:
    history = [run("fedavg", tmp_path / transport_dtype, transport_dtype)["traffic"] for transport_dtype in ("fp32", "bf16")]
    up = [traffic["up_bytes"] for traffic in history]
    assert 0.5 <= up[1] / up[0] < 0.6  # this network is small: a tenth of its weights are no kernels
    assert all(tensor.dtype != HALF for tensor in delivered(tmp_path / "bf16").values())
    assert any(not torch.equal(tensor, tensor.to(HALF)) for tensor in delivered(tmp_path / "bf16").values() if tensor.ndim > 1)


def test_a_site_that_sends_fp32_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    up = Rounding.up
    calls: list[Any] = []

    def unrounded(self: Rounding, phase: Any, reply: Message, incoming: Message) -> Message:
        calls.append(1)
        return reply if len(calls) == 1 else up(self, phase, reply, incoming)

    monkeypatch.setattr(Rounding, "up", unrounded)
    results = run(min_sites=1, rounds=1)
    (event,) = (event for event in results["events"] if event["kind"] == "rejected")
    assert event["site"] == "site-1" and "float32" in event["message"]


def test_a_site_accepts_rounded_weights_only_if_the_server_says_so() -> None:
    method = get_method("fedavg")
    algorithm = method.make_site(squares.site("A"), method.plan(squares.site("A").task, ("A", "B"), {}))
    weights = Message({"model": squares.start(squares.site("A").task)})
    sent = numbered(Rounding(algorithm.plan).down(algorithm.phase("train"), weights, {}), 0, 1)
    validator = RequestValidator("A")
    assert validator.pop_numbers("train", 0, sent) == {"step": 0, "run_rounds": 1, "transport_dtype": "bf16"}
    validator.check_request("train", 0, sent, algorithm, rounded=True)
    with pytest.raises(MessageError, match="bfloat16"):
        validator.check_request("train", 0, sent, algorithm)
    with pytest.raises(MessageError, match="float32"):
        validator.check_request("train", 0, weights, algorithm, rounded=True)

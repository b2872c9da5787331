"""The bases of all algorithms: persistent states, declared phases, the plan and the context that both algorithms share."""

from typing import Any, ClassVar

import pytest
import torch
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, Phase, TensorSpec
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.store import MemoryStore
from medflare.methods.base import PersistentState, Plan, ServerContext, ServerHyper, SiteAlgorithm, SiteHyper
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.method import extended
from methods import squares

W = {"w": torch.ones(2)}


@dataclass(frozen=True, config=STRICT)
class EchoHyper(SiteHyper):
    more: bool = param(False, "send an undeclared state")
    less: bool = param(False, "send no state")
    more_meta: bool = param(False, "send undeclared metadata")
    twice: bool = param(False, "send the copy too, which is then declared")


MODEL, COPY = (
    TensorSpec("model", "the incoming model", lambda plan: W),
    TensorSpec("copy", "", lambda plan: W, lambda plan: plan.site_hyper.twice),
)
LOSS = MetaSpec("loss")


class Echo(SiteAlgorithm[EchoHyper]):
    """Sends back what it is sent, or something else."""

    Hyper: ClassVar[type] = EchoHyper
    phases: ClassVar[tuple[Phase, ...]] = (Phase("train", request=(MODEL,), reply=(MODEL, COPY), reply_meta=(LOSS,)), Phase("look"))
    last = PersistentState("last")
    first = PersistentState("first")

    def train(self, round: int, incoming: Message) -> Message:
        self.last = incoming.states["model"]
        states = {} if self.hyper.less else {"model": self.last}
        if self.hyper.more or self.hyper.twice:
            states["copy"] = self.last
        return Message(states, {"loss": 1.0, **({"name": "somebody"} if self.hyper.more_meta else {})})

    def look(self, round: int, incoming: Message) -> Message:
        return Message()

    def finalize(self, incoming: Message) -> dict[str, Message]:
        return {}


def echo(**hyper: Any) -> Echo:
    return squares.algorithm(Echo, **hyper)


def test_persistent_states_are_in_the_memory_of_one_algorithm_and_outlive_the_process() -> None:
    algorithm, other, restored, store = echo(), echo(), echo(), MemoryStore()
    assert algorithm.last is None
    algorithm.perform("train", 0, Message({"model": W}))
    assert algorithm.memory.states == {"last": W} and other.last is None
    store.save("algorithm", algorithm.memory)
    stored = store.load("algorithm")
    assert stored is not None
    restored.restore(stored)
    assert restored.last is not None and squares.equal(restored.last, W)
    restored.first = W
    assert restored.memory.states.keys() == {"last", "first"}
    restored.first = None
    assert restored.memory.states.keys() == {"last"} and restored.first is None


class TestPhases:
    def test_a_declared_reply_passes_and_its_manifest_follows_the_plan(self) -> None:
        for twice, entries in ((False, {"model"}), (True, {"model", "copy"})):
            algorithm = echo(twice=twice)
            reply, manifest = algorithm.perform("train", 0, Message({"model": W})), Echo.manifest("train", algorithm.plan)
            assert reply.states.keys() == manifest.keys() == entries and reply.meta == {"loss": 1.0}
            assert manifest["model"].tensors == {"w": ((2,), torch.float32)} and manifest["model"].purpose == MODEL.purpose
        assert Echo.manifest("look", algorithm.plan) == {}

    @pytest.mark.parametrize(("option", "offender"), [("more", "copy"), ("less", "model"), ("more_meta", "name")])
    def test_an_undeclared_reply_is_an_error_of_the_method(self, option: str, offender: str) -> None:
        with pytest.raises(ConfigError, match=f"Echo.*'train'.*'{offender}'"):
            echo(**{option: True}).perform("train", 0, Message({"model": W}))

    def test_an_unknown_phase_is_named(self) -> None:
        for ask in (lambda: echo().perform("score", 0, Message()), lambda: Echo.manifest("score", echo().plan)):
            with pytest.raises(ConfigError, match="score"):
                ask()


class Counting(SiteAlgorithm[Any]):
    """An extension of any site algorithm."""

    phases: ClassVar[tuple[Phase, ...]] = tuple(Phase(name, reply_meta=(MetaSpec("count"),)) for name in ("train", "count"))

    def train(self, round: int, incoming: Message) -> Message:
        reply: Message = super().train(round, incoming)  # type: ignore[misc]
        reply.meta["count"] = 3
        return reply

    def count(self, round: int, incoming: Message) -> Message:
        return Message({}, {"count": 3})


def test_an_extended_site_algorithm_has_the_phases_of_both() -> None:
    both: Any = extended(Echo, Counting)
    assert [phase.name for phase in both.phases] == ["train", "look", "count"]
    assert issubclass(both, Echo) and both.Hyper is EchoHyper
    algorithm = squares.algorithm(both)
    assert algorithm.perform("train", 0, Message({"model": W})).meta == {"loss": 1.0, "count": 3}
    assert algorithm.perform("count", 0, Message()).meta == {"count": 3}
    assert extended(Echo, None) is Echo and extended(both, Counting) is both
    assert [phase.name for phase in Echo.phases] == ["train", "look"]


class TestContext:
    def test_shapes_of_the_sites_replies(self) -> None:
        context = ServerContext(squares.plan_of(FedAvgSite, FedAvgServer), squares.SEED, 3, phases=FedAvgSite.phases)
        spec = context.reply_spec("train", "model")
        assert spec is not None and spec.tensors.keys() == squares.start().keys()
        assert context.reply_spec("train", "other") is None and context.reply_spec("validate", "model") is None
        for twice in (False, True):
            context = ServerContext(squares.plan_of(Echo, FedAvgServer, twice=twice), 0, 1, phases=Echo.phases)
            assert (context.reply_spec("train", "copy") is not None) == twice

    def test_notes_are_collected_by_site(self) -> None:
        context = ServerContext(squares.plan_of(FedAvgSite, FedAvgServer), squares.SEED, 3)
        context.note(weight={"A": 0.4, "B": float("nan")})
        context.note(score={"A": 1.0})
        assert context.notes == {"A": {"weight": 0.4, "score": 1.0}, "B": {"weight": None}}

    def test_initial_weights_are_those_of_the_sites(self) -> None:
        context = ServerContext(squares.plan_of(FedAvgSite, FedAvgServer), squares.SEED, 3)
        first = context.initial_state()
        assert squares.equal(first, squares.start())
        next(iter(first.values())).add_(1)
        assert squares.equal(context.initial_state(), squares.start()), "every call gives a copy"


def test_a_plans_template_is_on_the_meta_device() -> None:
    plan: Plan[SiteHyper, ServerHyper] = Plan(squares.SEGMENTATION, squares.SITES, SiteHyper(), ServerHyper())
    assert all(tensor.is_meta for tensor in plan.template().values())
    assert {name: tensor.shape for name, tensor in plan.template().items()} == {n: t.shape for n, t in squares.start().items()}
    selector = plan.template({"name": "compact_selector", "side": 4, "hidden": 8}, 3)
    assert list(selector.values())[-1].shape[0] == 3


def test_networks_are_built_once_and_loaded_in_place() -> None:
    algorithm, weights = squares.algorithm(FedAvgSite), squares.start()
    network = algorithm.network("model", weights)
    pointers = [tensor.data_ptr() for tensor in network.state_dict().values()]
    again = algorithm.network("model", {name: tensor + 1 for name, tensor in weights.items()})
    assert again is network and algorithm.network("other", weights) is not network
    assert [tensor.data_ptr() for tensor in network.state_dict().values()] == pointers
    assert squares.equal(network.state_dict(), {name: tensor + 1 for name, tensor in weights.items()})

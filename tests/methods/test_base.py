"""What every algorithm has: states that outlive the process, phases that are kept to, a plan that both algorithms share."""

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
    more: bool = param(False, "send more than is declared")
    less: bool = param(False, "send less")
    talk: bool = param(False, "tell more")
    twice: bool = param(False, "send the copy too, which is declared")


MODEL, COPY = (
    TensorSpec("model", "to be looked at", lambda plan: W),
    TensorSpec("copy", "", lambda plan: W, lambda plan: plan.site_hyper.twice),
)
LOSS = MetaSpec("loss")


class Echo(SiteAlgorithm[EchoHyper]):
    """Sends back what it is sent, or not quite."""

    Hyper: ClassVar[type] = EchoHyper
    phases: ClassVar[tuple[Phase, ...]] = (Phase("train", request=(MODEL,), reply=(MODEL, COPY), reply_meta=(LOSS,)), Phase("look"))
    last = PersistentState("last")
    first = PersistentState("first")

    def train(self, round: int, incoming: Message) -> Message:
        self.last = incoming.states["model"]
        states = {} if self.hyper.less else {"model": self.last}
        if self.hyper.more or self.hyper.twice:
            states["copy"] = self.last
        return Message(states, {"loss": 1.0, **({"name": "somebody"} if self.hyper.talk else {})})

    def look(self, round: int, incoming: Message) -> Message:
        return Message()

    def finalize(self, incoming: Message) -> dict[str, Message]:
        return {}


def half(**hyper: Any) -> Echo:
    return squares.algorithm(Echo, **hyper)


class TestKept:
    def test_what_is_assigned_lies_in_the_memory_of_this_half_alone(self) -> None:
        one, other = half(), half()
        assert one.last is None
        one.last = W
        assert one.memory.states == {"last": W} and one.last is W
        assert other.last is None and one.first is None

    def test_none_takes_it_away(self) -> None:
        one = half()
        one.last = W
        one.last = None
        one.first = None
        assert one.last is None and one.memory == Message()

    def test_it_outlives_the_process(self) -> None:
        one, again, store = half(), half(), MemoryStore()
        one.perform("train", 0, Message({"model": W}))
        store.save("algorithm", one.memory)
        kept = store.load("algorithm")
        assert kept is not None
        again.restore(kept)
        assert again.last is not None and squares.equal(again.last, W)
        again.first = W
        assert again.memory.states.keys() == {"last", "first"}, "and memory goes on being the algorithm's"


class TestPhases:
    def test_a_reply_as_declared_passes(self) -> None:
        reply = half().perform("train", 0, Message({"model": W}))
        assert reply.states == {"model": W} and reply.meta == {"loss": 1.0}
        assert half(twice=True).perform("train", 0, Message({"model": W})).states.keys() == {"model", "copy"}

    @pytest.mark.parametrize(
        ("hyper", "words"),
        [
            ({"more": True}, "unexpected entry 'copy'"),
            ({"less": True}, "missing entry 'model'"),
            ({"talk": True}, "unexpected item 'name'"),
        ],
    )
    def test_a_reply_that_holds_other_things_is_an_error_of_the_method(self, hyper: dict[str, bool], words: str) -> None:
        with pytest.raises(ConfigError, match=f"Echo.*'train'.*{words}$"):
            half(**hyper).perform("train", 0, Message({"model": W}))

    def test_an_unknown_phase_is_named_with_the_known_ones(self) -> None:
        for ask in (lambda: half().perform("score", 0, Message()), lambda: Echo.manifest("score", half().plan)):
            with pytest.raises(ConfigError, match="score"):
                ask()

    def test_a_manifest_goes_by_the_plan(self) -> None:
        assert Echo.manifest("train", half().plan).keys() == {"model"}
        manifest = Echo.manifest("train", half(twice=True).plan)
        assert manifest.keys() == {"model", "copy"} and manifest["copy"].tensors == {"w": ((2,), torch.float32)}
        assert manifest["model"].purpose == "to be looked at" and Echo.manifest("look", half().plan) == {}


class TestExtended:
    class Counting(SiteAlgorithm[Any]):
        """What some server asks of any site."""

        phases: ClassVar[tuple[Phase, ...]] = (
            Phase("train", reply_meta=(MetaSpec("count"),)),
            Phase("count", reply_meta=(MetaSpec("count"),)),
        )

        def train(self, round: int, incoming: Message) -> Message:
            reply: Message = super().train(round, incoming)  # type: ignore[misc]
            reply.meta["count"] = 3
            return reply

        def count(self, round: int, incoming: Message) -> Message:
            return Message({}, {"count": 3})

    def test_a_site_half_does_and_declares_what_both_say(self) -> None:
        both: Any = extended(Echo, self.Counting)
        assert [phase.name for phase in both.phases] == ["train", "look", "count"]
        assert both.__name__ == "CountingEcho" and issubclass(both, Echo)
        member = squares.algorithm(both)
        assert member.perform("train", 0, Message({"model": W})).meta == {"loss": 1.0, "count": 3}
        assert member.perform("count", 0, Message()).meta == {"count": 3}

    def test_hyper_parameters_stay_the_sites(self) -> None:
        assert extended(Echo, self.Counting).Hyper is EchoHyper

    def test_without_an_extension_or_with_it_already_nothing_changes(self) -> None:
        both = extended(Echo, self.Counting)
        assert extended(Echo, None) is Echo and extended(both, self.Counting) is both
        assert [phase.name for phase in Echo.phases] == ["train", "look"]


class TestContext:
    def test_what_the_sites_answer(self) -> None:
        plan = squares.plan_of(FedAvgSite, FedAvgServer)
        context = ServerContext(plan, squares.SEED, 3, phases=FedAvgSite.phases)
        spec = context.answer("train", "model")
        assert spec is not None and spec.tensors.keys() == squares.start().keys()
        assert context.answer("train", "other") is None and context.answer("validate", "model") is None
        assert ServerContext(plan, squares.SEED, 3).answer("train", "model") is None, "nobody has said"
        assert (context.task, context.sites) == (plan.task, squares.SITES)

    def test_an_entry_that_is_not_sent_under_these_settings_is_no_answer(self) -> None:
        for twice in (False, True):
            context = ServerContext(squares.plan_of(Echo, FedAvgServer, twice=twice), 0, 1, phases=Echo.phases)
            assert (context.answer("train", "copy") is not None) == twice

    def test_notes_are_gathered_by_site_and_can_be_written_down(self) -> None:
        context = ServerContext(squares.plan_of(FedAvgSite, FedAvgServer), squares.SEED, 3)
        context.note(weight={"A": 0.4, "B": float("nan")})
        context.note(score={"A": 1.0})
        assert context.notes == {"A": {"weight": 0.4, "score": 1.0}, "B": {"weight": None}}

    def test_initial_weights_are_those_of_every_site_and_the_callers_own(self) -> None:
        context = ServerContext(squares.plan_of(FedAvgSite, FedAvgServer), squares.SEED, 3)
        first = context.initial_state()
        assert squares.equal(first, squares.start())
        next(iter(first.values())).add_(1)
        assert squares.equal(context.initial_state(), squares.start())


def test_a_plans_network_has_no_memory() -> None:
    plan: Plan[SiteHyper, ServerHyper] = Plan(squares.SEGMENTATION, squares.SITES, SiteHyper(), ServerHyper())
    assert all(tensor.is_meta for tensor in plan.template().values())
    assert {name: tensor.shape for name, tensor in plan.template().items()} == {n: t.shape for n, t in squares.start().items()}
    selector = plan.template({"name": "compact_selector", "side": 4, "hidden": 8}, 3)
    assert list(selector.values())[-1].shape[0] == 3


def test_networks_stay_where_they_are_from_round_to_round() -> None:
    """Built and brought to the device once; a round loads its weights into the memory that is there."""
    algorithm, weights = squares.algorithm(FedAvgSite), squares.start()
    network = algorithm.network("model", weights)
    places = [tensor.data_ptr() for tensor in network.state_dict().values()]
    again = algorithm.network("model", {name: tensor + 1 for name, tensor in weights.items()})
    assert again is network and algorithm.network("other", weights) is not network
    assert [tensor.data_ptr() for tensor in network.state_dict().values()] == places
    assert squares.equal(network.state_dict(), {name: tensor + 1 for name, tensor in weights.items()})

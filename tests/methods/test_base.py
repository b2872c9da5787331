"""The bases of all algorithms: persistent states, declared phases, the plan and the context that both algorithms share."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.phases import asks, extends, handles, phase
from medflare.core.settings import STRICT
from medflare.core.specs import MetaSpec, TensorSpec
from medflare.core.store import MemoryStore
from medflare.federation.protocol import request_problem
from medflare.methods.base import (
    PersistentState,
    Plan,
    ServerAlgorithm,
    ServerContext,
    ServerHyper,
    SiteAlgorithm,
    SiteHyper,
    Step,
)
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.method import extended
from medflare.methods.parts.measured import VALIDATION
from methods import squares

W = {"w": torch.ones(2)}


@dataclass(frozen=True, config=STRICT)
class EchoHyper(SiteHyper):
    more: bool = param(False, "send an undeclared state")
    less: bool = param(False, "send no state")
    more_meta: bool = param(False, "send undeclared metadata")
    twice: bool = param(False, "send the copy too, which is then declared")


MODEL = TensorSpec("model", "the incoming model", lambda plan: W)
COPY = TensorSpec("copy", "", lambda plan: W, lambda plan: plan.site_hyper.twice)
LOSS = MetaSpec[float]("loss")
COUNT = MetaSpec[int]("count")


class Echo(SiteAlgorithm[EchoHyper]):
    """Sends back what it is sent, or something else."""

    last = PersistentState("last")
    first = PersistentState("first")

    @phase(request=(MODEL,), reply=(MODEL, COPY), meta=(LOSS,))
    def train(self, round: int, incoming: Message) -> Message:
        self.last = incoming[MODEL]
        reply = Message.of({LOSS: 1.0})
        if not self.hyper.less:
            reply[MODEL] = self.last
        if self.hyper.more or self.hyper.twice:
            reply[COPY] = self.last
        if self.hyper.more_meta:
            reply.meta["name"] = "somebody"
        return reply

    @phase()
    def look(self, round: int, incoming: Message) -> Message:
        return Message()

    def finalize(self, incoming: Message) -> dict[str, Message]:
        return {}


def echo(**hyper: Any) -> Echo:
    return squares.algorithm(Echo, **hyper)


def test_persistent_states_are_in_the_memory_of_one_algorithm_and_outlive_the_process() -> None:
    algorithm = echo()
    other = echo()
    restored = echo()
    store = MemoryStore()
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
            reply = algorithm.perform("train", 0, Message({"model": W}))
            manifest = Echo.manifest("train", algorithm.plan)
            assert reply.states.keys() == manifest.keys() == entries and reply.meta == {"loss": 1.0}
            assert (
                manifest["model"].tensors == {"w": ((2,), torch.float32)}
                and manifest["model"].purpose == MODEL.purpose
            )
        assert Echo.manifest("look", algorithm.plan) == {}

    @pytest.mark.parametrize(
        ("option", "offender"), [("more", "copy"), ("less", "model"), ("more_meta", "name")]
    )
    def test_an_undeclared_reply_is_an_error_of_the_method(
        self, option: str, offender: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"Echo.*'train'.*'{offender}'"):
            echo(**{option: True}).perform("train", 0, Message({"model": W}))

    def test_an_unknown_phase_is_named(self) -> None:
        for ask in (
            lambda: echo().perform("score", 0, Message()),
            lambda: Echo.manifest("score", echo().plan),
        ):
            with pytest.raises(ConfigError, match="score"):
                ask()


class Loud(Echo):
    """An override keeps the declaration; the class's type parameter is inherited."""

    def train(self, round: int, incoming: Message) -> Message:
        return super().train(round, incoming)


class Quiet(Echo):
    """An override with a declaration of its own replaces the inherited one."""

    @phase(request=(MODEL,), meta=(LOSS,))
    def train(self, round: int, incoming: Message) -> Message:
        return Message.of({LOSS: 0.0})


def test_an_override_keeps_its_declaration_or_replaces_it() -> None:
    assert Loud.phases == Echo.phases and Loud.Hyper is EchoHyper
    assert Loud.phase("train").reply == (MODEL, COPY) and Quiet.phase("train").reply == ()
    assert Quiet.phase("look") == Echo.phase("look")


@pytest.mark.parametrize("request_of_phase", [MODEL, (VALIDATION,), [MODEL]])
def test_a_declaration_of_other_things_than_specs_is_refused(request_of_phase: Any) -> None:
    with pytest.raises(ConfigError, match=r"train: write request as a tuple .* TensorSpec only"):

        class WrongSite(FedAvgSite[Any]):
            @phase(request=request_of_phase)
            def train(self, round: int, incoming: Message) -> Message:
                return incoming


@pytest.mark.parametrize("decorator", [asks, handles])
def test_a_phase_by_its_name_is_refused(decorator: Any) -> None:
    with pytest.raises(ConfigError, match=r"'train': name a method, as MySite\.train"):
        decorator("train")
    with pytest.raises(ConfigError, match=r"names no method; write @handles\(MySite\.train\)"):
        decorator()


@pytest.mark.parametrize("decorator", [asks, handles])
def test_a_decorator_without_parentheses_is_refused(decorator: Any) -> None:
    def fold(self: Any, step: Step, replies: Mapping[str, Message]) -> None: ...

    with pytest.raises(ConfigError, match=r"Bare\.fold: .*@handles\(MySite\.train\)"):
        type("Bare", (FedAvgServer,), {"fold": decorator(fold)})


def test_a_family_is_declared_by_the_names_of_its_members() -> None:
    """Clusters, sites or anything else that the plan names."""
    clusters = TensorSpec(
        "model", "of a cluster", lambda plan: W, of=lambda plan: ("first", "second")
    )

    class Clustered(Echo):
        @phase(request=(clusters,), reply=(clusters,))
        def train(self, round: int, incoming: Message) -> Message:
            reply = Message()
            for name, state in incoming.family(clusters).items():
                reply[clusters.member(name)] = state
            return reply

    algorithm = squares.algorithm(Clustered)
    sent = Message({"model/first": W, "model/second": W})
    assert algorithm.perform("train", 0, sent).states.keys() == sent.states.keys()
    assert Clustered.manifest("train", algorithm.plan).keys() == sent.states.keys()
    assert request_problem(Clustered.phase("train"), algorithm.plan, sent) is None
    third = Message({"model/third": W})
    assert "model/third" in str(request_problem(Clustered.phase("train"), algorithm.plan, third))
    with pytest.raises(ConfigError, match="model/second"):
        algorithm.perform("train", 0, Message({"model/first": W}))


class EchoServer(ServerAlgorithm[ServerHyper]):
    """Asks by one method and handles by another."""

    @asks(Echo.train)
    def request(self, step: Step, site: str) -> Message:
        return Message.of({MODEL: W})

    @handles(Echo.train)
    def note(self, step: Step, replies: Mapping[str, Message]) -> None:
        self.memory.meta["sites"] = sorted(replies)

    def configure_final(self, site: str) -> Message:
        return Message()


class OtherEchoServer(EchoServer):
    """An override is called for the phases of what it overrides."""

    def note(self, step: Step, replies: Mapping[str, Message]) -> None:
        self.memory.meta["sites"] = ["other"]


def test_a_servers_methods_are_called_for_the_phases_that_they_name() -> None:
    context = ServerContext(squares.plan_of(Echo, EchoServer), squares.SEED, 1, phases=Echo.phases)
    server = EchoServer(context)
    other = OtherEchoServer(context)
    train = Step.of(Echo.train, 0)
    look = Step.of(Echo.look, 0)
    assert (train.phase, look.phase) == ("train", "look")
    assert server.configure(train, "A").states.keys() == {"model"}
    assert server.configure(look, "A") == Message(), "no method asks"
    server.aggregate(train, {"A": Message({"model": W})})
    other.aggregate(train, {"A": Message({"model": W})})
    assert (server.memory.meta["sites"], other.memory.meta["sites"]) == (["A"], ["other"])
    server.aggregate(look, {"A": Message()})
    with pytest.raises(
        ConfigError, match=r"EchoServer does nothing with the models of 'look'.*@handles"
    ):
        server.aggregate(look, {"A": Message({"model": W})})


class Counting(SiteAlgorithm[Any]):
    """An extension of any site algorithm."""

    @extends(meta=(COUNT,))
    def train(self, round: int, incoming: Message) -> Message:
        reply: Message = super().train(round, incoming)  # type: ignore[misc]
        reply[COUNT] = 3
        return reply

    @phase(meta=(COUNT,))
    def count(self, round: int, incoming: Message) -> Message:
        return Message.of({COUNT: 3})


def test_an_extended_site_algorithm_has_the_phases_of_both() -> None:
    both: Any = extended(Echo, Counting)
    assert list(both.phases) == ["train", "look", "count"]
    assert issubclass(both, Echo) and both.Hyper is EchoHyper
    algorithm = squares.algorithm(both)
    assert algorithm.perform("train", 0, Message({"model": W})).meta == {"loss": 1.0, "count": 3}
    assert algorithm.perform("count", 0, Message()).meta == {"count": 3}
    assert extended(Echo, None) is Echo and extended(both, Counting) is both
    assert list(Echo.phases) == ["train", "look"]


class TestContext:
    def test_shapes_of_the_sites_replies(self) -> None:
        context = ServerContext(
            squares.plan_of(FedAvgSite, FedAvgServer), squares.SEED, 3, phases=FedAvgSite.phases
        )
        spec = context.reply_spec("train", MODEL)
        assert spec is not None and spec.spec(context.plan).tensors.keys() == squares.start().keys()
        assert (
            context.reply_spec("train", COPY) is None
            and context.reply_spec("validate", MODEL) is None
        )
        for twice in (False, True):
            context = ServerContext(
                squares.plan_of(Echo, FedAvgServer, twice=twice), 0, 1, phases=Echo.phases
            )
            assert (context.reply_spec("train", COPY) is not None) == twice

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
    plan: Plan[SiteHyper, ServerHyper] = Plan(
        squares.SEGMENTATION, squares.SITES, SiteHyper(), ServerHyper()
    )
    for tensor in plan.template().values():
        assert tensor.is_meta
    assert {name: tensor.shape for name, tensor in plan.template().items()} == {
        n: t.shape for n, t in squares.start().items()
    }
    selector = plan.template({"name": "compact_selector", "side": 4, "hidden": 8}, 3)
    assert list(selector.values())[-1].shape[0] == 3


def test_networks_are_built_once_and_loaded_in_place() -> None:
    algorithm = squares.algorithm(FedAvgSite)
    weights = squares.start()
    network = algorithm.network("model", weights)
    pointers = [tensor.data_ptr() for tensor in network.state_dict().values()]
    again = algorithm.network("model", {name: tensor + 1 for name, tensor in weights.items()})
    assert again is network and algorithm.network("other", weights) is not network
    assert [tensor.data_ptr() for tensor in network.state_dict().values()] == pointers
    assert squares.equal(
        network.state_dict(), {name: tensor + 1 for name, tensor in weights.items()}
    )

"""FedAvg of a part of the model: the local part does not travel during training; outside sites get its mean."""

from typing import Any, ClassVar

import pytest
from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.phases import phase
from medflare.core.specs import TensorSpec
from medflare.core.states import StateDict, batch_norm_entries, copy_state, weighted_mean
from medflare.methods.base import Plan
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.fedavg.partial import PartialSite
from medflare.methods.fedavg.site import MODEL, FedAvgSiteHyper
from medflare.methods.feddag.sha import SHAServer
from medflare.methods.parts.measured import MEASURED
from medflare.methods.parts.partial import LocalPart
from medflare.tasks.config import TaskConfig
from methods import squares
from methods.squares import SITES, equal

HEAD = frozenset({"head.weight", "head.bias"})


class OwnHead(PartialSite[FedAvgSiteHyper]):
    """Keeps the network's head, or other entries."""

    kept: ClassVar[frozenset[str]] = HEAD

    @classmethod
    def local_part(cls, network: nn.Module) -> LocalPart:
        return LocalPart(cls.kept)


def federation(site_class: type[PartialSite[Any]] = OwnHead, **options: Any) -> squares.Played:
    return squares.federation(site_class, FedAvgServer, **options)


def test_the_local_part_never_travels() -> None:
    log, server, algorithms = federation()
    assert [turn.step.phase for turn in log] == ["train", "train", "validate"]
    for _, outgoing, replies in log:
        for message in [*outgoing.values(), *replies.values()]:
            for state in message.states.values():
                assert state.keys() == squares.start().keys() - HEAD
    assert algorithms["A"].local.keys() == HEAD and not equal(
        algorithms["A"].local, algorithms["B"].local
    )
    assert server.partial and server.models() == {}, "the server has no whole model"


@pytest.mark.parametrize("name", ["fedbn", "fedrep"])
def test_local_parts_of_the_baselines(name: str) -> None:
    network = squares.site().network()
    method = get_method(name)
    kept = batch_norm_entries(network) if name == "fedbn" else HEAD
    plan = method.plan(squares.SEGMENTATION, SITES, {})
    manifests = {name: method.site_class.manifest(name, plan) for name in method.site_class.phases}
    assert manifests["train"]["model"].tensors.keys() == network.state_dict().keys() - kept
    assert manifests["share"]["local"].tensors.keys() == kept and manifests["validate"] == {}


@pytest.mark.parametrize("task", [squares.SEGMENTATION, squares.CLASSIFICATION_WITH_BATCH_NORM])
def test_fedbn_is_prr_without_its_three_parts(task: TaskConfig) -> None:
    common: dict[str, Any] = {"task": task, "rounds": 3, "outside": ("O",)}
    bn = squares.federation(
        get_method("fedbn").site_class,
        FedAvgServer,
        weighting="uniform",
        reset_optimizer=True,
        **common,
    )
    prr = squares.run("prr", pfa=False, det=False, cpa="off", **common)
    for name in SITES:
        ours = bn.algorithms[name].finalize(bn.server.configure_final(name))
        theirs = prr.algorithms[name].finalize(prr.server.configure_final(name))
        for role in ("personal", "deployed"):
            assert equal(ours["deployed"].states["model"], theirs[role].states["model"])
    assert equal(
        bn.server.models()["global"].states["model"], prr.server.models()["global"].states["model"]
    )


def test_the_first_round_starts_from_the_common_initial_model() -> None:
    log, _, algorithms = federation(rounds=1)
    alone = squares.trained(FedAvgSite)[0]
    assert equal({**log[0].replies["A"].states["model"], **algorithms["A"].local}, alone)


def test_without_a_local_part_it_is_fedavg() -> None:
    class NothingOwn(OwnHead):
        kept = frozenset()

    played = federation(NothingOwn, outside=("O",))
    assert not played.server.partial and [turn.step.phase for turn in played.log] == [
        "train",
        "train",
        "validate",
    ]
    assert equal(played.model, squares.run("fedavg").model)


def test_outside_sites_get_the_mean_of_the_local_parts() -> None:
    log, server, algorithms = federation(outside=("O",))
    assert [turn.step.phase for turn in log] == ["train", "train", "validate", "share"]
    assert not log[-1].outgoing["A"].states and log[-1].replies["A"].states.keys() == {"local"}
    mean = weighted_mean(
        {name: algorithm.local for name, algorithm in algorithms.items()},
        dict.fromkeys(SITES, 12.0),
    )
    models = squares.algorithm(OwnHead, "O").finalize(server.configure_final("O"))
    assert models.keys() == {"global", "deployed"}
    state = models["deployed"].states["model"]
    assert (
        equal({name: state[name] for name in HEAD}, mean) and state.keys() == squares.start().keys()
    )
    assert equal(server.models()["global"].states["model"], state)
    shared = {name: tensor for name, tensor in state.items() if name not in HEAD}
    last = squares.federation(OwnHead, FedAvgServer, outside=("O",), selection="last")
    own = last.algorithms["A"].finalize(last.server.configure_final("A"))["personal"]
    assert equal(own.states["model"], {**shared, **last.algorithms["A"].local})


def test_a_site_that_never_trained_has_the_initial_local_part() -> None:
    played = federation(
        outside=("O",), absent=lambda step, name: name == "C" and step.phase == "train"
    )
    assert equal(
        played.log[-1].replies["C"].states["local"], {name: squares.start()[name] for name in HEAD}
    )


def test_a_server_that_needs_whole_models_says_so() -> None:
    with pytest.raises(ConfigError, match="part"):
        squares.server(SHAServer, algorithms=squares.algorithms(OwnHead))


# -- a part that is frozen everywhere ---------------------------------------------------------------


def head_part(plan: Plan[Any, Any]) -> StateDict:
    return {name: tensor for name, tensor in plan.template().items() if name in HEAD}


ADAPTER = TensorSpec("model", "the trained part", head_part, rest="initial")


class FrozenBody(FedAvgSite[FedAvgSiteHyper]):
    """Only the head is trained and travels; the body is the initial one at every site."""

    freezes = False

    def whole(self, part: StateDict) -> StateDict:
        return {**copy_state(self.site.network().state_dict()), **part}

    @phase(request=(ADAPTER,), reply=(ADAPTER,), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        whole = self.whole(incoming[ADAPTER])
        with self.network("model", whole).frozen(["body"]):
            reply = super().train(round, Message.of({MODEL: whole}))
        reply[ADAPTER] = {name: reply[MODEL][name] for name in incoming[ADAPTER]}
        return reply

    @phase(request=(ADAPTER,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        return super().validate(round, Message.of({MODEL: self.whole(incoming[ADAPTER])}))


def test_a_part_that_is_frozen_everywhere_completes_the_models_without_an_exchange() -> None:
    log, server, _ = squares.federation(FrozenBody, FedAvgServer, outside=("O",))
    assert [turn.step.phase for turn in log] == ["train", "train", "validate"], "nothing is shared"
    for _, outgoing, replies in log:
        for message in [*outgoing.values(), *replies.values()]:
            for state in message.states.values():
                assert state.keys() == HEAD
    delivered = server.models()["global"][MODEL]
    initial = squares.start()
    assert delivered.keys() == initial.keys()
    for name, tensor in delivered.items():
        assert equal({name: tensor}, {name: initial[name]}) == (name not in HEAD), name

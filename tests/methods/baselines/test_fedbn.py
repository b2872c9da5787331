"""FedBN: batch normalisation stays at its site, which compensates differences of scanners."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.states import batch_norm_entries, weighted_mean
from medflare.data.loading import Split
from medflare.methods.baselines.fedbn import METHOD, FedBNSite
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import FedAvgSite
from medflare.methods.prr.server import PRRServer
from medflare.methods.prr.site import PRRSite

FEDBN_OF_PRR = {"pfa": False, "det": False, "cpa": "off"}


def test_every_batch_normalisation_entry_stays(squares: ModuleType) -> None:
    network = squares.site().network()
    plan = METHOD.plan(squares.SEGMENTATION, squares.SITES, {})
    names = {phase.name: METHOD.site_class.manifest(phase.name, plan) for phase in METHOD.site_class.phases}
    kept = batch_norm_entries(network)
    assert names["train"]["model"].tensors.keys() == network.state_dict().keys() - kept
    assert names["share"]["own"].tensors.keys() == kept and any("running_var" in name for name in kept)
    assert names["validate"] == {}


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_it_equals_prr_without_its_three_parts(squares: ModuleType, kind: str) -> None:
    task = squares.task(
        kind, **({} if kind == "segmentation" else {"network": {"name": "small_cnn", "channels": [4, 8], "batch_norm": True}})
    )
    outside = ("O",)
    bn = squares.federation(FedBNSite, FedAvgServer, task, rounds=3, outside=outside, weighting="uniform", reset_optimizer=True)
    prr = squares.federation(PRRSite, PRRServer, task, rounds=3, outside=outside, **FEDBN_OF_PRR)
    for name in squares.SITES:
        own, theirs = (played.algorithms[name].finalize(played.server.configure_final(name))["deployed"] for played in (bn, prr))
        assert squares.equal(own.states["model"], theirs.states["model"])
    assert squares.equal(bn.server.models()["global"].states["model"], prr.server.models()["global"].states["model"])


def test_a_round_by_hand(squares: ModuleType) -> None:
    """After a round: every site's own normalisation, and the mean of the rest."""
    played = squares.federation(FedBNSite, FedAvgServer, rounds=1, weighting="uniform")
    trained = {}
    for name in squares.SITES:
        alone = squares.algorithm(FedAvgSite, name)
        trained[name] = alone.perform("train", 0, Message({"model": squares.start()})).states["model"]
    mean, own = weighted_mean(trained, dict.fromkeys(trained, 1.0)), batch_norm_entries(squares.site().network())
    for name, algorithm in played.algorithms.items():
        expected = {key: trained[name][key] if key in own else mean[key] for key in mean}
        used = algorithm.finalize(played.server.configure_final(name))["deployed"].states["model"]
        assert squares.equal(used, {key: expected[key] for key in used})


def test_sites_with_other_contrast(squares: ModuleType, torn: Any) -> None:
    """B's scanner multiplies all grey values by eight: averaged running statistics fit neither site."""

    def brighter(split: Split) -> Split:
        return replace(split, images=8 * split.images)

    task = squares.task(local_epochs=3)
    local, averaged = (torn(site, FedAvgServer, task, 5, brighter) for site in (FedBNSite, FedAvgSite))
    assert min(local.values()) > 0.8
    assert min(averaged.values()) < min(local.values()) - 0.1


def test_without_outside_sites_normalisation_never_leaves(squares: ModuleType) -> None:
    played = squares.federation(FedBNSite, FedAvgServer)
    own = batch_norm_entries(squares.site().network())
    sent = {name for turn in played.log for reply in turn.replies.values() for state in reply.states.values() for name in state}
    assert sent and not sent & own
    assert played.server.models() == {}, "the server holds no whole model"


def test_a_network_without_batch_normalisation_is_refused(squares: ModuleType) -> None:
    with pytest.raises(ConfigError, match="norm=batch"):
        METHOD.check({}, squares.WITHOUT_BATCH_NORM)


def test_differential_privacy_is_refused() -> None:
    with pytest.raises(ConfigError, match="dp_noise"):
        METHOD.check({"dp_noise": 1.0})

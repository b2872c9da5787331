"""FedBN: batch normalisation stays at its site, which compensates differences of scanners."""

from types import ModuleType

import pytest

from medflare.core.errors import ConfigError
from medflare.core.states import batch_norm_entries
from medflare.methods.baselines.fedbn import METHOD, FedBNSite
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.prr.server import PRRServer
from medflare.methods.prr.site import PRRSite

FEDBN_OF_PRR = {"pfa": False, "det": False, "cpa": "off"}


def test_every_batch_normalisation_entry_stays(squares: ModuleType) -> None:
    network = squares.site().network()
    plan = METHOD.plan(squares.SEGMENTATION, squares.SITES, {})
    names = {phase.name: METHOD.site_class.manifest(phase.name, plan) for phase in METHOD.site_class.phases}
    kept = batch_norm_entries(network)
    assert names["train"]["model"].tensors.keys() == network.state_dict().keys() - kept
    assert names["share"]["local"].tensors.keys() == kept and any("running_var" in name for name in kept)
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
        ours, theirs = (played.algorithms[name].finalize(played.server.configure_final(name))["deployed"] for played in (bn, prr))
        assert squares.equal(ours.states["model"], theirs.states["model"])
    assert squares.equal(bn.server.models()["global"].states["model"], prr.server.models()["global"].states["model"])


def test_a_network_without_batch_normalisation_is_refused(squares: ModuleType) -> None:
    with pytest.raises(ConfigError, match="norm=batch"):
        METHOD.check({}, squares.WITHOUT_BATCH_NORM)

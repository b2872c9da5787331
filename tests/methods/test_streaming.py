"""What a method keeps of a split is small: images, masks and predictions are gone before many more are asked for."""

import pytest
import torch

from helpers.memory_watch import watched
from medflare.methods.fedsm.personalization import train_per_fedavg
from medflare.methods.fedsm.super_model import SuperModel, gain_by_gamma
from medflare.methods.iop_fl.server import IOPServer
from medflare.methods.iop_fl.site import IOPSite
from medflare.networks.catalogue import initial_network
from methods import squares

# Images of a split, and what may be alive at once of images, masks and predictions together.
MANY = 60
FEW = 40
TASK = squares.task(batch_size=4, network={"name": "unet", "channels": [2, 4], "norm": "batch"})


def super_model(choose_by: str = "image") -> SuperModel:
    networks: list[torch.nn.Module] = [
        initial_network(TASK, 1, name).eval() for name in ("global", "A", "B")
    ]
    selector = initial_network(TASK, 1, "selector", {"name": "compact_selector"}, 2).eval()
    return SuperModel(TASK, networks, selector, ["global", "A", "B"], 0.5, choose_by).eval()


@pytest.mark.parametrize("image_mode", ["resize", "patch"])
def test_the_selectors_threshold(image_mode: str) -> None:
    task = squares.task(batch_size=4, network=TASK.network, image_mode=image_mode)
    with watched(squares.site("A", task, (4, MANY, 4)), "validation") as (site, split):
        gains = gain_by_gamma(super_model(), site)
    assert None not in gains.values() and gains["1"] == 0.0
    assert 0 < split.most <= FEW


def test_a_model_that_looks_at_whole_patients() -> None:
    with watched(squares.site("A", TASK, (4, 4, MANY)), "test") as (site, split):
        assert site.score(super_model("patient"), "test").values["dice"] is not None
    assert 0 < split.most <= FEW


def test_per_fedavg() -> None:
    with watched(squares.site("A", TASK, (MANY, 4, 4)), "train") as (site, split):
        model = site.network()
        train_per_fedavg(model, site, 0, torch.optim.SGD(model.parameters(), lr=0.01))
    assert 0 < split.most <= FEW


def test_routing_at_an_outside_site() -> None:
    server = squares.run("iop_fl", TASK, rounds=1, outside=("O",)).server
    with watched(squares.site("O", TASK, (0, 0, MANY)), "test") as (site, split):
        algorithm = IOPSite(site, squares.plan_of(IOPSite, IOPServer, TASK, route_epochs=2))
        deployed = algorithm.finalize(server.configure_final("O"))["deployed"]
    assert deployed.meta["kind"] == "routed" and len(deployed.meta["adaptation"]["losses"]) == 3
    assert 0 < split.most <= FEW

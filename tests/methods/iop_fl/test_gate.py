"""What keeps routing outside from collapse: units, coefficients, objective, the gate and the event that names it."""

from typing import Any

import pytest
import torch

from helpers.small_tasks import stacked
from medflare.core.hyper import build_hyper
from medflare.federation.final_models import evaluated
from medflare.methods.catalogue import build_deployed
from medflare.methods.iop_fl import METHOD
from medflare.methods.iop_fl.formulas import agreeing, all_classes, image_spread, window_radius
from medflare.methods.iop_fl.gate import Gate, Gathering, Look, ranges_of
from medflare.methods.iop_fl.hyper import IOPHyper
from medflare.methods.iop_fl.outside import RoutedModel, test_time_loss
from medflare.methods.iop_fl.server import IOPServer
from medflare.methods.iop_fl.site import IOPSite
from medflare.training.site import Site
from methods import squares
from methods.iop_fl.test_outside import PRINTED, delivered
from methods.squares import CLASSIFICATION, MULTICLASS, MULTILABEL, SEGMENTATION


def routed(**hyper: Any) -> tuple[RoutedModel, Site]:
    algorithm, models = delivered(counts=(0, 0, 8), **hyper)
    model = build_deployed(SEGMENTATION, models["deployed"])
    assert isinstance(model, RoutedModel)
    return model, algorithm.site


# ---- units -------------------------------------------------------------------------------------------------------------------


def test_noise_is_measured_in_the_images_own_spread() -> None:
    images = torch.stack([torch.rand(1, 32, 32), 100 * torch.rand(1, 32, 32), torch.ones(1, 32, 32)])
    model, _ = routed(route_epochs=0)
    model._probabilities = model._at_start = lambda images: images  # type: ignore[method-assign]
    clean, noisy, _ = model._answers(images, "key")
    torch.testing.assert_close((noisy - clean).flatten(1).std(dim=1), 0.5 * image_spread(images).flatten(), rtol=0.1, atol=1e-6)


def test_the_window_is_a_share_of_the_side() -> None:
    assert [window_radius([side, 2 * side]) for side in (384, 128, 64, 8)] == [10, 3, 2, 1]
    p = torch.rand(1, 1, 64, 64)
    by_share, by_pixels = (build_hyper(IOPHyper, {"radius": radius, "objective": "paper"}) for radius in ("auto", 2))
    assert test_time_loss(p, p, SEGMENTATION, by_share, p) == test_time_loss(p, p, SEGMENTATION, by_pixels, p)


def test_coefficients_of_every_layer_go_on_adding_up_to_one() -> None:
    """Sigmoids shrink under the printed objective, and the layers' weights with them."""
    for kind, low, high in (("softmax", 0.999, 1.001), ("sigmoid", 0.0, 0.9)):
        model, _ = routed(**{**PRINTED, "coefficients": kind, "route_lr": 0.1, "route_epochs": 6})
        total = sum(model.report()["coefficients"]["head"])
        assert low <= total <= high, (kind, total)


# ---- objective ---------------------------------------------------------------------------------------------------------------


def costs(objective: str) -> list[float]:
    """Of a useful prediction that noise moves a little, of one half everywhere, and of nothing anywhere."""
    torch.manual_seed(0)
    useful = torch.full((4, 1, 16, 16), 0.03)
    useful[:, :, 4:9, 4:9] = 0.9
    moved = (useful + 0.15 * torch.randn_like(useful)).clamp(0.01, 0.99)
    hyper = build_hyper(IOPHyper, {"objective": objective, "radius": 1})
    pairs = [(useful, moved), *((torch.full_like(useful, value),) * 2 for value in (0.5, 0.001))]
    return [float(test_time_loss(p, noisy, SEGMENTATION, hyper, start=useful)) for p, noisy in pairs]


def test_the_default_objective_does_not_reward_collapse() -> None:
    useful, even, empty = costs("paper")
    assert even < useful and empty < useful, "the printed objective does"
    useful, even, empty = costs("information")
    assert useful < even and useful < empty


# ---- the gate ----------------------------------------------------------------------------------------------------------------


def test_every_limit_refuses() -> None:
    gate, start = Gate(0.8, 0.9, 3.0, [(0.1, 0.2)]), Look(1.0, 0.5, 1.0, (0.15,))
    assert gate.refusal(start, start) == ""
    for refused, value in (((0.1, 1.0, 0.15), "0.20"), ((0.5, 0.5, 0.15), "0.50"), ((0.5, 1.0, 0.02), "0.02"), ((0.5, 1.0, 0.8), "0.8")):
        information, agreement, share = refused
        assert value in gate.refusal(Look(0.1, information, agreement, (share,)), start)
    assert Gate(0.0, 0.0, 0.0, [(0.1, 0.2)]).refusal(Look(0.1, 0.0, 0.0, (0.9,)), start) == ""
    assert gate.refusal(Look(0.1, 0.5, 1.0, (0.02,)), Look(1.0, 0.5, 1.0, (0.03,))) == "", "the start's own share widens the range"


@pytest.mark.parametrize("seed", range(2))
def test_one_image_that_is_classified_tells_nothing(seed: int) -> None:
    """Its share is its prediction: what is left of two entropies is rounding, of which nothing may be asked."""
    logits = torch.randn(3, 1, 3, generator=torch.Generator().manual_seed(seed))
    looks = []
    for p in logits.softmax(dim=2):
        gathering = Gathering(CLASSIFICATION)
        gathering.add(torch.tensor(1.0), p, p)
        looks.append(gathering.look())
    assert all(0 <= look.information < 1e-12 for look in looks)
    for state, start in ((looks[1], looks[0]), (Look(0.1, 0.0, 1.0, ()), Look(1.0, 1e-7, 1.0, ()))):
        assert Gate(0.8, 0.0, 0.0).refusal(state, start) == ""


@pytest.mark.parametrize("task", [SEGMENTATION, MULTICLASS, MULTILABEL, CLASSIFICATION])
def test_a_look_gathers_what_all_batches_say_together(task: Any) -> None:
    algorithm = squares.algorithm(squares.partner(squares.FedAvgServer), "A", task)
    batches = list(algorithm.site.ordered("train"))
    p = [task.probabilities(algorithm.site.network()(batch.images)).detach() for batch in batches]
    gathering, whole = Gathering(task), Gathering(task)
    for part in p:
        gathering.add(torch.tensor(2.0), part, part)
    whole.add(torch.tensor(2.0), torch.cat(p), torch.cat(p))
    look, expected = gathering.look(), whole.look()
    assert look.loss == 2.0 and look.agreement == 1.0 and look.information > 0
    assert look.information == pytest.approx(expected.information, abs=1e-6) and look.shares == pytest.approx(expected.shares, abs=1e-6)
    every = all_classes(torch.cat(p), task.target)
    assert len(look.shares) == {"binary": 1, "multiclass": every.shape[1] - 1, "multilabel": 2}[task.target] * (task.kind == "segmentation")


def test_ranges_are_those_of_the_inside_sites() -> None:
    assert ranges_of([[90, 10, 0], [60, 20, 20]], MULTICLASS) == [(0.1, 0.2), (0.0, 0.2)]
    assert ranges_of([[90, 10]], CLASSIFICATION) == ranges_of([[90, 10]], MULTILABEL) == ranges_of([], SEGMENTATION) == []


COLLAPSING: dict[str, Any] = {**PRINTED, "radius": 2, "beta": 1.0, "route_epochs": 6, "route_lr": 0.3}


def test_a_collapse_is_kept_out_and_named() -> None:
    """The printed objective at a high rate moves the masks away and pays less for it; the gate keeps what the start had."""
    without, _ = routed(**COLLAPSING)
    assert without.report()["agreement"][without.report()["chosen"]] < 0.9 and not without.notices()
    model, site = routed(**{**COLLAPSING, "gate_information": 0.8, "gate_agreement": 0.9})
    chosen = model.report()["chosen"]
    assert model.report()["agreement"][chosen] >= 0.9
    images = stacked(site.data.test).images
    start, _ = routed(route_epochs=0)
    with torch.no_grad():
        same, total = agreeing(model(images) > 0.5, start(images) > 0.5)
        assert same >= 0.9 * total
    assert len(model.notices()) == 1 and "routing kept" in model.notices()[0]


def test_the_event_names_what_was_kept_and_why() -> None:
    algorithm, models = delivered(counts=(0, 0, 8), **{**COLLAPSING, "gate_information": 1.0, "gate_agreement": 1.0})
    meta = evaluated(algorithm.site, models, lambda role, model, metrics, cases: None, method=METHOD)
    (event,) = [event for event in meta["events"] if event["kind"] == "reverted"]
    assert event["message"].startswith("deployed: routing kept the start")
    quiet, models = delivered(counts=(0, 0, 8), route_epochs=0)
    assert not [e for e in evaluated(quiet.site, models, lambda *_: None, method=METHOD)["events"] if e["kind"] == "reverted"]


def test_a_model_that_an_older_release_stored_is_built() -> None:
    """Without coefficients to choose, they were sigmoids; settings that are gone are left out."""
    _, models = delivered(**PRINTED)
    message = models["deployed"]
    del message.meta["routing"]["coefficients"]
    message.meta["routing"]["router_dropout"] = 0.2
    model: Any = build_deployed(SEGMENTATION, message)
    assert model.hyper.coefficients == "sigmoid"


def test_the_outside_site_is_told_the_inside_sites_ranges() -> None:
    algorithms = squares.algorithms(IOPSite)
    server = squares.server(IOPServer, algorithms=algorithms, rounds=1)
    squares.play(server, algorithms)
    ((low, high),) = server.configure_final("O").meta["shares"]
    assert 0 < low <= high < 0.5 and "shares" not in server.configure_final("A").meta

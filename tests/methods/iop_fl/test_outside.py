"""IOP-FL at an outside site: routing, its objective and selection, comparisons, and a whole federation."""

import dataclasses
from typing import Any

import pytest
import torch

from helpers.fixture_types import Golden
from medflare.core.hyper import build_hyper
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.methods.catalogue import build_deployed
from medflare.methods.iop_fl import formulas as iop_math
from medflare.methods.iop_fl.outside import test_time_loss
from medflare.methods.iop_fl.server import IOPServer
from medflare.methods.iop_fl.site import IOPHyper, IOPSite
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.site import Site
from methods import squares
from methods.squares import CLASSIFICATION, SEGMENTATION, SITES, WITHOUT_BATCH_NORM, equal, plan_of, play, site

QUICK: dict[str, Any] = {"route_epochs": 3, "route_lr": 0.05, "radius": 2}
PRINTED: dict[str, Any] = {"objective": "paper", "radius": 10}


def final_models(
    task: TaskConfig = SEGMENTATION, counts: tuple[int, int, int] = (0, 0, 5), outside: Site | None = None, **hyper: Any
) -> tuple[Any, dict[str, Message]]:
    server = squares.server(IOPServer, task, rounds=1)
    play(server, squares.algorithms(IOPSite, task))
    algorithm = IOPSite(outside or site("O", task, counts), plan_of(IOPSite, IOPServer, task, **{**QUICK, **hyper}))
    return algorithm, algorithm.finalize(server.configure_final("O"))


@pytest.mark.parametrize("network", [SEGMENTATION, WITHOUT_BATCH_NORM, CLASSIFICATION])
@pytest.mark.parametrize("images", [1, 5])
def test_outside_site_gets_a_routed_model(network: TaskConfig, images: int) -> None:
    algorithm, models = final_models(network, (0, 0, images))
    assert models.keys() == {"global", "deployed"} and models["deployed"].meta["kind"] == "routed"
    model: Any = build_deployed(network, models["deployed"])
    with torch.no_grad():
        p = model(algorithm.site.data.test.images)
    assert p.shape[0] == images and torch.isfinite(p).all() and p.min() >= 0 and p.max() <= 1
    coefficients = model.report()["coefficients"]
    assert all(len(r) == len(SITES) + 1 for r in coefficients.values())
    assert any(abs(value - 1 / 4) > 1e-4 for r in coefficients.values() for value in r) or model.report()["chosen"] == 0


def test_the_state_with_the_lowest_loss_is_used() -> None:
    algorithm, models = final_models(counts=(0, 0, 8), route_epochs=5, **PRINTED)
    report = models["deployed"].meta["adaptation"]
    losses, chosen = report["losses"], report["chosen"]
    assert len(losses) == 6 and chosen == losses.index(min(losses)) and losses[chosen] < losses[0]
    model: Any = build_deployed(SEGMENTATION, models["deployed"])
    assert model.measure(algorithm.site.data.test.images.tensor_split(2)).loss == pytest.approx(losses[chosen], rel=1e-5)


def test_labels_are_not_used() -> None:
    correct, wrong = site("O", counts=(0, 0, 5)), site("O", counts=(0, 0, 5))
    test = wrong.data.test
    wrong.data = dataclasses.replace(wrong.data, test=dataclasses.replace(test, targets=1 - test.targets))
    first, second = (final_models(outside=place)[1]["deployed"].states["router"] for place in (correct, wrong))
    assert equal(first, second)


def test_predictions_do_not_depend_on_the_callers_batches() -> None:
    """Eight images at once are predicted in the same two batches of four."""
    algorithm, models = final_models(counts=(0, 0, 8))
    model, images = build_deployed(SEGMENTATION, models["deployed"]), algorithm.site.data.test.images
    with torch.no_grad():
        torch.testing.assert_close(model(images), torch.cat([model(images[:4]), model(images[4:])]))


def test_no_epoch_leaves_the_uniform_router() -> None:
    _, models = final_models(route_epochs=0)
    values = [value for r in models["deployed"].meta["adaptation"]["coefficients"].values() for value in r]
    torch.testing.assert_close(torch.tensor(values), torch.full((len(values),), 0.25))


def test_adaptation_changes_only_the_routers() -> None:
    server = squares.server(IOPServer, rounds=1)
    play(server, squares.algorithms(IOPSite))
    incoming = server.configure_final("O")
    before = {entry: copy_state(state) for entry, state in incoming.states.items()}
    algorithm = IOPSite(site("O", counts=(0, 0, 5)), plan_of(IOPSite, IOPServer, **QUICK))
    models = algorithm.finalize(incoming)
    assert all(equal(incoming.states[entry], before[entry]) for entry in before) and incoming.states.keys() == before.keys()
    assert all("router" in name for name in models["deployed"].states["router"])


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return list(final_models()[1]["deployed"].meta["adaptation"]["losses"])


@pytest.mark.parametrize(
    "option",
    [
        {"objective": "paper"},
        {"routing": "global"},
        {"bn_statistics": "running"},
        {"use_consistency": False},
        {"use_shape": False},
        {"use_entropy": False},
        {"noise": 0.1},
        {"radius": 0},
        {"beta": 1.0},
    ],
    ids=str,
)
def test_every_option_changes_the_losses(option: dict[str, Any], losses: list[float]) -> None:
    changed = final_models(**option)[1]["deployed"].meta["adaptation"]["losses"]
    assert torch.isfinite(torch.tensor(changed)).all() and changed != losses


def test_classification_has_no_shape_term() -> None:
    p, noisy = torch.rand(4, 2).softmax(dim=1), torch.rand(4, 2).softmax(dim=1)
    hyper = build_hyper(IOPHyper, {"beta": 0.5, "objective": "paper"})
    expected = iop_math.consistency_loss(p, noisy) + 0.5 * iop_math.entropy_loss(p)
    torch.testing.assert_close(test_time_loss(p, noisy, CLASSIFICATION, hyper, start=p), expected)


def test_whole_objective_equals_the_reference(golden: Golden) -> None:
    numbers = golden("iop")
    task = load_task({**SEGMENTATION.to_dict(), "target": "multiclass", "labels": ["background", "organ"]})
    p, noisy = (torch.as_tensor(numbers[f"tta/{name}"]).double().softmax(dim=1) for name in ("logits", "logits_noisy"))
    loss = test_time_loss(p, noisy, task, build_hyper(IOPHyper, {"objective": "paper", "radius": 10}), start=p)
    assert loss.item() == pytest.approx(float(numbers["tta/paper_total_mean_normalised_beta0.01_d10"]), rel=1e-5)


def test_a_sigmoid_output_has_the_loss_of_two_classes() -> None:
    p, noisy = torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8)
    softmax = load_task({**SEGMENTATION.to_dict(), "target": "multiclass", "labels": ["background", "organ"]})
    for objective in ("information", "paper"):
        hyper = build_hyper(IOPHyper, {"objective": objective, "radius": 1})
        one, other = (torch.cat([1 - q, q], dim=1) for q in (p, noisy))
        torch.testing.assert_close(test_time_loss(p, noisy, SEGMENTATION, hyper, p), test_time_loss(one, other, softmax, hyper, one))


def test_comparisons_of_table_two() -> None:
    algorithm, models = final_models(comparisons=True)
    with_batch_norm = {"tent", "batch_statistics", "mixture_running"}
    assert models.keys() == {"global", "deployed", "ensemble", "mixture", "personal/A", "personal/B", "personal/C"} | with_batch_norm
    assert not with_batch_norm & final_models(WITHOUT_BATCH_NORM, comparisons=True)[1].keys()
    images = algorithm.site.data.test.images
    with torch.no_grad():
        single = [build_deployed(SEGMENTATION, models[f"personal/{name}"])(images).logit() for name in SITES]
        together = build_deployed(SEGMENTATION, models["ensemble"])(images)
        torch.testing.assert_close(together, torch.stack(single).mean(dim=0).sigmoid(), rtol=1e-4, atol=1e-5)


def test_adapting_again_starts_anew() -> None:
    algorithm, models = final_models()
    model: Any = build_deployed(SEGMENTATION, models["deployed"])
    model.adapt([torch.rand(2, 1, 16, 16) * 3])
    model.adapt([algorithm.site.data.test.images])
    assert equal(model.network.adapted_state(), models["deployed"].states["router"])

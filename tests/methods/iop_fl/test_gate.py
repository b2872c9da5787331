"""Protection of routing from collapse: units, coefficients, objective, the gate and its event."""

from typing import Any

import pytest
import torch

from medflare.core.hyper import build_hyper
from medflare.federation.final_models import evaluated
from medflare.methods.catalogue import build_deployed
from medflare.methods.iop_fl import METHOD, outside
from medflare.methods.iop_fl.formulas import agreeing, image_spread
from medflare.methods.iop_fl.outside import RoutedModel, Summary, gate_refusal, summarize, test_time_loss
from medflare.methods.iop_fl.site import IOPHyper
from medflare.training.site import Site
from methods import squares
from methods.iop_fl.test_outside import PRINTED, final_models
from methods.squares import CLASSIFICATION, MULTICLASS, MULTILABEL, SEGMENTATION


def routed(**hyper: Any) -> tuple[RoutedModel, Site]:
    algorithm, models = final_models(counts=(0, 0, 8), **hyper)
    model = build_deployed(SEGMENTATION, models["deployed"])
    assert isinstance(model, RoutedModel)
    return model, algorithm.site


def test_noise_is_in_units_of_the_images_standard_deviation() -> None:
    images = torch.stack([torch.rand(1, 32, 32), 100 * torch.rand(1, 32, 32), torch.ones(1, 32, 32)])
    model, _ = routed(route_epochs=0)
    model._probabilities = model._at_start = lambda images: images  # type: ignore[method-assign]
    clean, noisy, _ = model._predictions(images, "key")
    torch.testing.assert_close((noisy - clean).flatten(1).std(dim=1), 0.5 * image_spread(images).flatten(), rtol=0.1, atol=1e-6)


def costs(objective: str) -> list[float]:
    """The losses of a useful prediction, of 0.5 everywhere, and of an empty mask."""
    torch.manual_seed(0)
    useful = torch.full((4, 1, 16, 16), 0.03)
    useful[:, :, 4:9, 4:9] = 0.9
    noisy = (useful + 0.15 * torch.randn_like(useful)).clamp(0.01, 0.99)
    hyper = build_hyper(IOPHyper, {"objective": objective, "radius": 1})
    pairs = [(useful, noisy), *((torch.full_like(useful, value),) * 2 for value in (0.5, 0.001))]
    return [float(test_time_loss(p, q, SEGMENTATION, hyper, start=useful)) for p, q in pairs]


def test_the_default_objective_does_not_reward_collapse() -> None:
    useful, even, empty = costs("paper")
    assert even < useful and empty < useful, "the printed objective does"
    useful, even, empty = costs("information")
    assert useful < even and useful < empty


def test_every_limit_refuses() -> None:
    start = Summary(1.0, 0.5, 1.0)
    assert gate_refusal(start, start) == ""
    assert "0.20" in gate_refusal(Summary(0.1, 0.1, 1.0), start) and "0.50" in gate_refusal(Summary(0.1, 0.5, 0.5), start)


@pytest.mark.parametrize("seed", range(2))
def test_one_classified_image_has_no_mutual_information(seed: int) -> None:
    """The difference of the two entropies is then rounding, and the gate must not require a fraction of it."""
    logits = torch.randn(3, 1, 3, generator=torch.Generator().manual_seed(seed))
    start, state, _ = (summarize(CLASSIFICATION, [(torch.tensor(1.0), p, p)]) for p in logits.softmax(dim=2))
    assert 0 <= state.information < 1e-12 and gate_refusal(state, start) == ""


@pytest.mark.parametrize("task", [SEGMENTATION, MULTICLASS, MULTILABEL, CLASSIFICATION])
def test_a_summary_of_batches_is_that_of_all_images(task: Any) -> None:
    algorithm = squares.algorithm(squares.partner(squares.FedAvgServer), "A", task)
    batches = list(algorithm.site.ordered("train"))
    p = [task.probabilities(algorithm.site.network()(batch.images)).detach() for batch in batches]
    loss = torch.tensor(2.0)
    summary, expected = summarize(task, [(loss, q, q) for q in p]), summarize(task, [(loss, torch.cat(p), torch.cat(p))])
    assert summary.loss == 2.0 and summary.agreement == 1.0 and summary.information > 0
    assert summary.information == pytest.approx(expected.information, abs=1e-6)


COLLAPSING: dict[str, Any] = {**PRINTED, "radius": 2, "beta": 1.0, "route_epochs": 6, "route_lr": 0.3}


def test_the_gate_prevents_a_collapse() -> None:
    """The printed objective at a high rate lowers its loss with other masks; with the gate the start's are used."""
    model, site = routed(**COLLAPSING)
    report = model.report()
    assert report["agreement"][report["chosen"]] < 0.9 and not model.notices()
    images = site.data.test.images
    model.gated = True
    model.adapt([images])
    start, _ = routed(**{**COLLAPSING, "route_epochs": 0})
    with torch.no_grad():
        equal, total = agreeing(model(images) > 0.5, start(images) > 0.5)
    assert equal >= 0.9 * total and len(model.notices()) == 1


def test_an_event_names_the_used_state_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def events(**hyper: Any) -> list[dict[str, Any]]:
        algorithm, models = final_models(counts=(0, 0, 8), **hyper)
        meta = evaluated(algorithm.site, models, lambda *_: None, method=METHOD)
        return [event for event in meta["events"] if event["kind"] == "reverted"]

    assert not events(route_epochs=0)
    monkeypatch.setattr(outside, "GATE_AGREEMENT", 1.1)
    (event,) = events(route_epochs=3, route_lr=0.1)
    assert event["message"].startswith("deployed: routing uses the start")


def test_a_model_stored_by_an_older_release_is_built() -> None:
    """Without an objective it is the printed one; unknown settings are ignored."""
    _, models = final_models(**PRINTED)
    message = models["deployed"]
    del message.meta["routing"]["objective"]
    message.meta["routing"]["router_dropout"] = 0.2
    model: Any = build_deployed(SEGMENTATION, message)
    assert model.hyper.objective == "paper"

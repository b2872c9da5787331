"""IOP-FL on small generated images: local adapted models inside; outside routing, its objective, its gate and comparisons."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from helpers.fixture_types import Golden
from medflare.core.errors import StateError
from medflare.core.hyper import build_hyper
from medflare.core.message import Message
from medflare.core.states import blend, copy_state
from medflare.federation.final_models import evaluate_final_models
from medflare.methods.base import Step
from medflare.methods.catalogue import build_deployed
from medflare.methods.iop_fl import METHOD, outside
from medflare.methods.iop_fl import formulas as iop_math
from medflare.methods.iop_fl.formulas import agreeing, image_spread
from medflare.methods.iop_fl.outside import (
    EXPERTS,
    MIXTURE,
    RoutedModel,
    StateSummary,
    contradict,
    gate_refusal,
    summarize_state,
    test_time_loss,
)
from medflare.methods.iop_fl.server import IOPServer
from medflare.methods.iop_fl.site import IOPHyper, IOPSite
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.site import Site
from methods import squares
from methods.squares import (
    CLASSIFICATION,
    MULTICLASS,
    MULTILABEL,
    SEGMENTATION,
    SITES,
    WITHOUT_BATCH_NORM,
    equal,
    plan_of,
    site,
)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_local_models_are_accumulated(tau: float) -> None:
    log, _, algorithms = squares.run("iop_fl", tau=tau)
    expected = squares.start()
    for _, _, replies in log[:2]:
        expected = blend(expected, replies["B"].states["model"], tau)
    assert equal(algorithms["B"].personal, expected)


def test_personal_models_leave_a_site_only_for_outside_sites() -> None:
    assert [step.phase for step in squares.server(IOPServer, rounds=1, outside=()).steps()] == [
        "train",
        "validate",
    ]
    log, server, _ = squares.run("iop_fl", rounds=1, outside=("O",))
    assert [step.phase for step, _, _ in log] == ["train", "validate", "submit"]
    for entry in server.configure_final("A").states:
        assert not entry.startswith("expert/")
    experts = sorted(
        entry for entry in server.configure_final("O").states if entry.startswith("expert/")
    )
    assert experts == ["expert/A", "expert/B", "expert/C"]
    assert server.models().keys() == {"global", "personal/A", "personal/B", "personal/C"}


def test_a_site_without_a_round_has_nothing_to_submit() -> None:
    algorithm = squares.algorithms(IOPSite)["A"]
    with pytest.raises(StateError, match="site A"):
        algorithm.perform("submit", 3, squares.server(IOPServer).configure(Step("submit", 3), "A"))


QUICK: dict[str, Any] = {"route_epochs": 3, "route_lr": 0.05, "radius": 2}
PRINTED: dict[str, Any] = {"objective": "paper", "radius": 10}


def trained(task: TaskConfig = SEGMENTATION) -> Message:
    """What an outside site gets after one round."""
    return squares.run("iop_fl", task, rounds=1, outside=("O",)).server.configure_final("O")


def final_models(
    task: TaskConfig = SEGMENTATION, images: int = 5, place: Site | None = None, **hyper: Any
) -> tuple[Any, Any]:
    """An outside site's algorithm and its final models."""
    algorithm = IOPSite(
        place or site("O", task, (0, 0, images)),
        plan_of(IOPSite, IOPServer, task, **{**QUICK, **hyper}),
    )
    return algorithm, algorithm.finalize(trained(task))


def routed(**hyper: Any) -> tuple[RoutedModel, Site]:
    algorithm, models = final_models(images=8, **hyper)
    model = build_deployed(SEGMENTATION, models["deployed"])
    assert isinstance(model, RoutedModel)
    return model, algorithm.site


@pytest.mark.parametrize("network", [SEGMENTATION, WITHOUT_BATCH_NORM, CLASSIFICATION])
@pytest.mark.parametrize("images", [1, 5])
def test_outside_site_gets_a_routed_model(network: TaskConfig, images: int) -> None:
    algorithm, models = final_models(network, images)
    assert models.keys() == {"global", "deployed"} and models["deployed"].meta["kind"] == "routed"
    model: Any = build_deployed(network, models["deployed"])
    with torch.no_grad():
        p = model(algorithm.site.data.test.images)
    assert p.shape[0] == images and torch.isfinite(p).all() and p.min() >= 0 and p.max() <= 1
    coefficients = model.report()["coefficients"]
    for r in coefficients.values():
        assert len(r) == len(SITES) + 1
    assert (
        any(abs(value - 1 / 4) > 1e-4 for r in coefficients.values() for value in r)
        or model.report()["chosen"] == 0
    )


def test_the_state_with_the_lowest_loss_is_used() -> None:
    model, site = routed(route_epochs=5, **PRINTED)
    losses = model.report()["losses"]
    chosen = model.report()["chosen"]
    assert len(losses) == 6 and chosen == losses.index(min(losses)) and losses[chosen] < losses[0]
    assert model.measure(site.data.test.images.tensor_split(2)).loss == pytest.approx(
        losses[chosen], rel=1e-5
    )


def test_labels_are_not_used() -> None:
    correct = site("O", counts=(0, 0, 5))
    wrong = site("O", counts=(0, 0, 5))
    test = wrong.data.test
    wrong.data = dataclasses.replace(
        wrong.data, test=dataclasses.replace(test, targets=1 - test.targets)
    )
    first = final_models(place=correct)[1]["deployed"].states["router"]
    second = final_models(place=wrong)[1]["deployed"].states["router"]
    assert equal(first, second)


def test_predictions_do_not_depend_on_the_callers_batches() -> None:
    """Eight images at once are predicted in the same two batches of four."""
    model, site = routed()
    images = site.data.test.images
    with torch.no_grad():
        torch.testing.assert_close(model(images), torch.cat([model(images[:4]), model(images[4:])]))


def test_no_epoch_leaves_the_uniform_router() -> None:
    values = []
    for r in routed(route_epochs=0)[0].report()["coefficients"].values():
        values += r
    torch.testing.assert_close(torch.tensor(values), torch.full((len(values),), 0.25))


def test_adaptation_changes_only_the_routers() -> None:
    algorithm = IOPSite(site("O", counts=(0, 0, 5)), plan_of(IOPSite, IOPServer, **QUICK))
    incoming = trained()
    before = {entry: copy_state(state) for entry, state in incoming.states.items()}
    models = algorithm.finalize(incoming)
    for entry in before:
        assert equal(incoming.states[entry], before[entry])
    assert incoming.states.keys() == before.keys()
    for name in models["deployed"].states["router"]:
        assert "router" in name


def test_every_option_changes_the_losses() -> None:
    options = squares.one_by_one(
        objective="paper", routing="global", bn_statistics="running", noise=0.1, radius=0, beta=1.0
    )
    options += squares.one_by_one(use_consistency=False, use_shape=False, use_entropy=False)
    losses = [
        final_models(**option)[1]["deployed"].meta["adaptation"]["losses"]
        for option in ({}, *options)
    ]
    for option, changed in zip(options, losses[1:], strict=True):
        assert torch.isfinite(torch.tensor(changed)).all() and changed != losses[0], option


def test_classification_has_no_shape_term() -> None:
    p = torch.rand(4, 2).softmax(dim=1)
    noisy = torch.rand(4, 2).softmax(dim=1)
    hyper = build_hyper(IOPHyper, {"beta": 0.5, "objective": "paper"})
    expected = iop_math.consistency_loss(p, noisy) + 0.5 * iop_math.entropy_loss(p)
    torch.testing.assert_close(test_time_loss(p, noisy, CLASSIFICATION, hyper), expected)


def test_whole_objective_equals_the_reference(golden: Golden) -> None:
    numbers = golden("iop")
    task = load_task(
        {**SEGMENTATION.to_dict(), "target": "multiclass", "labels": ["background", "organ"]}
    )
    p = torch.as_tensor(numbers["tta/logits"]).double().softmax(dim=1)
    noisy = torch.as_tensor(numbers["tta/logits_noisy"]).double().softmax(dim=1)
    loss = test_time_loss(
        p, noisy, task, build_hyper(IOPHyper, {"objective": "paper", "radius": 10})
    )
    assert loss.item() == pytest.approx(
        float(numbers["tta/paper_total_mean_normalised_beta0.01_d10"]), rel=1e-5
    )


def test_a_sigmoid_output_has_the_loss_of_two_classes() -> None:
    p = torch.rand(2, 1, 8, 8)
    noisy = torch.rand(2, 1, 8, 8)
    softmax = load_task(
        {**SEGMENTATION.to_dict(), "target": "multiclass", "labels": ["background", "organ"]}
    )
    for objective in ("information", "paper"):
        hyper = build_hyper(IOPHyper, {"objective": objective, "radius": 1})
        one = torch.cat([1 - p, p], dim=1)
        other = torch.cat([1 - noisy, noisy], dim=1)
        torch.testing.assert_close(
            test_time_loss(p, noisy, SEGMENTATION, hyper),
            test_time_loss(one, other, softmax, hyper),
        )


def test_comparisons_of_table_two() -> None:
    algorithm, models = final_models(comparisons=True)
    with_batch_norm = {"tent", "batch_statistics", "mixture_running"}
    singles = {"personal/A", "personal/B", "personal/C"}
    assert (
        models.keys()
        == {"global", "deployed", "ensemble", "mixture", "printed_objective"}
        | singles
        | with_batch_norm
    )
    assert equal(
        models["printed_objective"].states["router"],
        final_models(objective="paper")[1]["deployed"].states["router"],
    )
    assert not with_batch_norm & final_models(WITHOUT_BATCH_NORM, comparisons=True)[1].keys()
    images = algorithm.site.data.test.images
    with torch.no_grad():
        single = [
            build_deployed(SEGMENTATION, models[f"personal/{name}"])(images).logit()
            for name in SITES
        ]
        together = build_deployed(SEGMENTATION, models["ensemble"])(images)
        torch.testing.assert_close(
            together, torch.stack(single).mean(dim=0).sigmoid(), rtol=1e-4, atol=1e-5
        )


def test_adapting_again_starts_anew() -> None:
    algorithm, models = final_models()
    model: Any = build_deployed(SEGMENTATION, models["deployed"])
    model.adapt([torch.rand(2, 1, 16, 16) * 3])
    model.adapt([algorithm.site.data.test.images])
    assert equal(model.network.adapted_state(), models["deployed"].states["router"])


def test_noise_is_in_units_of_the_images_standard_deviation() -> None:
    images = torch.stack(
        [torch.rand(1, 32, 32), 100 * torch.rand(1, 32, 32), torch.ones(1, 32, 32)]
    )
    model, _ = routed(route_epochs=0)
    model._probabilities = lambda images: images  # type: ignore[method-assign]
    clean, noisy = model._predictions(images, "key")
    torch.testing.assert_close(
        (noisy - clean).flatten(1).std(dim=1),
        0.5 * image_spread(images).flatten(),
        rtol=0.1,
        atol=1e-6,
    )


@pytest.mark.parametrize("everywhere", [0.001, 0.5], ids=["empty", "undecided"])
def test_the_gate_refuses_collapse(everywhere: float) -> None:
    """Nothing that noise changes has a lower loss than a useful prediction."""
    torch.manual_seed(0)
    useful = torch.full((4, 1, 16, 16), 0.03)
    useful[:, :, 4:9, 4:9] = 0.9
    noisy = (useful + 0.15 * torch.randn_like(useful)).clamp(0.01, 0.99)
    collapsed = torch.full_like(useful, everywhere)
    hyper = build_hyper(IOPHyper, {"radius": 1})
    states = []
    for p, p_noisy in ((useful, noisy), (collapsed, collapsed)):
        loss = test_time_loss(p, p_noisy, SEGMENTATION, hyper)
        states.append(summarize_state(SEGMENTATION, [(loss, torch.tensor(0.0), p)]))
    start, state = states
    assert state.loss < start.loss
    assert "mutual information is 0.00 of the start" in gate_refusal(state, start)


def test_the_gate_refuses_a_state_that_empties_a_mask() -> None:
    """One of 99 masks is too many, one of 100 is not; an image may get a mask."""
    for masks, refused in ((99, True), (100, False)):
        start = StateSummary(1.0, 0.5, 1.0, has_mask=(True,) * masks + (False,))
        state = StateSummary(0.9, 0.5, 1.0, has_mask=(True,) * (masks - 1) + (False, True))
        reason = gate_refusal(state, start)
        assert ("more than 1% of the images without a mask" in reason) == refused
        assert "1 images" not in reason, "it leaves the site, and may be of one patient"
    p = torch.zeros(3, 1, 4, 4)
    p[1, 0, 2, 2] = 0.6
    zero = torch.tensor(0.0)
    summary = summarize_state(SEGMENTATION, [(zero, zero, p[:2]), (zero, zero, p[2:])])
    assert summary.has_mask == (False, True, False)


def test_every_limit_refuses() -> None:
    start = StateSummary(1.0, 0.5, 1.0)
    assert gate_refusal(start, start) == ""
    assert "0.20" in gate_refusal(StateSummary(0.1, 0.1, 1.0), start) and "0.50" in gate_refusal(
        StateSummary(0.1, 0.5, 0.5), start
    )


@pytest.mark.parametrize("seed", range(2))
def test_one_classified_image_has_no_mutual_information(seed: int) -> None:
    """The difference of the two entropies is then rounding, and the gate must not require a fraction of it."""
    logits = torch.randn(3, 1, 3, generator=torch.Generator().manual_seed(seed))
    start, state, _ = (
        summarize_state(CLASSIFICATION, [(torch.tensor(1.0), torch.tensor(0.0), p)])
        for p in logits.softmax(dim=2)
    )
    assert 0 <= state.information < 1e-12 and gate_refusal(state, start) == ""


@pytest.mark.parametrize("task", [SEGMENTATION, MULTICLASS, MULTILABEL, CLASSIFICATION])
def test_a_summary_of_batches_is_that_of_all_images(task: Any) -> None:
    algorithm = squares.algorithm(squares.partner(squares.FedAvgServer), "A", task)
    batches = list(algorithm.site.ordered("train"))
    p = [task.probabilities(algorithm.site.network()(batch.images)).detach() for batch in batches]
    loss = torch.tensor(2.0)
    summary = summarize_state(task, [(loss, loss, q) for q in p])
    expected = summarize_state(task, [(loss, loss, torch.cat(p))])
    assert summary.loss == 2.0 and summary.agreement == 1.0 and summary.information > 0
    assert summary.information == pytest.approx(expected.information, abs=1e-6)


COLLAPSING: dict[str, Any] = {
    **PRINTED,
    "radius": 2,
    "beta": 1.0,
    "route_epochs": 6,
    "route_lr": 0.3,
}


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


def test_experts_contradict_each_other_if_less_than_half_of_their_masks_coincides() -> None:
    two = torch.tensor([[1, 1, 0, 0]], dtype=torch.bool)
    one = torch.tensor([[1, 0, 0, 0]], dtype=torch.bool)
    other = torch.tensor([[0, 1, 1, 1]], dtype=torch.bool)
    assert not contradict([[two], [one]]), "Dice 2 / 3"
    assert contradict([[two], [two], [other]]), "Dice 2 / 5"
    assert not contradict([[two, two], [one, other]]), (
        "Dice of both batches together: (2 + 2) / (3 + 5)"
    )


def test_experts_that_agree_leave_the_mixture_as_the_start() -> None:
    assert routed()[0].report()["start"] == MIXTURE
    assert routed(**PRINTED)[0].report()["start"] == MIXTURE


def with_opposite_masks(incoming: Message, site: str) -> Message:
    """The message with an expert whose last layer has the opposite sign."""
    entry = EXPERTS.member(site).name
    state = copy_state(incoming.states[entry])
    for name in list(state)[-2:]:
        state[name] = -state[name]
    incoming.states[entry] = state
    return incoming


def test_where_experts_contradict_each_other_the_fit_starts_from_the_most_stable_one() -> None:
    place = site("O", counts=(0, 0, 8))
    algorithm = IOPSite(place, plan_of(IOPSite, IOPServer, SEGMENTATION, **QUICK))
    message = algorithm.finalize(with_opposite_masks(trained(), "B"))["deployed"]
    model: Any = build_deployed(SEGMENTATION, message)
    images = place.data.test.images.tensor_split(2)
    starts, decisions = model._starts(images)
    references = list(decisions.values())
    own_statistics = [(expert, True) for expert in SITES]
    assert starts == [(MIXTURE, False), *((expert, False) for expert in SITES), *own_statistics]
    summaries = {}
    for start in starts:
        model.load_start(*start)
        summaries[start] = model.measure(images, references)
    assert len({summary.instability for summary in summaries.values()}) > 1
    report = message.meta["adaptation"]
    chosen = min(summaries, key=lambda start: summaries[start].instability)
    assert (report["start"], report["running_statistics"]) == chosen
    rebuilt: Any = build_deployed(SEGMENTATION, message)
    assert rebuilt.measure(images, references).loss == pytest.approx(
        report["losses"][report["chosen"]], rel=1e-5
    )


def test_neither_an_empty_mask_nor_one_half_everywhere_is_stable() -> None:
    """Nor a mask that changes under noise: 0.1 of consistency by an information of H(1/2) - 0."""
    mask = torch.tensor([[[[1.0, 1.0], [0.0, 0.0]]]])
    zero = torch.tensor(0.0)
    empty = summarize_state(SEGMENTATION, [(zero, zero, torch.zeros_like(mask))])
    undecided = summarize_state(SEGMENTATION, [(zero, zero, torch.full_like(mask, 0.5))])
    assert empty.instability == undecided.instability == math.inf
    changing = summarize_state(SEGMENTATION, [(zero, torch.tensor(0.1), mask)])
    assert changing.instability == pytest.approx(0.1 / math.log(2))


def test_an_event_names_the_used_state_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def events(**hyper: Any) -> list[dict[str, Any]]:
        algorithm, models = final_models(images=8, **hyper)
        meta = evaluate_final_models(algorithm.site, models, lambda *_: None, method=METHOD)
        return [event for event in meta["events"] if event["kind"] == "reverted"]

    assert not events(route_epochs=0)
    monkeypatch.setattr(outside, "GATE_AGREEMENT", 1.1)
    (event,) = events(route_epochs=3, route_lr=0.1)
    assert event["message"].startswith("deployed: routing uses the start")


def test_a_model_whose_start_is_no_expert_is_refused() -> None:
    message = final_models()[1]["deployed"]
    message.meta["adaptation"]["start"] = "Z"
    with pytest.raises(StateError, match="'Z'"):
        build_deployed(SEGMENTATION, message)


def test_a_model_stored_by_an_older_release_is_built() -> None:
    """Without an objective it is the printed one; unknown settings are ignored."""
    message = final_models(**PRINTED)[1]["deployed"]
    del message.meta["routing"]["objective"]
    message.meta["routing"]["router_dropout"] = 0.2
    model: Any = build_deployed(SEGMENTATION, message)
    assert model.hyper.objective == "paper"

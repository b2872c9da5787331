"""IOP-FL's halves: the personal model inside, routing outside, on small generated images."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from medflare.core.errors import ConfigError, StateError
from medflare.core.manifest import violation
from medflare.core.states import blend, copy_state, difference, moved
from medflare.evaluation.contract import validate_results
from medflare.inference.deployed import load_model, save_model
from medflare.local import run_local
from medflare.methods import iop_fl, iop_math
from medflare.methods.base import Plan, ServerContext, Step
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.hyper import build_hyper
from medflare.methods.iop_fl import IOPHyper, IOPServer, IOPSite
from medflare.methods.iop_outside import RoutedModel, test_time_loss
from medflare.methods.registry import build_deployed, get_method
from medflare.tasks.config import load_task
from medflare.tasks.data import SiteData, Split
from medflare.tasks.site import Site, open_site

SITES = ("A", "B", "C")
SEGMENTATION = load_task(
    {
        "name": "squares",
        "kind": "segmentation",
        "target": "binary",
        "labels": ["square"],
        "channels": 1,
        "size": [16, 16],
        "network": {"name": "unet", "channels": [4, 8], "norm": "batch"},
        "loss": {"name": "dice"},
        "optimizer": {"name": "adam", "lr": 0.01, "amsgrad": True},
        "batch_size": 4,
        "local_epochs": 1,
        "metric": "dice",
    }
)
CLASSIFICATION = load_task(
    {
        **SEGMENTATION.to_dict(),
        "name": "bright",
        "kind": "classification",
        "target": "multiclass",
        "labels": ["dark", "bright"],
        "network": {"name": "small_cnn", "channels": [4, 8]},
        "loss": {"name": "ce"},
        "metric": "accuracy",
    }
)


def with_network(task, **network):
    return load_task({**task.to_dict(), "network": {**task.network, **network}})


def split(task, count, seed, shift):
    generator = torch.Generator().manual_seed(seed)
    images = shift + 0.2 * torch.randn(count, 1, 16, 16, generator=generator)
    masks = torch.zeros(count, 16, 16, dtype=torch.long)
    for image, mask, (top, left) in zip(images, masks, torch.randint(1, 8, (count, 2), generator=generator).tolist(), strict=True):
        image[0, top : top + 7, left : left + 7] += 1.0
        mask[top : top + 7, left : left + 7] = 1
    classes = torch.arange(count) % 2
    if task.kind == "classification":
        images = images + classes.view(-1, 1, 1, 1)
    names = tuple(f"{seed}-{i}" for i in range(count))
    return Split(images, masks if task.kind == "segmentation" else classes, names, names)


def site(name, task=SEGMENTATION, counts=(8, 4, 5), seed=11):
    place = "ABCO".index(name)
    parts = [split(task, count, 100 * place + i, 0.5 * place) for i, count in enumerate(counts)]
    return Site(name, task, SiteData(*parts), seed)


def server_of(task=SEGMENTATION, rounds=3, outside=("O",), cls=IOPServer, **hyper):
    context = ServerContext(task, 11, rounds, SITES, outside)
    return cls(context, build_hyper(cls.Hyper, hyper))


def halves_of(task=SEGMENTATION, cls=IOPSite, **hyper):
    return {name: cls(site(name, task), build_hyper(cls.Hyper, hyper), SITES) for name in SITES}


def run(server, halves, absent=lambda step, name: False, rebuilt=False):
    """The schedule without an engine; returns every step's replies. With `rebuilt` every task runs in a half made anew."""
    log = []
    for step in server.steps():
        replies = {}
        for name in SITES:
            if absent(step, name):
                continue
            if rebuilt:
                old, halves[name] = halves[name], type(halves[name])(site(name, server.context.task), halves[name].hyper, SITES)
                halves[name].restore(old.state())
            replies[name] = halves[name].perform(step.phase, step.round, server.outgoing(step, name))
        log.append((step, copy_state(server.model), replies))
        server.accept(step, replies)
    return log


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def close(first, second):
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6)


# -- inside --------------------------------------------------------------------------------------------------------------------


def test_contract_names():
    for name in ("local_adapted", "consistency_loss", "shape_loss", "entropy_loss"):
        assert getattr(iop_fl, name) is getattr(iop_math, name)


@pytest.mark.parametrize("reading", ["ema_local", "explicit", "incremental"])
def test_the_global_model_is_fedavgs(reading):
    ours, theirs = server_of(outside=()), server_of(outside=(), cls=FedAvgServer)
    run(ours, halves_of(reading=reading))
    run(theirs, halves_of(cls=FedAvgSite))
    assert equal(ours.model, theirs.model)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_ema_reading_accumulates_local_models(tau):
    server, halves = server_of(), halves_of(tau=tau)
    expected = copy_state(server.model)
    for step, _, replies in run(server, halves):
        if step.phase == "train":
            expected = blend(expected, replies["B"].states["model"], tau)
    assert equal(halves["B"].adapted, expected)


def test_tau_one_is_the_last_local_model():
    server, halves = server_of(rounds=2), halves_of(tau=1.0)
    log = run(server, halves)
    assert equal(halves["A"].adapted, log[1][2]["A"].states["model"])


def test_explicit_reading_takes_the_global_step_of_the_same_round():
    server, halves, tau = server_of(), halves_of(reading="explicit", tau=0.6), 0.6
    expected = copy_state(server.model)
    log = run(server, halves)
    for (step, before, replies), (_, after, _) in pairwise(log):
        if step.phase == "train":
            local_step = difference(replies["B"].states["model"], before)
            expected = blend(expected, moved(after, local_step), tau)
    close(halves["B"].adapted, expected)
    assert halves["B"].local_step is None  # the step of the last round found its global model in the final look


def test_incremental_reading_adds_both_steps():
    server, halves, tau = server_of(), halves_of(reading="incremental", tau=0.5), 0.5
    first = copy_state(server.model)
    expected, previous = copy_state(first), first
    for step, before, replies in run(server, halves):
        if step.phase == "train":
            both = {name: replies["B"].states["model"][name] - previous[name] for name in expected if expected[name].is_floating_point()}
            expected = {name: tensor + tau * both[name] if name in both else tensor for name, tensor in expected.items()}
            previous = before
    close({name: halves["B"].adapted[name] for name in expected if expected[name].is_floating_point()}, expected_floats(expected))


def expected_floats(state):
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def test_start_local_takes_the_first_local_model():
    server, halves = server_of(rounds=1), halves_of(start="local", tau=0.5)
    log = run(server, halves)
    assert equal(halves["A"].adapted, log[0][2]["A"].states["model"])
    assert log[0][2]["A"].facts["validation"]["personal"] is None


def test_delivered_personal_model_is_the_best_by_the_sites_own_validation():
    server, halves = server_of(rounds=4), halves_of()
    log = run(server, halves)
    for name, half in halves.items():
        values = [replies[name].facts["validation"]["personal"] for step, _, replies in log if step.phase != "submit"]
        assert half.best.round == 1 + values[1:].index(max(values[1:])) and half.best.value == max(values[1:])
        models = half.deliver(server.delivery(name))
        assert equal(models["personal"].states["model"], half.best.state) and models["deployed"] is models["personal"]
        assert equal(models["global"].states["model"], server.selected)


def test_selection_last_delivers_the_last_personal_model():
    server, halves = server_of(rounds=2), halves_of(selection="last")
    run(server, halves)
    assert equal(halves["A"].deliver(server.delivery("A"))["personal"].states["model"], halves["A"].adapted)


@pytest.mark.parametrize("reading", ["ema_local", "explicit", "incremental"])
def test_a_new_process_for_every_task_changes_nothing(reading):
    def absent(step, name):
        return name == "B" and step.round == 1

    plain, anew = (halves_of(reading=reading, reset_optimizer=False) for _ in range(2))
    servers = server_of(), server_of()
    run(servers[0], plain, absent)
    run(servers[1], anew, absent, rebuilt=True)
    assert equal(servers[0].model, servers[1].model)
    for name in SITES:
        assert equal(plain[name].adapted, anew[name].adapted) and equal(servers[0].experts[name], servers[1].experts[name])


def test_personal_models_leave_a_site_only_for_outside_sites_and_as_declared():
    assert [step.phase for step in server_of(rounds=1, outside=()).steps()] == ["train", "validate"]
    server, halves = server_of(rounds=1), halves_of()
    log = run(server, halves)
    assert [step.phase for step, _, _ in log] == ["train", "validate", "submit"]
    plan = Plan(SEGMENTATION, SITES, build_hyper(IOPHyper, {}))
    for step, _, replies in log:
        for reply in replies.values():
            assert violation(reply, IOPSite.outbound(step.phase, plan)) is None
    assert not any(entry.startswith("expert/") for entry in server.delivery("A").states)
    assert sorted(entry for entry in server.delivery("O").states if entry.startswith("expert/")) == ["expert/A", "expert/B", "expert/C"]
    assert server.models().keys() == {"global", "personal/A", "personal/B", "personal/C"}


def test_a_site_without_a_round_has_nothing_to_submit():
    half = halves_of()["A"]
    with pytest.raises(StateError, match="site A took part in no round"):
        half.perform("submit", 3, server_of().outgoing(Step("submit", 3), "A"))


def test_server_state_survives():
    server = server_of(rounds=2)
    run(server, halves_of())
    again = server_of(rounds=2)
    again.restore(server.state())
    first, second = server.delivery("O"), again.delivery("O")
    assert first.states.keys() == second.states.keys() and all(equal(first.states[entry], second.states[entry]) for entry in first.states)


def test_uniform_weighting_is_the_plain_mean():
    server = server_of(rounds=1, weighting="uniform")
    log = run(server, halves_of())
    states = [reply.states["model"] for reply in log[0][2].values()]
    close(
        expected_floats(server.model), {name: torch.stack([s[name] for s in states]).mean(dim=0) for name in expected_floats(server.model)}
    )


@pytest.mark.parametrize(("name", "value"), [("tau", 1.5), ("tau", "much"), ("reading", "literal"), ("radius", -1), ("router", "softmax")])
def test_bad_settings_are_named(name, value):
    with pytest.raises(ConfigError, match=name):
        get_method("iop_fl").check({name: value})


# -- outside -------------------------------------------------------------------------------------------------------------------

QUICK = {"route_epochs": 3, "route_lr": 0.05, "radius": 2}


def delivered(task=SEGMENTATION, counts=(0, 0, 5), outside=None, **hyper):
    server = server_of(task, rounds=1)
    run(server, halves_of(task))
    half = IOPSite(outside or site("O", task, counts), build_hyper(IOPHyper, {**QUICK, **hyper}), SITES)
    return half, half.deliver(server.delivery("O"))


@pytest.mark.parametrize("network", [SEGMENTATION, with_network(SEGMENTATION, norm="instance"), CLASSIFICATION])
@pytest.mark.parametrize("images", [1, 5])
def test_outside_site_gets_a_routed_model(network, images):
    half, models = delivered(network, (0, 0, images))
    assert models.keys() == {"global", "deployed"} and models["deployed"].facts["kind"] == "routed"
    model = build_deployed(network, models["deployed"])
    with torch.no_grad():
        p = model(half.site.data.test.images)
    assert p.shape[0] == images and torch.isfinite(p).all() and p.min() >= 0 and p.max() <= 1
    coefficients = model.report()["coefficients"]
    assert all(len(r) == len(SITES) + 1 for r in coefficients.values())
    assert any(abs(value - 1 / 4) > 1e-4 for r in coefficients.values() for value in r) or model.report()["chosen"] == 0


def test_the_state_with_the_lowest_loss_is_kept():
    half, models = delivered(route_epochs=5)
    report = models["deployed"].facts["adaptation"]
    losses, chosen = report["losses"], report["chosen"]
    assert len(losses) == 6 and chosen == losses.index(min(losses)) and losses[chosen] < losses[0]
    model = build_deployed(SEGMENTATION, models["deployed"])
    assert model.measure(half.site.data.test.images.tensor_split(2)) == pytest.approx(losses[chosen], rel=1e-5)


def test_the_last_state_on_request():
    _, models = delivered(choose="last", route_lr=5.0)
    assert models["deployed"].facts["adaptation"]["chosen"] == 3


def test_labels_decide_nothing():
    honest, spoilt = site("O", counts=(0, 0, 5)), site("O", counts=(0, 0, 5))
    spoilt.data = dataclasses.replace(spoilt.data, test=dataclasses.replace(spoilt.data.test, targets=1 - spoilt.data.test.targets))
    first, second = (delivered(outside=where)[1]["deployed"].states["router"] for where in (honest, spoilt))
    assert equal(first, second)


def test_predictions_do_not_depend_on_how_many_images_are_handed_over():
    """Eight images at once are answered in the two batches of four that they were adapted in."""
    half, models = delivered(counts=(0, 0, 8))
    model, images = build_deployed(SEGMENTATION, models["deployed"]), half.site.data.test.images
    with torch.no_grad():
        torch.testing.assert_close(model(images), torch.cat([model(images[:4]), model(images[4:])]))


def test_no_epoch_leaves_the_uniform_router():
    _, models = delivered(route_epochs=0)
    values = [value for r in models["deployed"].facts["adaptation"]["coefficients"].values() for value in r]
    torch.testing.assert_close(torch.tensor(values), torch.full((len(values),), 0.25))


def test_adaptation_changes_nothing_but_the_routers():
    server = server_of(rounds=1)
    run(server, halves_of())
    incoming = server.delivery("O")
    before = {entry: copy_state(state) for entry, state in incoming.states.items()}
    half = IOPSite(site("O", counts=(0, 0, 5)), build_hyper(IOPHyper, QUICK), SITES)
    models = half.deliver(incoming)
    assert all(equal(incoming.states[entry], before[entry]) for entry in before) and incoming.states.keys() == before.keys()
    assert all("router" in name for name in models["deployed"].states["router"])


def test_stored_outside_model_predicts_the_same(tmp_path):
    half, models = delivered()
    save_model(tmp_path, SEGMENTATION, models["deployed"], {"method": "iop_fl"})
    images = half.site.data.test.images
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(tmp_path).build(build_deployed)(images), build_deployed(SEGMENTATION, models["deployed"])(images)
        )


OPTIONS = [
    {"router": "free"},
    {"routing": "global"},
    {"routing": "global", "router": "free"},
    {"router_start": "random"},
    {"bn_statistics": "instance"},
    {"bn_statistics": "running"},
    {"train_bn_affine": True},
    {"perturbation": "noise+turns"},
    {"fresh_noise": False},
    {"stop_gradient": True},
    {"use_consistency": False},
    {"use_shape": False},
    {"use_entropy": False},
    {"shape_classes": "foreground"},
    {"shape_sum": "sum"},
    {"objective": "official"},
    {"router_dropout": 0.0},
    {"fixed_layers": "head, body.0.model.0.conv"},
    {"noise": 0.1},
    {"radius": 0},
    {"beta": 1.0},
    {"predict_dropout": True},
    {"online": True},
]


@pytest.fixture(scope="module")
def reference():
    half, models = delivered(choose="last")
    with torch.no_grad():
        return build_deployed(SEGMENTATION, models["deployed"])(half.site.data.test.images)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_matters(option, reference):
    half, models = delivered(choose="last", **option)
    model = build_deployed(SEGMENTATION, models["deployed"])
    with torch.no_grad():
        p = model(half.site.data.test.images)
    assert torch.isfinite(p).all() and not torch.equal(p, reference)


def test_online_works_where_gradients_are_switched_off():
    half, models = delivered(online=True)
    images = half.site.data.test.images
    for switched_off in (torch.no_grad, torch.inference_mode):
        model = build_deployed(SEGMENTATION, models["deployed"])
        before = copy_state(model.network.adapted_state())
        with switched_off():
            model(images.clone())
        assert not equal(model.network.adapted_state(), before)


def test_oblong_images_can_be_turned():
    _, models = delivered(perturbation="noise+turns")
    model = build_deployed(SEGMENTATION, models["deployed"])
    model.adapt([torch.rand(3, 1, 16, 24)])
    assert len(model.report()["losses"]) == 4


def test_classification_has_no_shape_term():
    p, noisy = torch.rand(4, 2).softmax(dim=1), torch.rand(4, 2).softmax(dim=1)
    hyper = build_hyper(IOPHyper, {"beta": 0.5})
    expected = iop_math.consistency_loss(p, noisy) + 0.5 * iop_math.entropy_loss(p)
    torch.testing.assert_close(test_time_loss(p, noisy, CLASSIFICATION, hyper), expected)


@pytest.mark.parametrize(
    ("objective", "number"), [("paper", "tta/paper_total_mean_normalised_beta0.01_d10"), ("official", "tta/official_total_d10")]
)
def test_whole_objective_equals_the_reference(golden, objective, number):
    numbers = golden("iop")
    task = load_task({**SEGMENTATION.to_dict(), "target": "multiclass", "labels": ["background", "organ"]})
    p, noisy = (torch.as_tensor(numbers[f"tta/{name}"]).double().softmax(dim=1) for name in ("logits", "logits_noisy"))
    loss = test_time_loss(p, noisy, task, build_hyper(IOPHyper, {"objective": objective}))
    assert loss.item() == pytest.approx(float(numbers[number]), rel=1e-5)


def test_a_binary_output_counts_as_two_classes():
    """Sigmoid and softmax networks that predict the same pay the same loss."""
    p, noisy = torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8)
    softmax = load_task({**SEGMENTATION.to_dict(), "target": "multiclass", "labels": ["background", "organ"]})
    for objective in ("paper", "official"):
        hyper = build_hyper(IOPHyper, {"objective": objective, "radius": 1})
        both = [torch.cat([1 - q, q], dim=1) for q in (p, noisy)]
        torch.testing.assert_close(test_time_loss(p, noisy, SEGMENTATION, hyper), test_time_loss(*both, softmax, hyper))


def test_comparisons_of_table_two():
    half, models = delivered(comparisons=True)
    assert models.keys() == {"global", "deployed", "ensemble", "tent", "personal/A", "personal/B", "personal/C"}
    assert "tent" not in delivered(with_network(SEGMENTATION, norm="instance"), comparisons=True)[1]
    images = half.site.data.test.images
    with torch.no_grad():
        single = [build_deployed(SEGMENTATION, models[f"personal/{name}"])(images).logit() for name in SITES]
        together = build_deployed(SEGMENTATION, models["ensemble"])(images)
        torch.testing.assert_close(together, torch.stack(single).mean(dim=0).sigmoid(), rtol=1e-4, atol=1e-5)
    _, with_global = delivered(comparisons=True, ensemble_global=True)
    assert with_global["ensemble"].states.keys() == {"A", "B", "C", "global"}


def test_without_personal_models_the_outside_site_gets_the_global_one():
    server = server_of(cls=FedAvgServer, rounds=1)
    run(server, halves_of())
    models = IOPSite(site("O"), build_hyper(IOPHyper, {}), SITES).deliver(server.delivery("O"))
    assert models["deployed"] is models["global"]


def test_a_routed_model_can_be_fitted_again_to_other_images():
    _, models = delivered()
    model = build_deployed(SEGMENTATION, models["deployed"])
    assert isinstance(model, RoutedModel)
    before = copy_state(model.network.adapted_state())
    model.adapt([torch.rand(2, 1, 16, 16) * 3])
    assert not equal(before, model.network.adapted_state())


def test_fitting_again_forgets_the_fit_before():
    half, models = delivered()
    model = build_deployed(SEGMENTATION, models["deployed"])
    model.adapt([torch.rand(2, 1, 16, 16) * 3])
    model.adapt([half.site.data.test.images])
    assert equal(model.network.adapted_state(), models["deployed"].states["router"])


def test_whole_federation_with_an_outside_site(tmp_path):
    """In the plain loop: results in order, the global model that of FedAvg, the stored outside model that which was measured."""
    task = load_task("phantom").to_dict() | {"size": [32, 32], "network": {"name": "unet", "channels": [4, 8], "norm": "batch"}}
    settings = {"rounds": 2, "seed": 3, "outside": ["site-9"]}
    ours = run_local("iop_fl", task, ["site-1", "site-2"], out=tmp_path, comparisons=True, route_epochs=1, **settings)
    theirs = run_local("fedavg", task, ["site-1", "site-2"], **settings)
    validate_results(ours)
    assert ours["status"] == theirs["status"] == "COMPLETED"
    metrics = {name: site["metrics"] for name, site in ours["sites"].items()}
    assert all(metrics[name]["global"] == site["metrics"]["global"] for name, site in theirs["sites"].items())
    assert metrics["site-1"]["deployed"] == metrics["site-1"]["personal"] and metrics["site-9"]["personal"]["dice"] is None
    assert {"ensemble", "tent", "personal/site-1", "personal/site-2"} <= metrics["site-9"].keys()
    stored = load_model(tmp_path / "sites" / "site-9" / "deployed")
    outside = open_site("site-9", stored.task, seed=3, role="outside")
    assert outside.score(stored.build(build_deployed), "test").values == pytest.approx(metrics["site-9"]["deployed"])

"""FedSM on small generated images: rounds, the selector, γ, the super model and every personalization."""

from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.small_tasks import predicted
from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state, weighted_mean
from medflare.data.loading import Batch, SiteData, Split
from medflare.federation.suppression import suppress_splits
from medflare.methods.catalogue import build_deployed
from medflare.methods.families.second_models.perfedavg import adapt
from medflare.methods.fedsm import super_model
from medflare.methods.fedsm.extra import (
    EnsembleSuperModel,
    ExtraSuperModel,
    FedSMExtraServer,
    FedSMExtraSite,
)
from medflare.methods.fedsm.formulas import (
    GAMMAS,
    adam_step,
    fitted_temperature,
    soft_pull,
    tuned_gamma,
)
from medflare.methods.fedsm.personalization import train_apfl, train_per_fedavg, train_pfedme
from medflare.methods.fedsm.selector import selector_spec
from medflare.methods.fedsm.server import FedSMServer
from medflare.methods.fedsm.site import FedSMSite
from medflare.methods.fedsm.super_model import SuperModel
from medflare.networks.catalogue import initial_network
from medflare.tasks.classes import Cases
from medflare.tasks.metrics import Scores
from medflare.training.epochs import epochs, trainable
from medflare.training.site import Site
from methods import squares
from methods.squares import SITES, equal

COMPACT: dict[str, Any] = {"selector": "compact_selector"}
PERSONALIZATIONS = squares.one_by_one(personalization=("finetune", "apfl", "perfedavg", "pfedme"))


def federation(**options: Any) -> squares.Played:
    return squares.run("fedsm", **{**COMPACT, "selector_updates": 1, **options})


@pytest.mark.parametrize("settings", [*PERSONALIZATIONS, {}], ids=str)
def test_a_restart_after_every_step_changes_nothing(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    once = federation(**settings, store=None)
    again = federation(**settings, store=tmp_path)
    first = once.server.configure_final("A")
    second = again.server.configure_final("A")
    assert first.meta == second.meta and first.states.keys() == second.states.keys()
    for entry, state in first.states.items():
        assert equal(state, second.states[entry])
    for model in once.algorithms["A"].finalize(first).values():
        assert torch.isfinite(
            build_deployed(squares.SEGMENTATION, model)(squares.site().data.test.images)
        ).all()


@pytest.mark.parametrize("combine", ["extra", "ensemble"])
def test_fedsm_extra_trains_its_selector_after_the_rounds(combine: str, tmp_path: Path) -> None:
    settings = {**COMPACT, "combine": combine, "selector_rounds": 2}
    log, server, _ = squares.run("fedsm_extra", rounds=1, store=tmp_path, **settings)
    assert [turn.step.phase for turn in log] == [
        "train",
        "validate",
        "train_selector",
        "train_selector",
    ]
    assert [len(turn.outgoing["A"].states) for turn in log[-2:]] == [5, 1], (
        "the finished models are sent once"
    )
    assert server.configure_final("A").meta["combine"] == combine


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_the_server_calls_soft_pull(lam: float) -> None:
    log, server, _ = federation(lam=lam)
    for before, after in pairwise(log[:3]):
        pulled = soft_pull(
            {name: reply.states["personal"] for name, reply in before.replies.items()}, lam
        )
        for name in SITES:
            assert equal(after.outgoing[name].states["personal"], pulled[name])
    for name in SITES:
        assert equal(server.personal(name), pulled[name])


def test_the_personal_model_of_an_absent_site_is_kept() -> None:
    log, _, _ = federation(rounds=3, absent=lambda step, name: name == "B" and step.round == 1)
    assert equal(
        log[2].outgoing["B"].states["personal"],
        soft_pull({n: r.states["personal"] for n, r in log[0].replies.items()}, 0.7)["B"],
    )
    assert set(log[1].replies) == {"A", "C"}


def test_the_personal_model_of_a_site_that_has_not_trained_is_the_global_one() -> None:
    """The initial weights would answer images of this site as noise."""
    log, server, _ = federation(
        rounds=3,
        selection="last",
        absent=lambda step, name: (
            name == "C" or (name == "B" and step.phase == "train" and step.round < 2)
        ),
    )
    late = log[2].outgoing["B"].states
    assert equal(late["personal"], late["model"])
    final = server.configure_final("C").states
    assert equal(final["personal/C"], final["model"])


def test_every_option_changes_what_is_delivered() -> None:
    actual = []
    for settings in (
        {},
        *PERSONALIZATIONS,
        {"selector_updates": 3},
        {"selector": "ridge", "selector_updates": "auto"},
    ):
        delivered = federation(
            **{"gamma": 0.5, "selection": "last", **settings}
        ).server.configure_final("A")
        tensors = {}
        for entry, state in delivered.states.items():
            for name, tensor in state.items():
                tensors[f"{entry}/{name}"] = tensor
        actual.append(tensors)
    for i in range(len(actual)):
        for j in range(i):
            assert not equal(actual[i], actual[j])


# ---- γ and temperature -----------------------------------------------------------------------------------------------------------


def test_the_server_calls_tuned_gamma_unless_gamma_is_set() -> None:
    tuned = federation()
    assert [turn.step.phase for turn in tuned.log] == [
        "train",
        "train",
        "validate",
        "selector_confidence",
        "evaluate_gamma",
    ]
    assert tuned.log[-2].outgoing["A"].states.keys() == {"selector"}, (
        "the whole super model is sent once"
    )
    gains = {site: reply.meta["gains"] for site, reply in tuned.log[-1].replies.items()}
    for of in gains.values():
        assert of.keys() == {f"{gamma:g}" for gamma in GAMMAS}
    assert (
        tuned.server.gamma == tuned_gamma(gains) == tuned.server.configure_final("A").meta["gamma"]
    )
    given = federation(gamma=0.25)
    assert (
        given.log[-1].step.phase == "selector_confidence"
        and given.server.configure_final("A").meta["gamma"] == 0.25
    )


def test_the_summary_leaves_out_suppressed_sites() -> None:
    """Of site B, whose validation patients are too few, there is neither vote nor calibration; no vote is not read as 0."""
    played = federation()
    calibrate, tune = played.log[-2:]
    for turn in (calibrate, tune):
        suppress_splits(turn.replies["B"], FedSMSite.phase(turn.step.phase).meta, ("validation",))
        played.server.aggregate(turn.step, turn.replies)
    summary = played.server.selector_summary()
    assert list(summary["votes"]) == ["A", "C"] and summary["candidates"] == list(GAMMAS)
    votes = {
        site: dict(zip(map("{:g}".format, GAMMAS), values, strict=True))
        for site, values in summary["votes"].items()
    }
    assert summary["gamma"] == tuned_gamma(votes)
    assert summary["mean_gain"] == pytest.approx(
        sum(of[f"{summary['gamma']:g}"] for of in votes.values()) / 2
    )
    told = {site: calibrate.replies[site].meta["calibration"] for site in "AC"}
    assert (
        summary["temperature"] == fitted_temperature(told)
        and calibrate.replies["B"].meta["calibration"] == []
    )


def test_the_delivered_selector_is_divided_by_the_fitted_temperature() -> None:
    """Its scores are those of the elected round at the temperature that the sites' validation images ask for."""
    played = federation()
    temperature = fitted_temperature(
        {site: reply.meta["calibration"] for site, reply in played.log[-2].replies.items()}
    )
    assert temperature != 1.0
    sent = played.log[-2].outgoing["A"].states["selector"]
    delivered = played.server.configure_final("A").states["selector"]
    logits = [played.algorithms["A"].selector_logits(state, "test") for state in (sent, delivered)]
    torch.testing.assert_close(logits[1], logits[0] / temperature)


# ---- the selector --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rounds", "updates"),
    [
        ({}, 1, None),
        (COMPACT, 10, 100),
        (COMPACT, 150, 150),
        ({**COMPACT, "selector_updates": 2}, 5, 10),
    ],
)
def test_the_selector_is_solved_or_takes_a_hundred_updates(
    options: dict[str, Any], rounds: int, updates: int | None
) -> None:
    phases = [step.phase for step in squares.server(FedSMServer, rounds=rounds, **options).steps()]
    trains = {"train", "train_selector"}
    assert ("selector_features" in phases) == (updates is None) and (
        updates is None or sum(phase in trains for phase in phases) == updates
    )


def test_further_updates_send_the_selector_alone() -> None:
    log, _, _ = federation(selector_updates=3, rounds=1, gamma=0.5)
    phases = [
        ("train", 0),
        ("train_selector", 1),
        ("train_selector", 2),
        ("validate", 0),
        ("selector_confidence", 0),
    ]
    assert [(turn.step.phase, turn.step.part) for turn in log] == phases
    for update in (1, 2):
        message = log[update].outgoing["A"]
        assert message.states.keys() == {"selector"} and message.meta == {"update": update}


def test_sites_have_equal_weights_in_the_selectors_gradient() -> None:
    """Weighted by images, the largest site's name answers for everybody's images."""
    played = federation(rounds=1, gamma=0.5, counts={"C": (32, 4, 5)})
    gradients = {
        name: reply.states["selector_gradient"] for name, reply in played.log[0].replies.items()
    }
    mean = weighted_mean(gradients, dict.fromkeys("ABC", 1.0))
    # After one step a tenth of the gradient.
    actual = played.server.memory.states["selector_exp_avg"]
    squares.assert_close({name: 10 * tensor for name, tensor in actual.items()}, mean)


def test_the_ridge_selector_separates_sites_after_one_exchange() -> None:
    """The sites of the tests differ in brightness; nothing is trained, and nothing of the selector travels in a round."""
    log, server, algorithms = federation(selector="ridge", rounds=1, sites=("A", "C"))
    assert [turn.step.phase for turn in log] == [
        "train",
        "validate",
        "selector_features",
        "selector_confidence",
        "evaluate_gamma",
    ]
    for entry in log[0].replies["A"].states:
        assert "selector" not in entry
    assert "selector" not in log[0].outgoing["A"].states
    assert log[2].replies["A"].states.keys() == {"selector_statistics"}
    for place, name in enumerate(("A", "C")):
        choices = algorithms[name].selector_logits(server.final_selector, "test").argmax(dim=1)
        assert (choices == place).all()


def test_a_site_without_statistics_is_never_chosen() -> None:
    _, server, algorithms = federation(
        selector="ridge",
        rounds=1,
        gamma=0.5,
        absent=lambda step, name: (step.phase, name) == ("selector_features", "B"),
    )
    scores = algorithms["B"].selector_logits(server.final_selector, "test").softmax(dim=1)
    assert (scores[:, 1] < 0.01).all() and torch.isfinite(scores).all()


@pytest.mark.parametrize(("silent", "kinds"), [((), []), (SITES, ["warning"])])
def test_a_selector_without_any_statistics_is_an_event(
    silent: Sequence[str], kinds: list[str]
) -> None:
    """As of sites with too few patients: nothing tells their images apart."""
    _, server, _ = federation(
        selector="ridge",
        rounds=1,
        gamma=0.5,
        absent=lambda step, name: step.phase == "selector_features" and name in silent,
    )
    assert [
        event["kind"] for event in server.context.events if "selector" in event["message"]
    ] == kinds


def test_per_fedavg_adapts_the_aggregated_model() -> None:
    """The personal model is a few steps from the shared model that the server sent, and it is the one that was measured."""
    log, server, algorithms = federation(
        personalization="perfedavg", gamma=0.5, selection="last", rounds=2
    )
    last = log[-2]
    assert last.step.phase == "validate"
    for name, algorithm in algorithms.items():
        model = algorithm.network("expected", last.outgoing[name].states["meta"])
        adapt(
            model,
            algorithm.site,
            last.step.round,
            algorithm.optimizers.recall("meta", algorithm.site.optimizer(trainable(model))),
        )
        assert equal(server.personal(name), copy_state(model.state_dict()))
        assert algorithm.validation(model) == last.replies[name].meta["validation"]["personal"]


def test_a_site_with_one_image_trains_the_selector() -> None:
    """The image fills its batch twice, and counts once."""
    log, _, _ = federation(task=squares.task("classification"), rounds=1, counts={"A": (1, 4, 5)})
    assert 0.9 < log[0].replies["A"].meta["losses"]["selector"] < 1.3, (
        "about log 3, as at the start of three sites"
    )


def test_volumes_have_the_compact_selector() -> None:
    large = squares.task(
        size=[16, 16, 16], spatial_dims=3, network={"name": "unet", "channels": [4, 8]}
    )
    assert selector_spec(squares.plan_of(FedSMExtraSite, FedSMExtraServer, large)) == {
        "name": "compact_selector"
    }


# ---- the super model -------------------------------------------------------------------------------------------------------


class Brightness(nn.Module):
    """A selector that takes an image of mean brightness k for one of class k, surely."""

    levels: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("levels", torch.arange(float(classes)))

    def forward(self, images: Tensor) -> Tensor:
        return -10 * (images.mean(dim=(1, 2, 3))[:, None] - self.levels).square()


def super_model_of(kind: str = "segmentation", combine: str | None = None) -> SuperModel:
    """K = 3 personal networks and a global one, untrained but different."""
    task = squares.task(kind)
    networks: list[nn.Module] = [
        initial_network(task, 1, name).eval() for name in ("global", *SITES)
    ]
    names = ["global", *SITES]
    if combine is not None:
        kind_of_model = EnsembleSuperModel if combine == "ensemble" else ExtraSuperModel
        return kind_of_model(task, networks, Brightness(4), names).eval()
    return SuperModel(task, networks, Brightness(3), names, gamma=0.6).eval()


def images_of(*levels: float) -> Tensor:
    noise = 0.2 * torch.randn(len(levels), 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return noise - noise.mean(dim=(1, 2, 3), keepdim=True) + torch.tensor(levels).view(-1, 1, 1, 1)


@torch.no_grad()
def test_who_answered_is_told_image_by_image() -> None:
    model = super_model_of()
    images = images_of(2.0, 0.0, 0.5, 1.0, 0.0)
    output = model(images)
    # Half way between A and B nobody is sure.
    assert model.predicted_by == ["C", "A", "global", "B", "A"]
    for image, answer, name in zip(images, output, model.predicted_by, strict=True):
        torch.testing.assert_close(
            answer, model.networks[model.names.index(name)](image[None]).sigmoid()[0]
        )
    model(images[:1])
    assert model.predicted_by == ["C"]
    report = model.report()
    assert {name: report[name] for name in model.names} == {"global": 1, "A": 2, "B": 1, "C": 2}
    assert sum(report["selector"].values()) == 6 and report["selector"]["C"] == 2, (
        "the selector's own answer, whatever γ"
    )


@torch.no_grad()
def test_a_patients_images_are_answered_by_one_model() -> None:
    """Single images of a patient that look like another site's are outvoted by the others."""
    model = super_model_of()
    images = images_of(2.0, 2.0, 1.2, 0.0)
    data = Split(
        images, torch.zeros(4, 16, 16, dtype=torch.long), ("p", "p", "p", "q"), tuple("abcd")
    )
    site = Site("O", squares.SEGMENTATION, SiteData(data, data, data), 0)
    for choose_by, expected in (("image", ["C", "C", "B", "A"]), ("patient", ["C", "C", "C", "A"])):
        model.choose_by = choose_by
        actual = predicted(site, model, "test")
        for image, answer, name in zip(images, actual, expected, strict=True):
            torch.testing.assert_close(
                answer,
                model.networks[model.names.index(name)](image[None]).sigmoid()[0],
                rtol=1e-4,
                atol=1e-5,
            )


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
@pytest.mark.parametrize("combine", [None, "extra", "ensemble"])
@torch.no_grad()
def test_without_branches_the_answers_are_the_same(kind: str, combine: str | None) -> None:
    model = super_model_of(kind, combine)
    images = images_of(2.0, 0.0, 0.5, 1.0, 0.1, 2.9)
    torch.testing.assert_close(model.unbranched()(images), model(images), rtol=0, atol=1e-6)
    assert len(set(model.predicted_by)) == 4, "all networks should have had their turn"


# ---- personalization (Table 6), a round by hand ----------------------------------------------------------------------------


RATE = 0.05


def site_of(batch_size: int) -> Site:
    """Twelve images, without layers that remember anything."""
    network = squares.WITHOUT_BATCH_NORM.network
    return squares.site(
        "A",
        squares.task(network=network, batch_size=batch_size, optimizer={"name": "sgd", "lr": RATE}),
    )


def batches_of(site: Site) -> list[Batch]:
    return list(chain.from_iterable(epochs(site, 0, "personal")))


def network_of(site: Site, shift: float = 0.0) -> Any:
    network = site.network()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1 + shift)
    return network.train()


def gradients(site: Site, weights: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    """Of the task's loss at these weights."""
    network = network_of(site)
    with torch.no_grad():
        for own, weight in zip(trainable(network), weights, strict=True):
            own.copy_(weight)
    return list(
        torch.autograd.grad(site.loss(network(batch.images), batch.targets), trainable(network))
    )


def copied(model: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in trainable(model)]


def assert_at(model: nn.Module, expected: Sequence[Tensor]) -> None:
    for actual, weight in zip(trainable(model), expected, strict=True):
        torch.testing.assert_close(actual.detach(), weight, rtol=1e-5, atol=1e-6)


def test_pfedme_descends_to_a_proximal_point_and_w_goes_there() -> None:
    site = site_of(batch_size=12)
    (batch,) = batches_of(site)
    shared = network_of(site)
    personal = network_of(site, shift=0.1)
    origin = copied(shared)
    theta = copied(personal)
    train_pfedme(
        shared,
        personal,
        site,
        0,
        torch.optim.SGD(trainable(personal), lr=0.05),
        strength=3.0,
        inner_steps=2,
    )
    for _ in range(2):
        theta = [
            t - 0.05 * (g + 3.0 * (t - w))
            for t, w, g in zip(theta, origin, gradients(site, theta, batch), strict=True)
        ]
    assert_at(personal, theta)
    assert_at(shared, theta)


def test_per_fedavg_takes_the_second_batchs_gradient_at_the_adapted_model() -> None:
    """θ' is the optimizer's own step from the moments that there are; the moments are those of the outer gradients alone."""
    site = site_of(batch_size=6)
    first, second = batches_of(site)
    model = network_of(site)
    start = copied(model)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1, momentum=0.5)
    for weight in trainable(model):
        optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, 0.2)
    train_per_fedavg(model, site, 0, optimizer)
    adapted = [
        w - 0.1 * (0.1 + g) for w, g in zip(start, gradients(site, start, first), strict=True)
    ]
    outer = gradients(site, adapted, second)
    assert_at(model, [w - 0.1 * (0.1 + g) for w, g in zip(start, outer, strict=True)])
    for weight, g in zip(trainable(model), outer, strict=True):
        torch.testing.assert_close(
            optimizer.state[weight]["momentum_buffer"], 0.1 + g, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("personalization", ["perfedavg", "pfedme"])
def test_the_shared_model_learns_at_the_defaults(personalization: str) -> None:
    """Plain steps of 0.001 beside a task with Adam left it where it was, and training loss with it."""
    task = squares.task(local_epochs=4, optimizer={"name": "adam", "lr": 0.005})
    log, _, algorithms = squares.run(
        "fedsm", task, rounds=5, personalization=personalization, gamma=0.5
    )
    algorithm = algorithms["A"]
    start = log[0].outgoing["A"].states

    def moved(entry: str) -> float:
        trained = log[4].replies["A"].states[entry]
        return float(
            sum(
                (trained[name] - start[entry][name]).square().sum()
                for name, _ in algorithm.site.network().named_parameters()
            )
            ** 0.5
        )

    def training_loss(state: StateDict) -> float:
        network = algorithm.frozen(state)
        images = algorithm.site.data.train
        return float(algorithm.site.loss(network(images.images), images.targets))

    assert moved("meta") > 0.1 * moved("model") > 0
    before = training_loss(start["meta"])
    after = training_loss(log[4].replies["A"].states["meta"])
    assert after < 0.8 * before


def test_apfl_learns_through_the_mixture() -> None:
    """v <- v - η α ∇f(v̄); running statistics are those that v̄ collected."""
    site = site_of(batch_size=12)
    (batch,) = batches_of(site)
    local = network_of(site, shift=0.3)
    shared = network_of(site)
    v = copied(local)
    w = copied(shared)
    slope = gradients(site, [0.25 * a + 0.75 * b for a, b in zip(v, w, strict=True)], batch)
    optimizer = site.optimizer(trainable(local))
    mixture = train_apfl(local, copy_state(shared.state_dict()), site, 0, optimizer, share=0.25)
    assert_at(local, [a - RATE * 0.25 * g for a, g in zip(v, slope, strict=True)])
    trained = local.state_dict()
    for name, weight in shared.named_parameters():
        torch.testing.assert_close(mixture[name], 0.25 * trained[name] + 0.75 * weight.detach())


@pytest.mark.parametrize("reset", [False, True])
def test_apfl_keeps_its_moments_from_round_to_round_unless_they_are_reset(reset: bool) -> None:
    """v after two rounds of one batch each: buffer <- .9 buffer + α ∇f(v̄), v <- v - η buffer."""
    network = squares.WITHOUT_BATCH_NORM.network
    optimizer = {"name": "sgd", "lr": RATE, "momentum": 0.9}
    task = squares.task(network=network, batch_size=12, optimizer=optimizer)
    options: dict[str, Any] = {
        "personalization": "apfl",
        "reset_optimizer": reset,
        "selector": "ridge",
        "gamma": 0.5,
    }
    log, _, algorithms = squares.run("fedsm", task, rounds=2, **options)
    site = squares.site("A", task)
    v = copied(network_of(site))
    buffer = list(map(torch.zeros_like, v))
    for round, turn in enumerate(log[:2]):
        (batch,) = chain.from_iterable(epochs(site, round, "personal"))
        w = [
            turn.outgoing["A"].states["model"][name]
            for name, _ in site.network().named_parameters()
        ]
        slope = gradients(site, [0.5 * (a + b) for a, b in zip(v, w, strict=True)], batch)
        kept = 0.0 if reset else 0.9
        buffer = [kept * moment + 0.5 * g for moment, g in zip(buffer, slope, strict=True)]
        v = [weight - RATE * moment for weight, moment in zip(v, buffer, strict=True)]
    actual = algorithms["A"].memory.states["apfl_local"]
    for name, weight in zip(dict(site.network().named_parameters()), v, strict=True):
        torch.testing.assert_close(actual[name], weight, rtol=1e-5, atol=1e-6)


def test_the_servers_adam_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=0.01)
    state: StateDict = {"w": weight.detach().clone(), "buffer": torch.tensor(3)}
    moments: dict[str, StateDict] = {
        name: {"w": torch.zeros(5, dtype=torch.float64)} for name in ("exp_avg", "exp_avg_sq")
    }
    for step in range(1, 6):
        # One step without a slope.
        weight.grad = torch.randn(5, generator=generator, dtype=torch.float64) * (step != 3)
        optimizer.step()
        state, moments = adam_step(state, {"w": weight.grad}, moments, step, rate=0.01)
        torch.testing.assert_close(state["w"], weight.detach())
    assert state["buffer"] == 3


def test_a_super_models_selector_is_one_of_fedsm() -> None:
    """A message or model folder comes from another party: its network would have any size."""
    task = squares.SEGMENTATION
    state = squares.start(task)
    selector = copy_state(
        initial_network(task, 1, "s", {"name": "compact_selector"}, 1).state_dict()
    )
    states = {"model": state, "personal/A": state, "selector": selector}
    meta = {"kind": "super", "sites": ["A"], "gamma": 0.5, "selector": {"name": "compact_selector"}}
    assert isinstance(build_deployed(task, Message(states, meta)), SuperModel)
    for spec in ({"name": "mlp", "hidden": [10**9]}, {"name": "vgg11", "channels": [9]}, ["vgg11"]):
        with pytest.raises(StateError, match="selector"):
            build_deployed(task, Message(states, {**meta, "selector": spec}))


@pytest.mark.parametrize(("minimum", "gain"), [(0, 0.25), (1, 0.25), (2, None)])
def test_a_gain_of_few_patients_is_not_sent(
    minimum: int, gain: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the gain of one patient the pixels of its structure could be computed."""
    undefined = torch.full((5,), torch.nan)
    values = torch.tensor([0.25, 0.5, 0.5, 0.5, 0.5])
    reference = torch.cat([torch.zeros(1), undefined[1:]])
    scores = {
        gamma: Scores({"dice": None}, cases=Cases(tuple("abcde"), {"dice": of_gamma}))
        for gamma, of_gamma in ((0.5, values), (1.0, reference))
    }
    monkeypatch.setattr(super_model, "_scores_of_images", lambda *_: scores)
    site = squares.site("A", squares.SEGMENTATION)
    model: Any = None
    site.minimum_patients = minimum
    assert super_model.gain_by_gamma(model, site)["0.5"] == gain

"""PRR's halves on small generated images: the three parts and their ablations, memory, absent sites, what is delivered."""

import math

import pytest
import torch
from torch.nn import functional

from medflare.core.errors import ConfigError
from medflare.core.manifest import violation
from medflare.core.states import batch_norm_entries, split_state, weighted_mean
from medflare.methods import prr
from medflare.methods.base import Plan, ServerContext, Step
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.hyper import build_hyper
from medflare.methods.prr import PRRHyper, PRRServer, PRRSite
from medflare.methods.prr_supervision import (
    SitePrototypes,
    Supervision,
    class_logits,
    class_names,
    class_targets,
    class_totals,
    prototype_width,
)
from medflare.methods.registry import build_deployed, get_method
from medflare.methods.screening import screen
from medflare.tasks.config import load_task
from medflare.tasks.data import SiteData, Split
from medflare.tasks.site import Site

SITES = ("A", "B", "C")
FEDBN = {"pfa": False, "det": False, "cpa": "off"}
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
        "optimizer": {"name": "adam", "lr": 0.01},
        "batch_size": 4,
        "local_epochs": 1,
        "metric": "dice",
    }
)


def like(task=SEGMENTATION, **changes):
    return load_task({**task.to_dict(), **changes})


CLASSIFICATION = like(
    name="bright",
    kind="classification",
    target="multiclass",
    labels=["dark", "grey", "bright"],
    size=[32, 32],
    network={"name": "vgg16_slim", "dimension": 8},
    loss={"name": "ce"},
    batch_size=8,
    metric="accuracy",
)
MULTILABEL = like(target="multilabel", labels=["square", "corner"])
MULTICLASS = like(target="multiclass", labels=["background", "square", "corner"])
WITHOUT_BATCH_NORM = like(network={"name": "unet", "channels": [4, 8], "norm": "instance"})
BINARY_CLASSIFICATION = like(CLASSIFICATION, target="binary", labels=["bright"])


def split(task, count, seed, shift, missing=None):
    generator = torch.Generator().manual_seed(seed)
    height, width = task.size
    images = shift + 0.2 * torch.randn(count, 1, height, width, generator=generator)
    masks = torch.zeros(count, height, width, dtype=torch.long)
    for image, mask, (top, left) in zip(images, masks, torch.randint(1, 8, (count, 2), generator=generator).tolist(), strict=True):
        image[0, top : top + 7, left : left + 7] += 1.0
        mask[top : top + 7, left : left + 7] = 1
        if task.target != "binary":
            mask[top : top + 2, left : left + 2] = 2
    targets = torch.stack([masks > 0, masks == 2], dim=1).float() if task.target == "multilabel" else masks
    if task.kind == "classification":
        targets = torch.arange(count) % task.outputs if task.target == "multiclass" else torch.arange(count) % 2
        if missing is not None:
            targets[targets == missing] = 0
        images = images + targets.view(-1, 1, 1, 1)
    names = tuple(f"{seed}-{i}" for i in range(count))
    return Split(images, targets, names, names)


def site(name, task=SEGMENTATION, counts=(8, 4, 4), seed=11, missing=None):
    place = "ABCO".index(name)
    parts = [split(task, count, 100 * place + i, 0.5 * place, missing) for i, count in enumerate(counts)]
    return Site(name, task, SiteData(*parts), seed)


def enrolled(data):
    return {"n": data.n, "class_counts": data.class_counts().tolist()}


def halves_of(task=SEGMENTATION, cls=PRRSite, sites=SITES, missing=None, counts=(8, 4, 4), **hyper):
    return {name: cls(site(name, task, counts, missing=missing), build_hyper(cls.Hyper, hyper), sites) for name in sites}


def server_of(halves, rounds=2, outside=(), cls=PRRServer, **hyper):
    first = next(iter(halves.values()))
    counts = {name: enrolled(half.site) for name, half in halves.items()}
    context = ServerContext(first.site.task, 11, rounds, tuple(halves), outside, counts)
    return cls(context, build_hyper(cls.Hyper, hyper))


def run(server, halves, absent=lambda step, name: False, rebuilt=False):
    """The schedule without an engine, screened as in one; returns every step's outgoing messages and replies."""
    log = []
    for step in server.steps():
        outgoing = {name: server.outgoing(step, name) for name in halves if not absent(step, name)}
        replies = {}
        for name, message in outgoing.items():
            if rebuilt:
                old, halves[name] = halves[name], type(halves[name])(halves[name].site, halves[name].hyper, halves[name].sites)
                halves[name].restore(old.state())
            replies[name] = halves[name].perform(step.phase, step.round, message)
        half = next(iter(halves.values()))
        manifest = type(half).outbound(step.phase, Plan(half.site.task, half.sites, half.hyper))
        screened = screen(replies, manifest, outgoing, {name: half.site.n for name, half in halves.items()})
        assert not screened.rejected
        server.accept(step, screened.accepted)
        log.append((step, outgoing, replies))
        if rebuilt:
            server, old = type(server)(server.context, server.hyper), server
            server.restore(old.state())
    return log, server


def federation(task=SEGMENTATION, rounds=2, outside=(), absent=lambda step, name: False, rebuilt=False, sites=SITES, **hyper):
    halves = halves_of(task, sites=sites, **hyper)
    log, server = run(server_of(halves, rounds, outside, **hyper), halves, absent, rebuilt)
    return log, server, halves


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_close(first, second):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def differ(first, second):
    return any(not torch.equal(first[name], second[name]) for name in first)


# ---- tasks as softmax problems ------------------------------------------------------------------------------------------------


def test_every_task_is_a_group_of_softmax_problems():
    logits = torch.arange(2 * 3 * 2 * 2.0).reshape(2, 3, 2, 2)
    grouped = class_logits(logits, MULTICLASS)
    assert grouped.shape == (1, 2, 3, 4) and torch.equal(grouped[0, 1, :, 1], logits[1, :, 0, 1])
    assert class_targets(torch.arange(8).reshape(2, 2, 2), MULTICLASS).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    pairs = class_logits(logits[:, :2], MULTILABEL)
    assert pairs.shape == (2, 2, 2, 4)
    torch.testing.assert_close(pairs.softmax(2)[1, 1, 1, 1], logits[1, 1, 0, 1].sigmoid())
    assert class_targets(torch.tensor([[[[0.0, 1.0]], [[1.0, 1.0]]]]), MULTILABEL).tolist() == [[[0, 1]], [[1, 1]]]
    assert class_logits(torch.zeros(4, 1), BINARY_CLASSIFICATION).shape == (1, 4, 2, 1)
    assert class_targets(torch.zeros(4, dtype=torch.long), BINARY_CLASSIFICATION).shape == (1, 4, 1)


def test_class_totals_count_negatives_where_only_positives_are_counted():
    halves = halves_of(MULTILABEL)
    counts = {name: enrolled(half.site) for name, half in halves.items()}
    totals = class_totals(MULTILABEL, counts)
    targets = torch.cat([half.site.data.train.targets for half in halves.values()])
    for g in range(2):
        assert totals[g].tolist() == [(targets[:, g] == 0).sum(), (targets[:, g] == 1).sum()]
    assert class_names(MULTILABEL) == [("not square", "square"), ("not corner", "corner")]
    everything = class_totals(CLASSIFICATION, {name: enrolled(half.site) for name, half in halves_of(CLASSIFICATION).items()})
    assert everything.tolist() == [[9, 9, 6]]


def supervision(data, kind, global_=None, totals=None, mix="paper"):
    totals = class_totals(data.task, {"A": enrolled(data)}) if totals is None else totals
    return Supervision(data, kind, beta=0.8, tau=3.0, totals=totals, global_=global_, mix=mix)


@pytest.mark.parametrize("task", [SEGMENTATION, MULTILABEL, MULTICLASS, CLASSIFICATION, BINARY_CLASSIFICATION])
def test_supervision_without_imbalance_is_cross_entropy_and_dice(task):
    data = site("A", task)
    images, targets, _ = next(iter(data.ordered("train")))
    logits = data.network()(images)
    equal = torch.ones_like(class_totals(task, {"A": enrolled(data)}))
    found = supervision(data, "global", totals=equal)(logits, targets)
    if task.target == "multiclass":
        expected = functional.cross_entropy(logits, targets)
    else:
        expected = functional.binary_cross_entropy_with_logits(logits, targets.reshape(logits.shape).float())
    if task.kind == "segmentation":
        expected = expected + supervision(data, "ce")._dice(logits, targets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(supervision(data, "ce")(logits, targets), expected)
    torch.testing.assert_close(supervision(data, "global", totals=equal, mix="official")(logits, targets), expected)
    torch.testing.assert_close(supervision(data, "task")(logits, targets), data.loss(logits, targets))
    skewed = equal.clone()
    skewed[:, 0] = 1000
    assert supervision(data, "global", totals=skewed)(logits, targets) < found  # less competition for the common class


def test_official_mix_is_half_cpa_half_cross_entropy():
    data = site("A")
    images, targets, _ = next(iter(data.ordered("train")))
    logits = data.network()(images)
    dice = supervision(data, "ce")._dice(logits, targets)
    parts = [supervision(data, kind)(logits, targets) - dice for kind in ("global", "ce")]
    torch.testing.assert_close(supervision(data, "global", mix="official")(logits, targets), sum(parts) / 2 + dice)


def test_comparison_losses():
    data = site("A", CLASSIFICATION)  # classes 0, 1, 2 with 3, 3 and 2 images
    images, targets, _ = next(iter(data.ordered("train")))
    logits = data.network()(images)
    weight = torch.tensor([8 / 9, 8 / 9, 8 / 6])
    expected = (functional.cross_entropy(logits, targets, reduction="none") * weight[targets]).mean()
    torch.testing.assert_close(supervision(data, "fedeamc")(logits, targets), expected)
    p = logits.softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(supervision(data, "focal")(logits, targets), (-(1 - p).square() * p.log()).mean())


def test_refinement_weighs_the_classes_that_are_far_from_the_others():
    data = site("A", CLASSIFICATION)
    images, targets, _ = next(iter(data.ordered("train")))
    logits, local = data.network()(images), torch.eye(3)
    opposite = local.clone()
    opposite[1] = torch.tensor([1.0, 0.0, 0.0])
    refined = supervision(data, "local", opposite)
    refined.refine(local)
    torch.testing.assert_close(refined.gamma, torch.tensor([[1.0, 4 / 3, 1.0]]))
    expected = (functional.cross_entropy(logits, targets, reduction="none") * refined.gamma[0][targets]).mean()
    torch.testing.assert_close(refined(logits, targets), expected)
    without = supervision(data, "global", opposite)
    without.refine(local)
    assert without.gamma is None


@pytest.mark.parametrize("task", [SEGMENTATION, MULTILABEL, CLASSIFICATION])
@pytest.mark.parametrize("embedding", ["features", "logits"])
def test_prototypes_are_masked_means_of_the_embeddings(task, embedding):
    data = site("A", task)
    network = data.network().eval()
    gathered = SitePrototypes(task, prototype_width(task, embedding), embedding, "cpu")
    with torch.no_grad():
        for images, targets, _ in data.ordered("train"):
            gathered.add(*network.features_and_output(images), targets)
        embeddings = network.features_and_output(data.data.train.images)[embedding == "logits"]
    targets = data.data.train.targets if task.target == "multilabel" else data.data.train.targets[:, None]
    rows = embeddings.movedim(1, -1)
    expected = torch.stack(
        [rows[targets[:, g] == c].mean(0) for g in range(targets.shape[1]) for c in range(3 if task is CLASSIFICATION else 2)]
    )
    torch.testing.assert_close(gathered.state()["prototypes"], expected, rtol=1e-4, atol=1e-5)
    assert gathered.state()["counts"].sum() == targets.numel()


def test_a_smaller_feature_map_sees_the_nearest_labels():
    gathered = SitePrototypes(SEGMENTATION, 1, "features", "cpu")
    targets = torch.zeros(1, 16, 16, dtype=torch.long)
    targets[0, :8, :8] = 1
    gathered.add(torch.tensor([[[[5.0, 1.0], [2.0, 3.0]]]]), torch.zeros(1, 1, 16, 16), targets)
    assert gathered.state()["prototypes"].flatten().tolist() == [2.0, 5.0] and gathered.state()["counts"].tolist() == [3, 1]


# ---- what leaves a site ---------------------------------------------------------------------------------------------------------


def test_batch_normalisation_and_the_personal_model_never_leave_the_site():
    log, server, halves = federation()
    local = batch_norm_entries(halves["A"].site.network())
    assert local and {step.phase for step, _, _ in log} == {"train", "validate"}
    for _, outgoing, replies in log:
        for message in [*outgoing.values(), *replies.values()]:
            assert not any(local & state.keys() for state in message.states.values())
            assert message.states.keys() <= {"model", "prototypes"}
    assert differ(halves["A"].normalisation, halves["B"].normalisation)
    assert server.models() == {}  # no whole model is known to the server


def test_replies_are_what_the_manifest_says():
    half = halves_of()["A"]
    server = server_of({"A": half})
    plan = Plan(SEGMENTATION, SITES, half.hyper)
    reply = half.perform("train", 0, server.outgoing(Step("train", 0), "A"))
    assert violation(reply, PRRSite.outbound("train", plan)) is None
    assert reply.states["prototypes"]["prototypes"].shape == (2, 4) and not reply.states["prototypes"]["counts"].is_floating_point()
    without = build_hyper(PRRHyper, {"cpa": "global"})
    assert PRRSite.outbound("train", Plan(SEGMENTATION, SITES, without)).keys() == {"model"}


# ---- aggregation --------------------------------------------------------------------------------------------------------------


def test_without_its_parts_and_batch_normalisation_it_is_fedavg():
    halves = halves_of(WITHOUT_BATCH_NORM, **FEDBN)
    _, server = run(server_of(halves, **FEDBN), halves)
    plain = halves_of(WITHOUT_BATCH_NORM, FedAvgSite)
    _, fedavg = run(server_of(plain, cls=FedAvgServer, weighting="uniform"), plain)
    assert_equal(server.mean, fedavg.model)
    assert_equal(server.aggregated["B"], fedavg.model)


def test_fedbn_is_the_plain_mean_with_local_batch_normalisation():
    log, _, halves = federation(**FEDBN)
    local = batch_norm_entries(halves["A"].site.network())
    first_replies, second_outgoing = log[0][2], log[1][1]
    mean = weighted_mean({name: reply.states["model"] for name, reply in first_replies.items()}, dict.fromkeys(SITES, 1.0))
    for message in second_outgoing.values():
        assert_equal(message.states["model"], mean)
    models = halves["A"].deliver(log[-1][1]["A"])
    assert_equal(models["personal"].states["model"], models["global"].states["model"])
    assert local <= models["personal"].states["model"].keys()


def test_every_site_gets_a_model_of_its_own_and_the_band_grows():
    log, server, _ = federation(rounds=3)
    sent = [outgoing["A"].states["model"] for _, outgoing, _ in log]
    assert differ(server.aggregated["A"], server.aggregated["B"])
    ratios = [prr.frequency_ratio(round, 3) for round in range(3)]
    for round, ratio in enumerate(ratios):
        replies = log[round][2]
        stacked = torch.stack([replies[name].states["model"]["head.weight"] for name in SITES])
        torch.testing.assert_close(sent[round + 1]["head.weight"], prr.fourier_aggregate(stacked, ratio, classifier=True)[0])
        bias = torch.stack([replies[name].states["model"]["head.bias"] for name in SITES])
        torch.testing.assert_close(sent[round + 1]["head.bias"], bias.mean(0))


@pytest.mark.parametrize("cls_task", [SEGMENTATION, CLASSIFICATION])
def test_one_site_alone_gets_its_own_deputy_back(cls_task):
    log, server, _ = federation(cls_task, sites=("A",))
    assert_equal(server.aggregated["A"], log[1][2]["A"].states["model"])


def test_a_site_that_misses_a_round_keeps_its_last_model_and_a_late_one_starts_from_the_mean():
    def absent(step, name):
        return step.phase == "train" and ((name == "B" and step.round == 1) or (name == "C" and step.round < 2))

    log, server, halves = federation(rounds=3, absent=absent)
    after_first = server_of(halves, 3)
    after_first.accept(log[0][0], log[0][2])
    assert_equal(log[2][1]["B"].states["model"], after_first.aggregated["B"])  # two rounds later, still that of round 0
    assert_equal(log[2][1]["C"].states["model"], log[1][2]["A"].states["model"])  # only A trained in round 1
    assert set(log[1][2]) == {"A"} and set(server.aggregated) == set(SITES)


# ---- DET ----------------------------------------------------------------------------------------------------------------------


def stages_of(epochs, **hyper):
    log, _, _ = federation(like(local_epochs=epochs), sites=("A",), rounds=2, **hyper)
    return [replies["A"].facts["stages"] for step, _, replies in log if step.phase == "train"]


def test_stages_of_a_round():
    assert stages_of(1) == [[2], [2]]  # nothing but mutual learning fits in one epoch
    assert stages_of(3, lam1=0.0, lam2=0.0) == [[1, 2, 3], [1, 2, 3]]
    assert stages_of(3, lam1=0.0, lam2=0.0, det_steps="RE") == [[1, 2, 2], [1, 2, 2]]
    assert stages_of(3, lam1=0.0, lam2=0.0, det_steps="E") == [[2, 2, 2], [2, 2, 2]]
    assert stages_of(3, lam1=9.0, lam2=9.0)[1] == [1, 1, 1]
    assert stages_of(2, lam1=0.0, lam2=0.0, stage_rule="threshold") == [[3, 3], [3, 3]]
    assert stages_of(2, lam1=0.0, lam2=0.0, stage_rule="threshold", metric_split="train") == [[3, 3], [3, 3]]
    assert stages_of(2, det=False) == [[], []]


def after_one_round(**hyper):
    half = halves_of(like(local_epochs=2), cpa="global", **hyper)["A"]
    server = server_of({"A": half}, **hyper)
    reply = half.perform("train", 0, server.outgoing(Step("train", 0), "A"))
    return half.personal, {**half.normalisation, **reply.states["model"]}


def test_teachers_are_not_touched_by_their_students():
    alone, _ = after_one_round(det=False)
    personal, deputy = after_one_round(lam1=9.0, lam2=9.0)  # Recover only: P_k learns from labels alone
    assert_equal(personal, alone)
    assert differ(deputy, alone)
    personal, deputy = after_one_round(stage_rule="threshold", lam1=0.0, lam2=0.0)  # Sublimate only: D_k does
    assert_equal(deputy, alone)
    assert differ(personal, alone)


def test_the_personal_model_is_never_overwritten():
    halves = halves_of()
    server = server_of(halves, rounds=3)
    for step in server.steps()[:3]:
        before = {name: half.personal for name, half in halves.items()}
        started = {}
        for name, half in halves.items():
            personal, deputy = half._models(server.outgoing(step, name))
            started[name] = dict(personal.state_dict())
            if before[name] is not None:
                assert_equal(started[name], before[name])
                assert differ(deputy.state_dict(), before[name])
        server.accept(step, {name: half.perform("train", step.round, server.outgoing(step, name)) for name, half in halves.items()})


def test_the_learning_rate_halves():
    rates = []
    for round in range(4):
        half = halves_of(halve_every=2)["A"]
        optimizer = half.site.optimizer

        def spy(parameters, optimizer=optimizer, **override):
            rates.append(override["lr"])
            return optimizer(parameters, **override)

        half.site.optimizer = spy
        half.perform("train", round, server_of({"A": half}).outgoing(Step("train", round), "A"))
    assert rates == [0.01, 0.01, 0.005, 0.005]


# ---- options ------------------------------------------------------------------------------------------------------------------

CHANGES = [
    {"pfa": False},
    {"r0": 0.1},
    {"r1": 0.5},
    {"components": "amplitude"},
    {"components": "phase"},
    {"phase_mean": "circular"},
    {"window": "official"},
    {"layout": "out_major"},
    {"det": False},
    {"det_steps": "E"},
    {"det_steps": "RE"},
    {"lam1": 0.0, "lam2": 5.0},
    {"lam2": 5.0},
    {"stage_rule": "threshold"},
    {"distillation": "mse10"},
    {"cpa": "global"},
    {"cpa": "local"},
    {"cpa": "off"},
    {"cpa": "off", "plain_loss": "ce"},
    {"cpa": "off", "plain_loss": "focal"},
    {"cpa": "off", "plain_loss": "fedeamc"},
    {"beta": 0.2},
    {"tau": 1.0},
    {"segmentation_loss": "official"},
    {"prototypes": "mean"},
    {"prototypes": "clamped"},
    {"prototype_pass": "separate"},
    {"embedding": "logits"},
    {"warm_up": 2},
    {"halve_every": 1},
]


@pytest.fixture(scope="module")
def outcomes():
    """What two rounds of three epochs leave behind, by setting: site A's personal model and the one it would be sent next."""
    known = {}

    def outcome(**hyper):
        key = tuple(sorted(hyper.items()))
        if key not in known:
            settings = {"lam1": 0.0, "lam2": 0.0, **hyper}
            _, server, halves = federation(like(local_epochs=3), sites=("A", "B"), rounds=2, **settings)
            known[key] = halves["A"].personal | {f"next/{name}": tensor for name, tensor in server.aggregated["A"].items()}
        return known[key]

    return outcome


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_option_changes_the_result(outcomes, change):
    found = outcomes(**change)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert differ(found, outcomes())


def test_training_images_may_be_the_ones_that_decide(monkeypatch):
    asked = []
    score = Site.score
    monkeypatch.setattr(
        Site, "score", lambda self, predictor, split, metrics: asked.append(split) or score(self, predictor, split, metrics)
    )
    stages_of(3, metric_split="train")
    assert asked.count("train") == 2 * 2 * 2  # two models before two of three epochs in two rounds
    asked.clear()
    stages_of(3)
    assert "train" not in asked and asked.count("validation") == 2 * 2 * 2 + 3 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r0": 0.4, "r1": 0.3}, "r0 must not be larger"),
        ({"lam1": 0.9, "lam2": 0.7}, "lam1 must not be larger"),
        ({"r1": 0.6}, "r1"),
        ({"tau": 0.5}, "tau"),
        ({"components": "amp"}, "components"),
    ],
)
def test_impossible_settings_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        build_hyper(PRRHyper, change)


# ---- all kinds of tasks, and what data may lack -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [MULTILABEL, MULTICLASS, CLASSIFICATION, BINARY_CLASSIFICATION, WITHOUT_BATCH_NORM])
def test_it_trains_on_every_kind_of_task(task):
    log, server, halves = federation(task, outside=("O",))
    losses = [replies["A"].facts["loss"] for step, _, replies in log if step.phase == "train"]
    assert all(math.isfinite(loss) for loss in losses)
    assert server.prototypes["prototypes"].abs().sum() > 0
    for model in halves["A"].deliver(server.delivery("A")).values():
        assert torch.isfinite(build_deployed(task, model)(halves["A"].site.data.test.images)).all()
    assert bool(server.context.events.of("warning")) == (task is WITHOUT_BATCH_NORM)


def test_a_class_that_no_site_has_is_named_and_does_no_harm():
    halves = halves_of(CLASSIFICATION, missing=1)
    log, server = run(server_of(halves), halves)
    warnings = [event["message"] for event in server.context.events.of("warning")]
    assert len(warnings) == 1 and "class grey" in warnings[0]
    assert log[0][2]["A"].states["prototypes"]["counts"][1] == 0
    assert torch.equal(server.prototypes["prototypes"][1], torch.zeros(8))
    assert all(math.isfinite(replies["A"].facts["loss"]) for step, _, replies in log if step.phase == "train")


def test_a_class_that_one_site_lacks_is_aligned_with_the_others():
    halves = halves_of(CLASSIFICATION)
    halves["B"] = PRRSite(site("B", CLASSIFICATION, missing=2), halves["B"].hyper, SITES)
    log, server = run(server_of(halves, rounds=2, prototypes="mean"), halves)
    sent = [replies.states["prototypes"]["prototypes"] for replies in log[1][2].values()]
    torch.testing.assert_close(server.prototypes["prototypes"][2], (sent[0][2] + sent[2][2]) / 2)


def test_a_site_with_one_image():
    halves = halves_of()
    halves["C"] = PRRSite(site("C", counts=(1, 1, 1)), halves["C"].hyper, SITES)
    log, _ = run(server_of(halves), halves)
    assert math.isfinite(log[1][2]["C"].facts["loss"])


# ---- delivery -----------------------------------------------------------------------------------------------------------------


def test_inside_a_site_uses_its_personal_model_of_its_best_round():
    log, server, halves = federation(rounds=3, selection="best")
    models = halves["A"].deliver(server.delivery("A"))
    assert models["deployed"] is models["personal"]
    validations = [replies["A"].facts["validation"] for _, _, replies in log[1:]]
    for role in ("global", "personal"):
        best = max(range(3), key=lambda i: (validations[i][role], -i)) + 1
        assert halves["A"].best[role].round == best
        measured = halves["A"].validation(halves["A"].network(role, models[role].states["model"]))
        assert measured == pytest.approx(validations[best - 1][role])


def test_the_last_round_is_delivered_on_request():
    _, server, halves = federation(rounds=3, selection="last")
    models = halves["A"].deliver(server.delivery("A"))
    assert_equal(models["personal"].states["model"], halves["A"].personal)
    assert_equal(models["global"].states["model"], {**halves["A"].normalisation, **server.aggregated["A"]})


def outsider():
    return PRRSite(site("O"), build_hyper(PRRHyper, {}), SITES)


def test_an_outside_site_gets_the_mean_deputy_with_the_mean_batch_normalisation():
    log, server, halves = federation(outside=("O",))
    assert [step.phase for step, _, _ in log] == ["train", "train", "validate", "share"]
    models = outsider().deliver(server.delivery("O"))
    assert models.keys() == {"global", "deployed"} and models["global"] is models["deployed"]
    own, shared = split_state(models["global"].states["model"], batch_norm_entries(halves["A"].site.network()))
    even = dict.fromkeys(SITES, 1.0)
    assert_close(shared, weighted_mean({name: reply.states["model"] for name, reply in log[1][2].items()}, even))
    assert_close(own, weighted_mean({name: half.normalisation for name, half in halves.items()}, even))
    assert_equal(server.models()["global"].states["model"], models["global"].states["model"])


def test_an_outside_site_may_get_the_most_representative_personal_model():
    halves = halves_of(CLASSIFICATION, outside="personal", selection="last")
    halves["A"] = PRRSite(site("A", CLASSIFICATION, missing=1), halves["A"].hyper, SITES)
    halves["C"] = PRRSite(site("C", CLASSIFICATION, missing=2), halves["C"].hyper, SITES)
    counts = {name: enrolled(half.site) for name, half in halves.items()}
    context = ServerContext(CLASSIFICATION, 11, 2, SITES, ("O",), counts)
    _, server = run(PRRServer(context, halves["A"].hyper), halves)
    # shares of the classes: everybody (14, 6, 4) / 24, A (6, 0, 2) / 8, B (3, 3, 2) / 8, C (5, 3, 0) / 8; C is nearest
    assert_equal(server.delivery("O").states["model"], halves["C"].personal)


def test_a_member_that_never_trained_is_treated_as_an_outsider():
    _, server, halves = federation(absent=lambda step, name: name == "C")
    models = halves["C"].deliver(server.delivery("C"))
    assert models.keys() == {"global", "deployed"}
    assert_equal(split_state(models["global"].states["model"], halves["C"].local)[1], server.mean)


# ---- memory -------------------------------------------------------------------------------------------------------------------


def test_new_processes_change_nothing():
    _, server, halves = federation(rounds=3, outside=("O",))
    _, again, rebuilt = federation(rounds=3, outside=("O",), rebuilt=True)
    for name in SITES:
        assert_equal(again.aggregated[name], server.aggregated[name])
        assert_equal(rebuilt[name].personal, halves[name].personal)
        first, second = (half.deliver(server.delivery(name)) for half in (halves[name], rebuilt[name]))
        for role in first:
            assert_equal(first[role].states["model"], second[role].states["model"])
    assert_equal(again.delivery("O").states["model"], server.delivery("O").states["model"])
    assert again.complete and server.complete


def test_it_is_registered_with_its_contract_names():
    method = get_method("prr")
    assert (method.site_class, method.server_class) == (PRRSite, PRRServer)
    names = ("fourier_aggregate", "frequency_ratio", "next_stage", "conjoint_mask", "prototype_gamma", "cpa_loss")
    assert all(callable(getattr(prr, name)) for name in names)

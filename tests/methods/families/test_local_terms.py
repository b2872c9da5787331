"""FedDyn, FedSAM and FedeAMC: formulas by hand, degenerate cases, what each moves."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from medflare.core.errors import ConfigError
from medflare.core.states import StateDict, difference, moved, weighted_mean
from medflare.methods.catalogue import get_method
from medflare.methods.families.local_terms.feddyn import FedDynServer, FedDynSite
from medflare.methods.families.local_terms.fedeamc import FedeAMCSite
from medflare.methods.families.local_terms.fedprox import FedProxSite
from medflare.methods.families.local_terms.fedsam import FedSAMSite
from medflare.methods.fedavg.site import FedAvgSite
from methods import squares

LR = 0.05
ONE_STEP: dict[str, Any] = {"batch_size": 12, "optimizer": {"name": "sgd", "lr": LR}}


def model_of(played: Any, site: str, round: int = 0) -> StateDict:
    return played.log[round].replies[site].states["model"]


# -- FedDyn ----------------------------------------------------------------------------------------


def test_feddyn_first_trains_as_fedprox() -> None:
    """h_k is 0 in the first round."""
    dynamic, _ = squares.trained(FedDynSite, alpha=0.5)
    proximal, _ = squares.trained(FedProxSite, mu=0.5)
    assert squares.equal(dynamic, proximal)


def test_feddyn_has_no_case_without_regularizer() -> None:
    with pytest.raises(ConfigError, match="alpha"):
        get_method("feddyn").check({"alpha": 0.0}, squares.SEGMENTATION)


def test_feddyn_step_has_the_printed_gradient() -> None:
    """g - h_k + α (w - w_g); the first step starts at w_g, where the last term is 0."""
    task = squares.task("classification", **ONE_STEP)
    site = squares.algorithm(FedDynSite, task=task, alpha=0.2)
    start = squares.start(task)
    site.current_control(None)
    site.control = {name: torch.ones_like(w) for name, w in site.control.items()}  # h_k = -0.2
    model = site.network("model", start)
    site.fit(model, site.site.optimizer(model.parameters()), 0)
    plain, _ = squares.trained(FedAvgSite, task)
    squares.assert_close(
        dict(model.state_dict()), {name: w - LR * 0.2 for name, w in plain.items()}
    )


def test_feddyn_server_by_hand() -> None:
    """h = -α/N Σ Δ_k and w = mean - h/α, with all three sites and with one of three."""
    start = squares.start()
    full = squares.run("feddyn", rounds=1)
    mean = weighted_mean({name: model_of(full, name) for name in "ABC"}, dict.fromkeys("ABC", 1.0))
    trained = full.server.control_sum.keys()
    expected = moved(mean, difference(mean, start))
    squares.assert_close(
        {name: full.model[name] for name in trained}, {name: expected[name] for name in trained}
    )
    statistics = full.model.keys() - trained
    assert any(name.endswith("running_mean") for name in statistics)
    for name in statistics:
        assert full.model[name].equal(mean[name])

    alone = squares.run("feddyn", rounds=1, absent=lambda step, name: name != "A")
    model = model_of(alone, "A")
    expected = moved(model, difference(model, start), 1 / 3)
    squares.assert_close(
        {name: alone.model[name] for name in trained}, {name: expected[name] for name in trained}
    )


def test_feddyn_h_is_the_mean_of_all_h_k() -> None:
    """With absent sites, and with replies that get lost."""
    algorithms = squares.algorithms(FedDynSite)
    server = squares.server(FedDynServer, rounds=4, outside=(), algorithms=algorithms)
    absent = {("C", 0), ("A", 2)}
    lost = {("B", 1), ("C", 3)}
    for step in server.steps()[:4]:
        replies = {}
        for name, algorithm in algorithms.items():
            if (name, step.round) in absent:
                continue
            reply = algorithm.perform("train", step.round, server.configure(step, name))
            if (name, step.round) not in lost:
                replies[name] = reply
        server.aggregate(step, replies)
    counted = server.memory.meta["counted"]
    assert counted == {"A": 3, "B": 3, "C": 2}
    controls = {}
    for name, algorithm in algorithms.items():
        controls[name] = algorithm.control
        if counted[name] == algorithm.memory.meta["updated"]:
            controls[name] = moved(algorithm.control, algorithm.update)
    squares.assert_close(server.control, weighted_mean(controls, dict.fromkeys("ABC", 1.0)))
    assert any(tensor.any() for tensor in server.control.values())


def test_feddyn_refuses_another_server() -> None:
    with pytest.raises(ConfigError, match="run 'feddyn'"):
        get_method("feddyn", server="fedavg").check({}, squares.SEGMENTATION)
    with pytest.raises(ConfigError, match="run 'feddyn'"):
        get_method("fedavg", server="feddyn").check({}, squares.SEGMENTATION)


# -- FedSAM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_fedsam_without_ascent_is_fedavg(kind: str) -> None:
    task = squares.task(kind)
    flat, meta = squares.trained(FedSAMSite, task, rho=0.0)
    plain, plain_meta = squares.trained(FedAvgSite, task)
    assert squares.equal(flat, plain) and meta["loss"] == pytest.approx(plain_meta["loss"])
    assert not squares.equal(squares.trained(FedSAMSite, task)[0], plain)


def gradients(task: Any, state: StateDict) -> dict[str, Any]:
    """Of the mean loss of all training images of site A."""
    site = squares.site("A", task)
    network = site.network()
    network.load_state_dict(state)
    data = site.data.train
    functional.cross_entropy(network(data.images), data.targets).backward()
    return {name: weight.grad for name, weight in network.named_parameters()}


def test_fedsam_step_by_hand() -> None:
    """w - η g(w + ρ g/||g||)."""
    task = squares.task("classification", **ONE_STEP)
    start = squares.start(task)
    first = gradients(task, start)
    norm = torch.cat([gradient.flatten() for gradient in first.values()]).norm()
    ascent = {name: start[name] + 0.5 * first[name] / norm for name in start}
    second = gradients(task, ascent)
    trained, _ = squares.trained(FedSAMSite, task, rho=0.5)
    squares.assert_close(trained, moved(start, second, -LR))


def test_fedsam_moves_running_statistics_once() -> None:
    task = squares.task(**ONE_STEP)
    sharp, _ = squares.trained(FedSAMSite, task, rho=0.5)
    plain, _ = squares.trained(FedAvgSite, task)
    different = {name for name in plain if not sharp[name].equal(plain[name])}
    assert different
    for name in different:
        assert not ("running" in name or "num_" in name)


# -- FedeAMC ---------------------------------------------------------------------------------------


def test_fedeamc_step_by_hand() -> None:
    """8, 0 and 4 images of three classes: w_c = 12 / (2 n_c)."""
    task = squares.task("classification", **ONE_STEP)
    algorithm = squares.algorithm(FedeAMCSite, task=task, missing=1)
    assert algorithm.site.class_counts().tolist() == [8, 0, 4]
    start = squares.start(task)
    network = algorithm.site.network()
    data = algorithm.site.data.train
    weights = torch.tensor([12 / 16, 1.0, 12 / 8])[data.targets]
    losses = functional.cross_entropy(network(data.images), data.targets, reduction="none")
    (weights * losses).mean().backward()
    expected = {name: w.detach() - LR * w.grad for name, w in network.named_parameters()}
    model = algorithm.network("model", start)
    algorithm.fit(model, algorithm.site.optimizer(model.parameters()), 0)
    squares.assert_close(dict(model.state_dict()), expected)


def test_fedeamc_of_equal_counts_is_fedavg() -> None:
    task = squares.CLASSIFICATION
    squares.assert_close(
        squares.trained(FedeAMCSite, task)[0], squares.trained(FedAvgSite, task)[0]
    )


def test_fedeamc_trains_every_kind_of_target() -> None:
    tasks = (squares.SEGMENTATION, squares.MULTILABEL, squares.MULTICLASS)
    for task in (*tasks, squares.BINARY_CLASSIFICATION):
        weighted, _ = squares.trained(FedeAMCSite, task)
        assert not squares.equal(weighted, squares.trained(FedAvgSite, task)[0])


def test_fedeamc_refuses_what_cannot_be_counted() -> None:
    task = squares.task(target="multilabel", labels=["square", "corner"], image_mode="patch")
    with pytest.raises(ConfigError, match="image_mode 'resize'"):
        FedeAMCSite.check(task, get_method("fedeamc").plan(task, ("A",), {}).site_hyper, None)

"""The formulas of GRACE as pure functions.

Zhang et al., "GRACE: A Generalized and Personalized Federated Learning Method for Medical Imaging",
MICCAI 2023: server weights by consistency, feature alignment, the meta-train step, the A-distance
probe.

The paper defines neither the alignment losses nor its last update step, and the printed sign of the
server step leads away from the sites; each function states its reading.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.errors import UpdateError
from medflare.core.states import State, StateDict, States, blend, cosines, gram, weighted_mean
from medflare.methods.parts.tensors import named_gradients

Granularity = Literal["total", "split", "reweight"]
CoralForm = Literal["domainbed", "deep_coral"]

_FLOOR = 1e-3  # consistency of the least consistent site after the shift
_EQUAL = 1e-6  # consistencies that differ by less are equal


# Server: consistency-enhanced re-weighting (Sec. 2.3)


def consistency_weights(
    deltas: Tensor,
    p: Tensor,
    *,
    include_self: bool = True,
    granularity: Granularity = "total",
    sizes: Sequence[int] = (),
) -> Tensor:
    """p' = Norm[(Sigma 1) o p] (Eq. 3) of flattened updates: aggregation weights by how well they
    agree; the server runs `consistent_aggregate`.

    Args:
        deltas: flattened updates theta_m - theta_g, one row per site (M, D).
        p: FedAvg's weights n_m / n (M,); only the ratios matter.
        include_self: include sigma_mm = 1 in the mean, as in the paper; the published code does
            not.
        sizes: lengths of the model's tensors along D; default: one tensor.

    Returns:
        float64 weights (M,) >= 0 with sum 1.

    Raises:
        UpdateError: an update that is not finite, by its row.
        ValueError: weights p that are negative, not finite or all zero.
    """
    deltas = torch.as_tensor(deltas, dtype=torch.float64)
    p = torch.as_tensor(p, dtype=torch.float64)
    tensors = deltas.split(list(sizes) or [deltas.shape[1]], dim=1)
    grams = torch.stack([part @ part.T for part in tensors])
    _refuse_non_finite([str(row) for row in range(len(deltas))], grams)
    return reweighted(average_consistency(similarity(grams, granularity), include_self), p)


def similarity(grams: Tensor, granularity: Granularity = "total") -> Tensor:
    """Sigma = cos(Delta_i, Delta_j): (L, M, M) -> (M, M).

    The cosine with a zero update is 0, its own included.

    Args:
        grams: Gram matrices of the M sites' updates of the model's L tensors, shallow to deep.
        granularity: "total": the model as one vector (the paper); "split": mean of the cosines by
            tensor; "reweight": the same with weights that fall linearly from the first tensor to 0
            at the last (the published code's `gm_type`).

    Examples:
        >>> similarity(torch.tensor([[[1.0, 2.0], [2.0, 4.0]]])).tolist()
        [[1.0, 1.0], [1.0, 1.0]]
        >>> similarity(torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])).tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    if granularity == "total":
        return cosines(grams.sum(dim=0))
    if granularity == "split":
        return cosines(grams).mean(dim=0)
    depth = torch.linspace(1, 0, len(grams), dtype=grams.dtype)
    return torch.einsum("l,lij->ij", depth / depth.sum(), cosines(grams))


def average_consistency(sigma: Tensor, include_self: bool = True) -> Tensor:
    """c_m = 1/M sum_n sigma_mn (before Eq. 4): (M, M) -> (M,); without `include_self` the mean over
    the other M - 1 sites, if there are any.
    """
    if include_self or len(sigma) == 1:
        return sigma.mean(dim=1)
    return (sigma.sum(dim=1) - sigma.diagonal()) / (len(sigma) - 1)


def reweighted(c: Tensor, p: Tensor) -> Tensor:
    """p'_m proportional to c_m p_m (Eq. 3): (M,) with sum 1, in (0, 1) also for consistencies that
    are not positive.

    If the smallest c is <= 0, the same number is added to all until it is 0.001; the published code
    does so only below 0 and divides by zero at 0. p' = p for equal consistencies: one site, two
    sites that moved, identical sites, no update at all.

    Args:
        c: consistencies (M,).
        p: FedAvg's weights (M,), >= 0.

    Raises:
        ValueError: weights p that are negative, not finite or all zero.
    """
    if not (p >= 0).all() or not 0 < p.sum() < math.inf:
        raise ValueError(f"p must be finite, >= 0 and not all zero, got {p.tolist()}")
    lowest = float(c.min())
    if float(c.max()) - lowest < _EQUAL:
        return p / p.sum()
    if lowest <= 0:
        c = c - lowest + _FLOOR
    return c * p / (c * p).sum()


def consistent_aggregate(
    model: StateDict,
    states: States,
    p: Mapping[str, float],
    parameters: Collection[str],
    *,
    include_self: bool = True,
    granularity: Granularity = "total",
    server_rate: float = 1.0,
) -> tuple[StateDict, dict[str, float]]:
    """The next global model theta_g + eta_g sum_m p'_m Delta_m (Eq. 3 and the line after it, with
    the sign towards the sites).

    Buffers such as BatchNorm's running statistics are averaged with the weights p' for any server
    rate; integer buffers take the largest value. The other options are those of
    `consistency_weights`.

    Args:
        model: the global model that the sites started from.
        states: site -> its locally trained model.
        p: site -> FedAvg's weight.
        parameters: names of the trainable entries, shallow to deep, over which the cosines are.

    Returns:
        (the next global model, with the dtypes of `model`; site -> p'_m).

    Raises:
        UpdateError: an update that is not finite, by its site.
        ValueError: no parameters.
    """
    if not parameters:
        raise ValueError(
            "consistent_aggregate: no parameters to compare updates by; name the trainable entries"
        )
    sites = sorted(states)
    by_tensor = []
    for name in parameters:
        by_tensor.append(gram([states[site][name] for site in sites], model[name]))
    grams = torch.stack(by_tensor)
    _refuse_non_finite(sites, grams)
    shares = torch.tensor([p[site] for site in sites], dtype=torch.float64)
    consistency = average_consistency(similarity(grams, granularity), include_self)
    weights = dict(zip(sites, reweighted(consistency, shares).tolist(), strict=True))
    averaged = weighted_mean(states, weights)
    mean = {name: tensor.to(model[name].dtype) for name, tensor in averaged.items()}
    if server_rate == 1:  # exactly the mean
        return mean, weights
    # sum p' = 1: theta_g + eta_g (mean - theta_g)
    stepped = blend({name: model[name] for name in parameters}, mean, server_rate)
    return {**mean, **stepped}, weights


def _refuse_non_finite(sites: Sequence[str], grams: Tensor) -> None:
    """Raises UpdateError with the sites whose update has no finite length."""
    lengths = grams.sum(dim=0).diagonal()
    refused = [site for site, square in zip(sites, lengths, strict=True) if not square.isfinite()]
    if refused:
        raise UpdateError(
            f"the update of {', '.join(refused)} holds NaN or infinity; leave it out of the round"
        )


# Site: feature alignment (Eq. 2); the paper names CORAL, MMD and adversarial training without
# formulas


def coral(x: Tensor, y: Tensor, form: CoralForm = "domainbed") -> Tensor:
    """CORAL distance of two feature sets (Sun and Saenko, ECCV workshops 2016), a scalar; 0 if a
    set has fewer than two rows.

    Args:
        x: features (N, D).
        y: features (M, D).
        form: with C the unbiased covariance, "domainbed": mean((C_x - C_y)^2) +
            mean((mean x - mean y)^2); "deep_coral": ||C_x - C_y||_F^2 / (4 D^2).
    """
    if min(len(x), len(y)) < 2:
        return 0 * (x.sum() + y.sum())  # in the graph, so that it has a gradient
    gap = (_covariance(x) - _covariance(y)).square()
    if form == "deep_coral":
        return gap.sum() / (4 * x.shape[1] ** 2)
    shift = (x.mean(dim=0) - y.mean(dim=0)).square()
    return gap.mean() + shift.mean()


def _covariance(features: Tensor) -> Tensor:
    centred = features - features.mean(dim=0)
    return centred.T @ centred / (len(features) - 1)


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """Squared maximum mean discrepancy E k(x, x') + E k(y, y') - 2 E k(x, y), diagonals included, a
    scalar.

    k is a sum of Gaussian kernels exp(-gamma d^2), gamma = 0.001, 0.01, ... 1000 (as in MMD-AAE,
    Li et al., CVPR 2018).

    Args:
        x: features (N, D).
        y: features (M, D).
    """
    joined = torch.cat([x, y])
    squared = (joined.unsqueeze(1) - joined.unsqueeze(0)).square().sum(dim=-1)
    kernels = [torch.exp(-(10.0**power) * squared) for power in range(-3, 4)]
    values = torch.stack(kernels).sum(dim=0)
    n = len(x)
    within = values[:n, :n].mean() + values[n:, n:].mean()
    return within - 2 * values[:n, n:].mean()


def reverse_gradient(features: Tensor) -> Tensor:
    """Gradient reversal layer (Ganin et al., JMLR 2016): the identity with a negated gradient."""
    same = features.view_as(features)
    if same.requires_grad:
        same.register_hook(torch.neg)
    return same


def adversarial(discriminator: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of a discriminator between global features (label 1) and local ones
    (label 0): (N, D), (M, D) -> scalar.

    Its gradient trains the discriminator and, reversed, the local feature extractor against it.

    Args:
        discriminator: (N, D) -> logits (N, 1).
        x: features of the frozen global model.
        y: features of the local model.
    """
    logits = discriminator(torch.cat([x, reverse_gradient(y)])).squeeze(-1)
    labels = torch.zeros_like(logits)
    labels[: len(x)] = 1
    return F.binary_cross_entropy_with_logits(logits, labels)


# Site: meta-train and meta-update (Sec. 2.2)


def meta_trained(parameters: State, task_loss: Callable[[State], Tensor], rate: float) -> StateDict:
    """theta' = theta - eta grad L_task(theta; x_tr, y_tr) (Eq. 1, whose Delta is a gradient), by
    name, as a function of theta.

    The gradient of L_meta(theta') by theta is that of the meta-update of first order, with the
    inner gradient as a constant (as in the published code).

    Args:
        parameters: theta by name; leaves that require gradients.
        task_loss: parameters -> loss on the meta-train half of the batch.
        rate: eta.

    Examples:
        >>> theta = {"w": torch.tensor(3.0, requires_grad=True)}
        >>> meta_trained(theta, lambda parameters: parameters["w"] ** 2, rate=0.5)["w"].item()
        0.0
    """
    gradients = named_gradients(task_loss(parameters), parameters)
    return {name: value - rate * gradients[name] for name, value in parameters.items()}


# Probe (Fig. 2)


def a_distance(
    global_features: Tensor, local_features: Tensor, *, repeats: int = 10, seed: int = 0
) -> float:
    """Proxy A-distance 2 (1 - 2 err) between the features that two models give the same images
    (Ben-David et al., 2010).

    err is the test error of a logistic classifier between the two models' features, trained on 80 %
    of the images, averaged over `repeats` splits. Both features of an image are on the same side of
    a split; otherwise equal models would have distances below 0.

    Args:
        global_features: (N, D) under the global model.
        local_features: (N, D) under the local model, row i of the same image.

    Returns:
        About 0 for indistinguishable features, 2 for separable ones; NaN for fewer than two images.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupShuffleSplit, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    n = len(global_features)
    if n < 2:
        return math.nan
    features = torch.cat([global_features, local_features]).detach().cpu().double().numpy()
    labels = [1] * n + [0] * n
    images = [*range(n), *range(n)]
    splits = GroupShuffleSplit(repeats, test_size=0.2, random_state=seed)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    scores = cross_val_score(classifier, features, labels, groups=images, cv=splits)
    accuracy = float(scores.mean())
    return 2 * (1 - 2 * (1 - accuracy))

"""FedSM's mathematics (Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation", CVPR 2022).

Also the formulas of what its Table 6 and Sec. 3.1 compare: APFL, pFedMe, FedSM-extra and the ensemble.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medflare.core.backing import empty
from medflare.core.states import StateDict, refuse_unlike, stretches

GAMMAS = (0.0, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0)  # candidates of the grid
DECILES = tuple(place / 10 for place in range(1, 10))
_ROUNDING = 0.02  # of a gradient's largest number; that of bfloat16, with room


def soft_pull(states: Mapping[str, StateDict], lam: float) -> dict[str, StateDict]:
    """w_p,k <- λ w_p,k + (1 - λ) / (K - 1) Σ_{k' ≠ k} w_p,k'  (FedSM, Eq. 11).

    The mean over sites stays where it is and deviations from it shrink by (λK - 1)/(K - 1): λ = 1 leaves every model alone,
    λ = 1/K gives everybody the uniform mean, λ < 1/K overshoots it. Accumulated in float64, sites in sorted order. Integer
    entries keep each site's own value. One site alone is left as it is (the formula is undefined for K = 1).

    Args:
        states: site -> personal model; all with the same names and shapes.
        lam: λ in [0, 1].

    Returns:
        Site -> its model after the pull, with the dtypes of its own.

    Raises:
        ValueError: λ outside [0, 1], or models of other names or shapes.

    Examples:
        >>> states = {"A": {"w": torch.tensor(0.0)}, "B": {"w": torch.tensor(4.0)}}
        >>> soft_pull(states, lam=0.5)  # λ = 1/K: the mean
        {'A': {'w': tensor(2.)}, 'B': {'w': tensor(2.)}}
        >>> soft_pull(states, lam=1.0) == states, soft_pull(states, lam=0.75)
        (True, {'A': {'w': tensor(1.)}, 'B': {'w': tensor(3.)}})
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam = {lam} is outside [0, 1]; the mean of the personal models is at 1 / K")
    refuse_unlike(states)
    sites = sorted(states)
    count = len(sites)
    if count < 2:
        return {site: dict(states[site]) for site in sites}
    pulled: dict[str, StateDict] = {site: {} for site in sites}
    for name, first in states[sites[0]].items():
        if not first.is_floating_point():
            for site in sites:
                pulled[site][name] = states[site][name].clone()
            continue
        for site in sites:
            pulled[site][name] = empty(first.shape, states[site][name].dtype)
        for parts in stretches([state[name] for by_site in (states, pulled) for state in map(by_site.__getitem__, sites)]):
            own = [part.to(torch.float64) for part in parts[:count]]
            total = torch.zeros_like(own[0])
            for part in own:
                total += part
            for part, found in zip(own, parts[count:], strict=True):
                found.copy_(lam * part + (1 - lam) / (count - 1) * (total - part))
    return pulled


def choose_model(probabilities: Tensor, gamma: float) -> Tensor:
    """Which model serves each image (FedSM, Sec. 3.1): 0 the global one, k + 1 the personal model of site k.

    The personal model of the most probable site is taken where its probability exceeds γ (strictly), so γ = 1 always gives the
    global model and γ = 0 never does.

    Args:
        probabilities: (N, K) selector scores, rows sum to 1.
        gamma: γ in [0, 1].

    Returns:
        (N,) long tensor in 0..K.

    Examples:
        >>> scores = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
        >>> choose_model(scores, 0.6), choose_model(scores, 1.0)
        (tensor([1, 0, 2]), tensor([0, 0, 0]))
    """
    top, site = probabilities.max(dim=1)
    return torch.where(top > gamma, site + 1, torch.zeros_like(site))


def tuned_gamma(facts: Mapping[str, Mapping[str, Any]]) -> float:
    """The γ with the best validation metric over all sites, weighted by validation images; of equals the smallest.

    Args:
        facts: site -> {"gammas": {"0.5": metric or None, ...}, "n_validation": count}.

    Examples:
        >>> tuned_gamma({"A": {"gammas": {f"{gamma:g}": 0.8 if gamma == 0.9 else 0.7 for gamma in GAMMAS}, "n_validation": 5}})
        0.9
    """
    totals: dict[float, float] = {}
    for gamma in GAMMAS:
        pairs = [(f["gammas"][f"{gamma:g}"], f["n_validation"]) for _, f in sorted(facts.items())]
        known = [(metric, count) for metric, count in pairs if metric is not None and count > 0]
        if known:
            totals[gamma] = sum(metric * count for metric, count in known) / sum(count for _, count in known)
    return max(totals, key=lambda gamma: (totals[gamma], -gamma)) if totals else GAMMAS[0]


def median_by_gamma(facts: Mapping[str, Mapping[str, Any]], candidates: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the sites agree on: for every γ the median over sites of its validation metric, so that no site chooses γ for the others.

    Its standard error is taken for that of a mean of as many sites, each with the median of the sites' errors; one that is missing is 0.

    Args:
        facts: site -> {"gammas": {"0.5": metric or None, ...}, "errors": {"0.5": standard error, ...}}.
        candidates: every γ as text.

    Returns:
        {"gammas", "errors"} as of one site.

    Examples:
        >>> sites = {"A": (0.5, 0.25), "B": (0.75, 0.25), "C": (0.0, 1.0), "D": (None, 0.0), "E": (0.75, 0.25)}
        >>> median_by_gamma({name: {"gammas": {"0": metric}, "errors": {"0": error}} for name, (metric, error) in sites.items()}, ["0"])
        {'gammas': {'0': 0.625}, 'errors': {'0': 0.125}}
    """
    metrics: dict[str, float | None] = {}
    errors: dict[str, float] = {}
    for text in candidates:
        known = [(found["gammas"][text], found["errors"][text]) for found in facts.values() if found["gammas"][text] is not None]
        metrics[text] = median(metric for metric, _ in known) if known else None
        errors[text] = median(error or 0.0 for _, error in known) / math.sqrt(len(known)) if known else 0.0
    return {"gammas": metrics, "errors": errors}


def patient_scores(scores: Tensor, patients: Sequence[str]) -> Tensor:
    """Every image's scores replaced by their mean over the patient's images: a patient was at one site.

    Args:
        scores: (N, K), rows sum to 1.
        patients: of every image.

    Returns:
        (N, K), rows of one patient are equal.

    Examples:
        >>> patient_scores(torch.tensor([[1.0, 0.0], [0.2, 0.8], [0.0, 1.0]]), ["a", "b", "a"])
        tensor([[0.5000, 0.5000],
                [0.2000, 0.8000],
                [0.5000, 0.5000]])
    """
    places = {patient: place for place, patient in enumerate(dict.fromkeys(patients))}
    groups = torch.tensor([places[patient] for patient in patients], dtype=torch.long, device=scores.device)
    totals = scores.new_zeros(len(places), scores.shape[1]).index_add_(0, groups, scores)
    return (totals / torch.bincount(groups, minlength=len(places))[:, None])[groups]


def gamma_candidates(quantiles: Mapping[str, Sequence[float]], images: Mapping[str, int]) -> list[float]:
    """Candidates of γ: 0, the deciles of the largest score max ŷ over all sites' images, and 1.

    Fixed values miss where a selector is never above 0.6, or never below 0.99.

    No one of three sites or more counts for more than all others together: what it has is only known from itself.

    Args:
        quantiles: site -> deciles of max ŷ over its images; empty without images.
        images: site -> how many there are.

    Returns:
        In rising order, each once.

    Examples:
        >>> gamma_candidates({"A": [0.5] * 9, "B": [0.9] * 9, "C": []}, {"A": 10, "B": 30, "C": 0})
        [0.0, 0.5, 0.9, 1.0]
        >>> gamma_candidates({"A": [0.5] * 9, "B": [0.6] * 9, "C": [0.1] * 9}, {"A": 10, "B": 10, "C": 10**9})
        [0.0, 0.1, 0.5, 0.6, 1.0]
    """
    whole = sum(images.values())
    counted = {site: min(count, whole - count) for site, count in images.items()} if sum(map(bool, images.values())) > 2 else images
    values = [(value, counted[site]) for site, found in sorted(quantiles.items()) for value in found if counted[site]]
    if not values:
        return [0.0, 1.0]
    pooled, weights = zip(*values, strict=True)
    deciles = np.quantile(np.array(pooled), DECILES, weights=np.array(weights, dtype=float), method="inverted_cdf")
    return sorted({0.0, 1.0, *(round(float(value), 6) for value in deciles)})


def jackknife_error(left_out: Sequence[float]) -> float:
    """Standard error of a statistic from its values without each of G groups: sqrt((G - 1) / G Σ (θ_g - mean θ)²) (Efron 1982, Eq. 3.1).

    Args:
        left_out: θ_g of every group.

    Returns:
        0 for fewer than two groups.

    Examples:
        >>> jackknife_error([1.0]), jackknife_error([0.0, 1.0])  # of two values their standard error, |difference| / 2
        (0.0, 0.5)
    """
    count = len(left_out)
    if count < 2:
        return 0.0
    mean = sum(left_out) / count
    return math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in left_out))


def gamma_within_error(facts: Mapping[str, Mapping[str, Any]]) -> float:
    """The largest γ whose validation metric is within one standard error of the best (the rule of Breiman et al. 1984, Sec. 3.4.3).

    The larger γ, the more often the global model answers: ties favour it, and personal models have to show that they are better.

    Args:
        facts: site -> {"gammas": {"0.5": metric or None, ...}, "errors": {"0.5": standard error, ...}, "n_validation": images}.

    Returns:
        1 where the metric is defined nowhere.

    Examples:
        >>> gammas, errors = {"0": 0.80, "0.6": 0.79, "1": 0.70}, {"0": 0.02, "0.6": 0.02, "1": 0.02}
        >>> gamma_within_error({"A": {"gammas": gammas, "errors": errors, "n_validation": 10}})
        0.6
    """
    metrics: dict[float, float] = {}
    errors: dict[float, float] = {}
    for text in dict.fromkeys(text for found in facts.values() for text in found["gammas"]):
        pairs = [(f["gammas"].get(text), f["errors"].get(text) or 0.0, f["n_validation"]) for _, f in sorted(facts.items())]
        known = [(metric, error, count) for metric, error, count in pairs if metric is not None and count > 0]
        total = sum(count for _, _, count in known)
        if total:
            metrics[float(text)] = sum(metric * count for metric, _, count in known) / total
            errors[float(text)] = math.sqrt(sum((error * count) ** 2 for _, error, count in known)) / total
    if not metrics:
        return 1.0
    best = max(metrics, key=lambda gamma: (metrics[gamma], gamma))
    return max(gamma for gamma, metric in metrics.items() if metric >= metrics[best] - errors[best])


def ensemble_output(outputs: Tensor, scores: Tensor) -> Tensor:
    """h = Σ_k ŷ_k h_k (Sec. 3.1.1): outputs (N, K+1, ...) weighted by scores (N, K+1), giving (N, ...).

    Args:
        outputs: what every model gives for every image.
        scores: the selector's, rows sum to 1.

    Examples:
        >>> ensemble_output(torch.tensor([[[0.0], [1.0]]]), torch.tensor([[0.25, 0.75]]))
        tensor([[0.7500]])
    """
    return (outputs * scores.reshape(*scores.shape, *[1] * (outputs.ndim - 2))).sum(dim=1)


def impossible_head_gradient(weight: Tensor, bias: Tensor, own: int) -> str | None:
    """Why no images of one site give the selector's last layer such a gradient, in words, or None.

    All images of site k have the label k (Eq. 2). Of the mean cross entropy over them that layer's gradient is

        E[(p - e_k) (φ, 1)ᵀ]

    with p the scores, which are shares, and φ the layer's input, which a ReLU has made non-negative. So no other site's row holds a
    number below 0, the rows add up to 0, and no bias moves by more than 1. Who turns it around, makes it longer than 1 or speaks for
    another site contradicts that; gradients of images that only look like another site's do not.

    Args:
        weight: gradient of the weights (K, F).
        bias: gradient of the bias (K,).
        own: k.

    Examples:
        >>> p, phi = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([1.0, 0.0])
        >>> bias = p - torch.tensor([0.0, 1.0, 0.0])
        >>> impossible_head_gradient(bias[:, None] * phi, bias, own=1)
        >>> impossible_head_gradient(bias[:, None] * phi, bias, own=2)
        "the selector's gradient asks for less of another site: it is not of images that are all this one's"
        >>> impossible_head_gradient(2 * bias[:, None] * phi, 2 * bias, own=1)
        "the selector's bias moves by 1.4, and no mean of shares by more than 1"
    """
    rows = torch.cat([weight, bias[:, None]], dim=1).double()
    slack = _ROUNDING * float(rows.abs().max())
    others = torch.cat([rows[:own], rows[own + 1 :]])
    if bool((others < -slack).any()):
        return "the selector's gradient asks for less of another site: it is not of images that are all this one's"
    if bool((rows.sum(dim=0).abs() > slack).any()):
        return "the rows of the selector's gradient do not add up to 0, as those of scores that are shares do"
    longest = float(bias.abs().max())
    return f"the selector's bias moves by {longest:.3g}, and no mean of shares by more than 1" if longest > 1 + _ROUNDING else None


def extra_labels(losses: Tensor) -> Tensor:
    """FedSM-extra's label of each image, argmin_k L(h_k, y) over the K + 1 models (Eq. 1): losses (N, K+1) -> (N,).

    Eq. 1 prints L(h, h_k), which cannot be meant: the super model's output h does not exist before its selector does. A loss that is not
    a number is none of the least; where no model has one, the label is 0, the global model.

    Args:
        losses: of every model on every image.

    Examples:
        >>> extra_labels(torch.tensor([[0.3, 0.1, 0.2], [0.0, 0.5, 0.5]]))
        tensor([1, 0])
    """
    return torch.where(losses.isnan(), torch.inf, losses).argmin(dim=1)


def apfl_mixture(personal: StateDict, global_: StateDict, share: float, kept: Collection[str] = ()) -> StateDict:
    """APFL's model v̄ = α v + (1 - α) w for floating entries; integer entries of v.

    α = 1 gives the local model, α = 0 the global one. Source: Deng et al. 2020, Sec. 3.

    Args:
        personal: v.
        global_: w, with every floating entry of v.
        share: α in [0, 1].
        kept: entries that are v̄'s own already, as running statistics that v̄ has collected.

    Examples:
        >>> apfl_mixture({"w": torch.tensor(4.0)}, {"w": torch.tensor(0.0)}, share=0.25)
        {'w': tensor(1.)}
    """
    return {
        name: share * tensor + (1 - share) * global_[name] if tensor.is_floating_point() and name not in kept else tensor.clone()
        for name, tensor in personal.items()
    }


def pfedme_outer(weights: Sequence[Tensor], personal: Sequence[Tensor], rate: float, strength: float) -> list[Tensor]:
    """w <- w - η λ (w - θ), pFedMe's step of a site's copy of the shared model (Dinh et al. 2020, Alg. 1, line 8).

    Args:
        weights: w.
        personal: θ, in the same order.
        rate: η.
        strength: λ.

    Examples:
        >>> pfedme_outer([torch.tensor(2.0)], [torch.tensor(0.0)], rate=0.1, strength=10.0)  # ηλ = 1: w becomes θ
        [tensor(0.)]
    """
    return [w - rate * strength * (w - t) for w, t in zip(weights, personal, strict=True)]


def adam_step(
    weights: StateDict, gradient: StateDict, moments: Mapping[str, StateDict], step: int, rate: float
) -> tuple[StateDict, dict[str, StateDict]]:
    """w - η m̂ / (√v̂ + ε) and the new moments: step number `step` (from 1) of Adam (Kingma and Ba 2015, Alg. 1), on named tensors.

    At the server, with the mean of the sites' gradients, this is full-batch Adam over the images of all sites: the one gradient
    that no site, which sees a single label, could follow alone. Entries without a gradient (buffers) stay as they are.

    Args:
        weights: w by name, buffers included.
        gradient: g by name of what is learnt.
        moments: "exp_avg" and "exp_avg_sq" -> name -> tensor.
        step: number of this step, from 1.
        rate: η.

    Returns:
        (w after the step, the new moments).

    Examples:
        >>> zeros = {"exp_avg": {"w": torch.tensor(0.0)}, "exp_avg_sq": {"w": torch.tensor(0.0)}}
        >>> adam_step({"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}, zeros, step=1, rate=0.5)[0]  # the first step is η long
        {'w': tensor(0.5000)}
    """
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8  # torch's defaults
    first = {name: torch.lerp(moments["exp_avg"][name], g, 1 - beta1) for name, g in gradient.items()}
    second = {name: torch.lerp(moments["exp_avg_sq"][name], g * g, 1 - beta2) for name, g in gradient.items()}
    moved = dict(weights)
    for name, mean in first.items():
        spread = (second[name] / (1 - beta2**step)).sqrt() + epsilon
        moved[name] = weights[name] - rate / (1 - beta1**step) * mean / spread
    return moved, {"exp_avg": first, "exp_avg_sq": second}

"""FedSM's mathematics (Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation", CVPR 2022).

Also the formulas of what its Table 6 and Sec. 3.1 compare: APFL, pFedMe, FedSM-extra and the ensemble.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from medflare.core.states import StateDict, check_same_shapes, iter_chunks

GAMMAS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # candidates
TEMPERATURES: Final = tuple(2 ** (exponent / 2) for exponent in range(-12, 9))  # candidates, 1/64 to 16
NEGLIGIBLE: Final = 0.01  # of the metric: a loss per site that the sites together may bear for the gain of one of them
UNLIKELY: Final = 1e-6  # smaller probabilities count as this one
_NEVER: Final = -1e4  # logit of a missing class


def soft_pull(states: Mapping[str, StateDict], lam: float) -> dict[str, StateDict]:
    """w_p,k <- λ w_p,k + (1 - λ) / (K - 1) Σ_{k' ≠ k} w_p,k'  (FedSM, Eq. 11).

    The mean over sites does not change and deviations from it shrink by (λK - 1)/(K - 1): λ = 1 changes nothing, λ = 1/K gives every
    site the uniform mean, λ < 1/K overshoots it. Accumulated in float64, sites in sorted order. Integer entries keep each site's own
    value. A single site keeps its model (the formula is undefined for K = 1).

    Args:
        states: site -> personal model; all with the same names and shapes.
        lam: λ in [0, 1].

    Raises:
        ValueError: λ outside [0, 1], or models of other names or shapes.
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam = {lam} is outside [0, 1]; the mean of the personal models is at 1 / K")
    check_same_shapes(states)
    sites = sorted(states)
    if len(sites) < 2:
        return {site: dict(state) for site, state in states.items()}
    pulled: dict[str, StateDict] = {site: {} for site in sites}
    for name in states[sites[0]]:
        for site, tensor in zip(sites, _pulled([states[site][name] for site in sites], lam), strict=True):
            pulled[site][name] = tensor
    return pulled


def _pulled(tensors: Sequence[Tensor], lam: float) -> list[Tensor]:
    """Eq. 11 for one entry of K models, computed in pieces, so that large models need no further memory."""
    if not tensors[0].is_floating_point():
        return [tensor.clone() for tensor in tensors]
    results = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    count = len(tensors)
    for parts in iter_chunks([*tensors, *results]):
        weights = [part.to(torch.float64) for part in parts[:count]]
        total = sum(weights, torch.zeros_like(weights[0]))
        for result, w in zip(parts[count:], weights, strict=True):
            result.copy_(lam * w + (1 - lam) / (count - 1) * (total - w))
    return results


def choose_model(probabilities: Tensor, gamma: float) -> Tensor:
    """The model of each image (FedSM, Sec. 3.1): 0 the global one, k + 1 the personal model of site k.

    The personal model of the most probable site is chosen if its probability exceeds γ (strictly), so γ = 1 always gives the
    global model and γ = 0 never does.

    Args:
        probabilities: (N, K) selector scores, rows sum to 1.
        gamma: γ in [0, 1].

    Examples:
        >>> scores = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
        >>> choose_model(scores, 0.6), choose_model(scores, 1.0)
        (tensor([1, 0, 2]), tensor([0, 0, 0]))
    """
    top, site = probabilities.max(dim=1)
    return torch.where(top > gamma, site + 1, torch.zeros_like(site))


def ensemble_output(outputs: Tensor, scores: Tensor) -> Tensor:
    """h = Σ_k ŷ_k h_k (Sec. 3.1.1): outputs (N, K + 1, ...) of all models weighted by scores (N, K + 1), giving (N, ...)."""
    return (outputs * scores.reshape(*scores.shape, *[1] * (outputs.ndim - 2))).sum(dim=1)


def extra_labels(losses: Tensor) -> Tensor:
    """FedSM-extra's label of each image, argmin_k L(h_k, y) over the K + 1 models (Eq. 1): losses (N, K + 1) -> (N,).

    Eq. 1 prints L(h, h_k), which cannot be meant: the super model's output h does not exist before its selector does. NaN losses are
    ignored; if all are NaN, the label is 0 (global model).
    """
    return torch.where(losses.isnan(), torch.inf, losses).argmin(dim=1)


# -- personalization (Table 6) -----------------------------------------------------------------------------------------------


def apfl_mixture(personal: StateDict, global_: StateDict, share: float, kept: Collection[str] = ()) -> StateDict:
    """APFL's model v̄ = α v + (1 - α) w for floating entries; integer entries of v (Deng et al. 2020, Sec. 3).

    Args:
        personal: v.
        global_: w, with every floating entry of v.
        share: α in [0, 1]; 1 gives the local model, 0 the global one.
        kept: entries that are v̄'s already, for example its running statistics.
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
    """
    return [w - rate * strength * (w - t) for w, t in zip(weights, personal, strict=True)]


# -- the selector ------------------------------------------------------------------------------------------------------------


def adam_step(
    weights: StateDict, gradient: StateDict, moments: Mapping[str, StateDict], step: int, rate: float
) -> tuple[StateDict, dict[str, StateDict]]:
    """w - η m̂ / (√v̂ + ε) and the new moments: step number `step` (from 1) of Adam (Kingma and Ba 2015, Alg. 1), on named tensors.

    At the server, with the mean of the sites' gradients, this is full-batch Adam over the images of all sites: the one gradient
    that no site, which sees a single label, could follow alone. Entries without a gradient (buffers) do not change.

    Args:
        weights: w by name, buffers included.
        gradient: g by name of what is learnt.
        moments: "exp_avg" and "exp_avg_sq" -> name -> tensor.
        step: from 1.
        rate: η.
    """
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8  # torch's defaults
    first = {name: torch.lerp(moments["exp_avg"][name], g, 1 - beta1) for name, g in gradient.items()}
    second = {name: torch.lerp(moments["exp_avg_sq"][name], g * g, 1 - beta2) for name, g in gradient.items()}
    stepped = dict(weights)
    for name, mean in first.items():
        spread = (second[name] / (1 - beta2**step)).sqrt() + epsilon
        stepped[name] = weights[name] - rate / (1 - beta1**step) * mean / spread
    return stepped, {"exp_avg": first, "exp_avg_sq": second}


def ridge_solution(statistics: Mapping[int, StateDict], classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights and biases of class-balanced ridge regression onto one-hot labels, where class k's images are those of one site.

        min_{W, b} mean_k E_k ||W φ + b - e_k||² + λ Σ_f s_f² ||W_f||²

    with s_f² the variance of feature f over all classes at equal weights, so features need no common scale (Hoerl and Kennard 1970, with
    every class at weight 1 / n_k).

    Args:
        statistics: class -> {"mean": E_k[φ], "products": E_k[φ φᵀ]}; a missing class is never predicted.
        classes: K.
        penalty: λ.

    Returns:
        W (K, F) and b (K,), float32. Predictions sum to one over the classes.

    Raises:
        ValueError: no class.
    """
    if not statistics:
        raise ValueError("ridge_solution needs statistics of at least one class")
    present = sorted(statistics)
    means = torch.stack([statistics[k]["mean"] for k in present])
    centre = means.mean(dim=0)
    spread = torch.stack([statistics[k]["products"] for k in present]).mean(dim=0) - torch.outer(centre, centre)
    scale = spread.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 1e-6 * scale.max().clamp_min(1e-12), scale, torch.inf)  # a constant feature gets no weight
    system = spread / torch.outer(scale, scale) + (penalty + 1e-9) * torch.eye(len(centre), dtype=torch.float64)
    weight, bias = torch.zeros(classes, len(centre), dtype=torch.float64), torch.full((classes,), _NEVER, dtype=torch.float64)
    weight[present] = torch.linalg.solve(system, ((means - centre) / len(present) / scale).T).T / scale
    bias[present] = 1 / len(present) - weight[present] @ centre
    return weight.float(), bias.float()


def patient_scores(scores: Tensor, patients: Sequence[str]) -> Tensor:
    """Scores (N, K) of every image, whose patients are given, replaced by their mean over the patient's images."""
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    groups = torch.tensor([numbers[patient] for patient in patients], dtype=torch.long, device=scores.device)
    totals = scores.new_zeros(len(numbers), scores.shape[1]).index_add_(0, groups, scores)
    return (totals / torch.bincount(groups, minlength=len(numbers))[:, None])[groups]


def calibration_losses(logits: Tensor, own: int, patients: Sequence[str] | None) -> list[float]:
    """Mean negative log-likelihood of a site's own label at each of `TEMPERATURES` (Guo et al. 2017, "On Calibration of Modern Neural
    Networks", Sec. 4.2).

    The target is (n + 1) / (n + K) for the own site and 1 / (n + K) for each other, Laplace's rule (as Platt 1999, Sec. 2.2, for two
    classes): n cases without an error do not show that errors are impossible, so no temperature goes to 0.

    Args:
        logits: of the selector (N, K).
        own: the site's label.
        patients: of every image, if the mean scores of a patient choose: a case is a patient; None: a case is an image.

    Returns:
        A loss for each temperature; empty without images.
    """
    if not len(logits):
        return []
    losses = []
    for temperature in TEMPERATURES:
        scores = (logits.double() / temperature).softmax(dim=1)
        if patients is not None:
            scores = patient_scores(scores, patients)[[patients.index(patient) for patient in dict.fromkeys(patients)]]
        cases, classes = scores.shape
        target = torch.full((classes,), 1 / (cases + classes), dtype=torch.float64)
        target[own] = (cases + 1) / (cases + classes)
        losses.append(float(-(scores.clamp_min(UNLIKELY).log() @ target).mean()))
    return losses


def fitted_temperature(losses: Mapping[str, Sequence[float]]) -> float:
    """The temperature of the smallest mean loss, sites (-> see `calibration_losses`) at equal weights; 1 without any losses.

    Examples:
        >>> at = lambda best: [abs(temperature - best) for temperature in TEMPERATURES]
        >>> fitted_temperature({"A": at(0.5), "B": at(0.5), "C": []}), fitted_temperature({})
        (0.5, 1.0)
    """
    complete = [list(values) for _, values in sorted(losses.items()) if len(values) == len(TEMPERATURES)]
    totals = [sum(column) for column in zip(*complete, strict=True)]
    return TEMPERATURES[totals.index(min(totals))] if totals else 1.0


def tempered(selector: StateDict, temperature: float) -> StateDict:
    """A selector whose logits are divided by the temperature T > 0, by way of its last, linear layer "head"."""
    return {name: tensor / temperature if name.startswith("head.") else tensor for name, tensor in selector.items()}


# -- γ -----------------------------------------------------------------------------------------------------------------------


def paired_gain(values: Tensor, reference: Tensor) -> float | None:
    """The mean of values - reference, metrics of the same patients (P,), over those that have both (NaN: undefined); None without any."""
    difference = (values - reference).nanmean().item()
    return None if math.isnan(difference) else difference


def limited_total(differences: Sequence[float]) -> float:
    """Σ_k d_k over the sites, of the gains by one candidate less those by another, limited so that no single site outvotes the others.

    With three or more sites, each d_k is limited to ± (max_{j ≠ k} |d_j| + (K - 1) · 0.01). Let m be the largest |d| of the others:

    - One site gains, the others differ by up to 0.01 each: it wins, since m + (K - 1) 0.01 > (K - 1) m for m <= 0.01.
    - One site reports anything, all others have d_j >= 0.02: it loses for K >= 4, since their sum is at least m + (K - 2) 0.02. For K = 3
      the others need more than 0.02.
    - Otherwise a false report decides only if the others together differ by no more than m + (K - 1) 0.01.

    With two sites there is no majority, so nothing is limited.

    Examples:
        >>> round(limited_total([0.3, 0.0, 0.0, 0.0]), 6), round(limited_total([0.3, -0.005, -0.005, -0.005]), 6)
        (0.03, 0.02)
        >>> round(limited_total([-1.0, 0.02, 0.02, 0.02]), 6), limited_total([0.25, -0.125]), limited_total([])
        (0.01, 0.125, 0)
    """
    count = len(differences)
    if count < 3:
        return sum(differences)
    *_, second, largest = sorted(map(abs, differences))
    limits = [(second if abs(value) == largest else largest) + (count - 1) * NEGLIGIBLE for value in differences]
    return sum(math.copysign(min(abs(value), limit), value) for value, limit in zip(differences, limits, strict=True))


def tuned_gamma(gains: Mapping[str, Mapping[str, float | None]]) -> float:
    """The γ that the sites' validation images prefer: the candidate whose worst comparison with another, by `limited_total`, is best.

    Ties go to the smallest γ; to 1 if 1 is among them and 0 is not, because then personal models lose on validation images.

    Args:
        gains: site -> γ as text -> mean paired gain over γ = 1 on the same patients; None if undefined.

    Returns:
        One of `GAMMAS`; 1, the global model, without any gains.
    """
    names = {gamma: f"{gamma:g}" for gamma in GAMMAS}
    sites = [by_gamma for _, by_gamma in sorted(gains.items())]

    def total(gamma: float, other: float) -> float:
        pairs = ((by_gamma.get(names[gamma]), by_gamma.get(names[other])) for by_gamma in sites)
        return limited_total([gain - reference for gain, reference in pairs if gain is not None and reference is not None])

    measured = [gamma for gamma in GAMMAS if any(by_gamma.get(names[gamma]) is not None for by_gamma in sites)]
    worst = {gamma: round(min(total(gamma, other) for other in measured), 9) for gamma in measured}
    best = [gamma for gamma in measured if worst[gamma] == max(worst.values())]
    return 1.0 if not best or (1.0 in best and 0.0 not in best) else best[0]

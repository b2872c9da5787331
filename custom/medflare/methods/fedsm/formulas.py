"""FedSM's mathematics: the super model, SoftPull, and its selector.

Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation",
CVPR 2022. Also the formulas of what its Sec. 3.1 compares: FedSM-extra and the ensemble.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from medflare.core.states import StateDict, States, check_same_shapes, iter_chunks
from medflare.methods.families.second_models.apfl import apfl_mixture as apfl_mixture
from medflare.methods.families.second_models.pfedme import pfedme_outer as pfedme_outer

# Candidates of γ, and of the temperature: 1/64 to 16.
GAMMAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
TEMPERATURES = tuple(2 ** (exponent / 2) for exponent in range(-12, 9))
# Of the metric: a loss per site that the sites together may bear for the gain of one of them.
NEGLIGIBLE = 0.01
UNLIKELY = 1e-6  # smaller probabilities count as this one
_NEVER = -1e4  # logit of a missing class


def soft_pull(states: States, lam: float) -> dict[str, StateDict]:
    """w_p,k <- λ w_p,k + (1 - λ) / (K - 1) Σ_{k' ≠ k} w_p,k'  (FedSM, Eq. 11).

    The mean over sites does not change and deviations from it shrink by (λK - 1)/(K - 1): λ = 1
    changes nothing, λ = 1/K gives every site the uniform mean, λ < 1/K overshoots it. Accumulated
    in float64, sites in sorted order. Integer entries keep each site's own value. A single site
    keeps its model (the formula is undefined for K = 1).

    Args:
        states: site -> personal model; all with the same names and shapes.
        lam: λ in [0, 1].

    Raises:
        ValueError: models of other names or shapes.
    """
    check_same_shapes(states)
    sites = sorted(states)
    if len(sites) < 2:
        return {site: dict(state) for site, state in states.items()}
    pulled: dict[str, StateDict] = {site: {} for site in sites}
    for name in states[sites[0]]:
        tensors = _pulled([states[site][name] for site in sites], lam)
        for site, tensor in zip(sites, tensors, strict=True):
            pulled[site][name] = tensor
    return pulled


def _pulled(tensors: Sequence[Tensor], lam: float) -> list[Tensor]:
    """Eq. 11 for one entry of K models, in pieces: large models need no further memory."""
    if not tensors[0].is_floating_point():
        return [tensor.clone() for tensor in tensors]
    results = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    count = len(tensors)
    for parts in iter_chunks([*tensors, *results]):
        weights = [part.double() for part in parts[:count]]
        total = sum(weights, torch.zeros_like(weights[0]))
        for result, w in zip(parts[count:], weights, strict=True):
            result.copy_(lam * w + (1 - lam) / (count - 1) * (total - w))  # Eq. 11
    return results


def choose_model(probabilities: Tensor, gamma: float) -> Tensor:
    """The model of each image: 0 the global one, k + 1 the personal model of site k.

    The personal model of the most probable site is chosen if its probability exceeds γ (strictly),
    so γ = 1 always gives the global model and γ = 0 never does (FedSM, Sec. 3.1).

    Args:
        probabilities: (N, K) selector scores, rows sum to 1.
        gamma: γ in [0, 1].

    Examples:
        >>> scores = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
        >>> choose_model(scores, 0.6), choose_model(scores, 1.0)
        (tensor([1, 0, 2]), tensor([0, 0, 0]))
    """
    top, site = probabilities.max(dim=1)
    return torch.where(top > gamma, site + 1, 0)


def ensemble_output(outputs: Tensor, scores: Tensor) -> Tensor:
    """h = Σ_k ŷ_k h_k (Sec. 3.1.1): all models' outputs, weighted by the selector's scores.

    Args:
        outputs: (N, K + 1, ...) h_k.
        scores: (N, K + 1) ŷ_k.

    Returns:
        (N, ...).
    """
    further = [1] * (outputs.ndim - 2)
    return (outputs * scores.reshape(*scores.shape, *further)).sum(dim=1)


def extra_labels(losses: Tensor) -> Tensor:
    """FedSM-extra's label of each image, argmin_k L(h_k, y) over the K + 1 models (Eq. 1).

    Eq. 1 prints L(h, h_k), which cannot be meant: the super model's output h does not exist before
    its selector does. NaN losses are ignored; if all are NaN, the label is 0 (global model).

    Args:
        losses: (N, K + 1).

    Returns:
        (N,).
    """
    return torch.where(losses.isnan(), torch.inf, losses).argmin(dim=1)


# -- the selector ---------------------------------------------------------------------------------


def adam_step(
    weights: StateDict, gradient: StateDict, moments: States, step: int, rate: float
) -> tuple[StateDict, dict[str, StateDict]]:
    """w - η m̂ / (√v̂ + ε) and the new moments: a step of Adam on named tensors.

    Kingma and Ba 2015, Alg. 1. At the server, with the mean of the sites' gradients, this is
    full-batch Adam over the images of all sites: the one gradient that no site, which sees a single
    label, could follow alone. Entries without a gradient (buffers) do not change.

    Args:
        weights: w by name, buffers included.
        gradient: g by name of what is learnt.
        moments: "exp_avg" and "exp_avg_sq" -> name -> tensor.
        step: from 1.
        rate: η.
    """
    # torch's defaults
    beta1 = 0.9
    beta2 = 0.999
    epsilon = 1e-8
    first = {}
    second = {}
    stepped = dict(weights)
    for name, g in gradient.items():
        first[name] = torch.lerp(moments["exp_avg"][name], g, 1 - beta1)
        second[name] = torch.lerp(moments["exp_avg_sq"][name], g * g, 1 - beta2)
        spread = (second[name] / (1 - beta2**step)).sqrt() + epsilon
        stepped[name] = weights[name] - rate / (1 - beta1**step) * first[name] / spread
    return stepped, {"exp_avg": first, "exp_avg_sq": second}


def ridge_solution(
    statistics: Mapping[int, StateDict], classes: int, penalty: float
) -> tuple[Tensor, Tensor]:
    """Weights and biases of class-balanced ridge regression onto one-hot labels.

    Class k's images are those of one site:

        min_{W, b} mean_k E_k ||W φ + b - e_k||² + λ Σ_f s_f² ||W_f||²

    with s_f² the variance of feature f over all classes at equal weights, so features need no
    common scale (Hoerl and Kennard 1970, with every class at weight 1 / n_k).

    Args:
        statistics: class -> {"mean": E_k[φ], "products": E_k[φ φᵀ]}; a missing class is never
            predicted.
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
    products = torch.stack([statistics[k]["products"] for k in present]).mean(dim=0)
    covariance = products - torch.outer(centre, centre)
    scale = covariance.diagonal().clamp_min(0).sqrt()
    varies = scale > 1e-6 * scale.max().clamp_min(1e-12)
    scale = torch.where(varies, scale, torch.inf)  # a constant feature gets no weight
    identity = torch.eye(len(centre), dtype=torch.float64)
    system = covariance / torch.outer(scale, scale) + (penalty + 1e-9) * identity
    right_side = (means - centre) / len(present) / scale
    weight = torch.zeros(classes, len(centre), dtype=torch.float64)
    bias = torch.full((classes,), _NEVER, dtype=torch.float64)
    weight[present] = torch.linalg.solve(system, right_side.T).T / scale
    bias[present] = 1 / len(present) - weight[present] @ centre
    return weight.float(), bias.float()


def patient_scores(scores: Tensor, patients: Sequence[str]) -> Tensor:
    """Scores (N, K) of every image, replaced by their mean over its patient's images."""
    names, of_images = np.unique(list(patients), return_inverse=True)
    groups = torch.as_tensor(of_images, device=scores.device)
    totals = scores.new_zeros(len(names), scores.shape[1]).index_add_(0, groups, scores)
    counts = torch.bincount(groups, minlength=len(names))
    return (totals / counts[:, None])[groups]


def calibration_losses(logits: Tensor, own: int, patients: Sequence[str] | None) -> list[float]:
    """Mean negative log-likelihood of a site's own label at each of `TEMPERATURES`.

    Guo et al. 2017, "On Calibration of Modern Neural Networks", Sec. 4.2. The target is
    (n + 1) / (n + K) for the own site and 1 / (n + K) for each other, Laplace's rule (as Platt
    1999, Sec. 2.2, for two classes): n cases without an error do not show that errors are
    impossible, so no temperature goes to 0.

    Args:
        logits: of the selector (N, K), N > 0.
        own: the site's label.
        patients: of every image, if the mean scores of a patient choose: a case is a patient; None:
            a case is an image.

    Returns:
        A loss for each temperature.
    """
    losses = []
    for temperature in TEMPERATURES:
        scores = (logits.double() / temperature).softmax(dim=1)
        if patients is not None:
            first_images = [patients.index(patient) for patient in dict.fromkeys(patients)]
            scores = patient_scores(scores, patients)[first_images]
        cases, classes = scores.shape
        target = torch.full((classes,), 1 / (cases + classes), dtype=torch.float64)
        target[own] = (cases + 1) / (cases + classes)
        likelihoods = scores.clamp_min(UNLIKELY).log() @ target
        losses.append(float(-likelihoods.mean()))
    return losses


def fitted_temperature(losses: Mapping[str, Sequence[float]]) -> float:
    """The temperature of the smallest mean loss, sites at equal weights; 1 without any losses.

    Args:
        losses: site -> see `calibration_losses`.

    Examples:
        >>> at = lambda best: [abs(temperature - best) for temperature in TEMPERATURES]
        >>> fitted_temperature({"A": at(0.5), "B": at(0.5), "C": []}), fitted_temperature({})
        (0.5, 1.0)
    """
    ordered = [losses[site] for site in sorted(losses)]
    complete = [of_site for of_site in ordered if len(of_site) == len(TEMPERATURES)]
    if not complete:
        return 1.0
    totals = [sum(column) for column in zip(*complete, strict=True)]
    return TEMPERATURES[totals.index(min(totals))]


def tempered(selector: StateDict, temperature: float) -> StateDict:
    """A selector whose logits are divided by T > 0, by way of its last, linear layer "head"."""
    divided = dict(selector)
    for name, tensor in selector.items():
        if name.startswith("head."):
            divided[name] = tensor / temperature
    return divided


# -- γ --------------------------------------------------------------------------------------------


def paired_gain(values: Tensor, reference: Tensor) -> float | None:
    """The mean of values - reference, metrics of the same patients (P,), over those that have both
    (NaN: undefined); None without any.
    """
    difference = (values - reference).nanmean().item()
    return None if math.isnan(difference) else difference


def limited_total(differences: Sequence[float]) -> float:
    """Σ_k d_k over the sites, limited so that no single site outvotes the others.

    d_k is the gain by one candidate less that by another. With three or more sites, each d_k is
    limited to ± (max_{j ≠ k} |d_j| + (K - 1) · 0.01). Let m be the largest |d| of the others:

    - One site gains, the others differ by up to 0.01 each: it wins, since for m <= 0.01
      m + (K - 1) 0.01 > (K - 1) m.
    - One site reports anything, all others have d_j >= 0.02: it loses for K >= 4, since their sum
      is at least m + (K - 2) 0.02. For K = 3 the others need more than 0.02.
    - Otherwise a false report decides only if the others together differ by no more than
      m + (K - 1) 0.01.

    With two sites there is no majority, so nothing is limited.

    Examples:
        >>> round(limited_total([0.3, 0.0, 0.0, 0.0]), 6)
        0.03
        >>> round(limited_total([0.3, -0.005, -0.005, -0.005]), 6)
        0.02
        >>> round(limited_total([-1.0, 0.02, 0.02, 0.02]), 6)
        0.01
        >>> limited_total([0.25, -0.125]), limited_total([])
        (0.125, 0)
    """
    count = len(differences)
    if count < 3:
        return sum(differences)
    *_, second, largest = sorted(map(abs, differences))
    limited = []
    for value in differences:
        largest_of_others = second if abs(value) == largest else largest
        limit = largest_of_others + (count - 1) * NEGLIGIBLE
        limited.append(math.copysign(min(abs(value), limit), value))
    return sum(limited)


def tuned_gamma(gains: Mapping[str, Mapping[str, float | None]]) -> float:
    """The γ that the sites' validation images prefer.

    It is the candidate whose worst comparison with another, by `limited_total`, is best. Ties go to
    the smallest γ; to 1 if 1 is among them and 0 is not, because then personal models lose on
    validation images.

    Args:
        gains: site -> γ as text -> mean paired gain over γ = 1 on the same patients; None if
            undefined.

    Returns:
        One of `GAMMAS`; 1, the global model, without any gains.
    """
    measured = []
    for gamma in GAMMAS:
        if any(by_gamma.get(f"{gamma:g}") is not None for by_gamma in gains.values()):
            measured.append(gamma)
    worst = {}
    for gamma in measured:
        totals = [limited_total(_differences(gains, gamma, other)) for other in measured]
        worst[gamma] = round(min(totals), 9)
    highest = max(worst.values(), default=None)
    best = [gamma for gamma, total in worst.items() if total == highest]
    if not best or (1.0 in best and 0.0 not in best):
        return 1.0
    return best[0]


def _differences(
    gains: Mapping[str, Mapping[str, float | None]], gamma: float, other: float
) -> list[float]:
    """The gains by γ less those by another γ, of the sites that have both."""
    differences = []
    for _, by_gamma in sorted(gains.items()):
        gain = by_gamma.get(f"{gamma:g}")
        reference = by_gamma.get(f"{other:g}")
        if gain is not None and reference is not None:
            differences.append(gain - reference)
    return differences

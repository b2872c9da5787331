"""FedSM's mathematics (Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation", CVPR 2022).

Also the formulas of what its Table 6 and Sec. 3.1 compare: APFL, pFedMe, FedSM-extra and the ensemble.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from medflare.core.states import StateDict, allocate, check_same_shapes, iter_chunks

GAMMAS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # candidates
TEMPERATURES: Final = tuple(2 ** (place / 2) for place in range(-12, 9))  # candidates, 1/64 to 16
NEGLIGIBLE: Final = 0.01  # of the metric: a loss per site that the sites together may bear for the gain of one of them
UNLIKELY: Final = 1e-6  # least probability that is told apart from 0
_NEVER: Final = -1e4  # logit of a class that is missing


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
    check_same_shapes(states)
    count = len(states)
    if count < 2:
        return {site: dict(state) for site, state in states.items()}

    def pulled(own: list[Tensor]) -> list[Tensor]:
        total = sum(own, torch.zeros_like(own[0]))
        return [lam * w + (1 - lam) / (count - 1) * (total - w) for w in own]

    return _elementwise(states, pulled)


def _elementwise(states: Mapping[str, StateDict], formula: Callable[[list[Tensor]], list[Tensor]]) -> dict[str, StateDict]:
    """A formula of all sites' floating entries, in float64 and in chunks, so that large models need no copies of themselves.

    Args:
        states: site -> state; of other entries each site keeps its own.
        formula: parts of one entry, in sorted order of the sites -> what becomes of them.
    """
    sites = sorted(states)
    found: dict[str, StateDict] = {site: {} for site in sites}
    for name, first in states[sites[0]].items():
        own = [states[site][name] for site in sites]
        new = [allocate(t.shape, t.dtype) for t in own] if first.is_floating_point() else [t.clone() for t in own]
        for parts in iter_chunks([*own, *new]) if first.is_floating_point() else ():
            for part, value in zip(parts[len(own) :], formula([part.to(torch.float64) for part in parts[: len(own)]]), strict=True):
                part.copy_(value)
        for site, tensor in zip(sites, new, strict=True):
            found[site][name] = tensor
    return found


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


def limited_total(differences: Sequence[float]) -> float:
    """Σ_k d_k, what the sites gain together by one candidate over another, where no single site decides against the others.

    Of three sites or more, each d_k is cut off at ± (max_{j ≠ k} |d_j| + (K - 1) · 0.01): a site counts for at most the largest
    difference of another site and 0.01 of the metric for each of the others. Then, with D the honest sites' sum and m their largest |d|:

    - One site gains more than the others lose together, and these differ by at most 0.01 each: it wins, since m + (K - 1) 0.01 > (K - 1) m
      for m <= 0.01.
    - One site lies, all others have d_j >= 0.02: it loses from K = 4 on, since D >= m + (K - 2) 0.02 > m + (K - 1) 0.01. For K = 3 the
      others need more than 0.02.
    - A liar turns a comparison only where D <= m + (K - 1) 0.01: the others lose together no more than the stake of one of them and 0.01
      a site.

    Of two sites no one can say which is wrong, so nothing is cut off.

    Args:
        differences: d_k of every site, gain by the one candidate less gain by the other.

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
    """The γ that the sites' validation images prefer.

    Two candidates are compared by `limited_total` of the sites' gains, every site at equal weight. Validator is the candidate whose worst
    comparison is best: it beats all others where one does (without a limit that is binding, the largest mean gain). Ties go to the
    smallest; where 1 is among them and 0 is not, to 1: personal models lose on validation images, so that they get no others either.

    Args:
        gains: site -> γ as text -> mean paired gain over γ = 1 on the same patients; None where it is undefined.

    Returns:
        One of `GAMMAS`; 1, the global model, where no site has measured anything.

    Examples:
        >>> gains = lambda personal: {f"{gamma:g}": 0.0 if gamma == 1 else personal for gamma in GAMMAS}
        >>> tuned_gamma({"A": gains(0.3), "B": gains(0.0), "C": gains(0.0), "D": gains(0.0)}), tuned_gamma({"A": gains(-0.1)})
        (0.0, 1.0)
        >>> tuned_gamma({"A": gains(0.0)}), tuned_gamma({})
        (0.0, 1.0)
    """
    names = {gamma: f"{gamma:g}" for gamma in GAMMAS}
    votes = [known for _, known in sorted(gains.items())]

    def total(gamma: float, other: float) -> float:
        pairs = ((known.get(names[gamma]), known.get(names[other])) for known in votes)
        return limited_total([one - two for one, two in pairs if one is not None and two is not None])

    voted = [gamma for gamma in GAMMAS if any(known.get(names[gamma]) is not None for known in votes)]
    worst = {gamma: round(min(total(gamma, other) for other in voted), 9) for gamma in voted}
    ties = [gamma for gamma in voted if worst[gamma] == max(worst.values())]
    return 1.0 if not ties or (1.0 in ties and 0.0 not in ties) else ties[0]


def paired_gain(values: Tensor, reference: Tensor) -> float | None:
    """The mean of values - reference over the patients who have both; None without any.

    Args:
        values: metric of every patient (P,), NaN where it is undefined.
        reference: the same patients' under what it is compared with (P,).

    Examples:
        >>> paired_gain(torch.tensor([0.75, torch.nan, 1.0]), torch.tensor([0.5, 0.5, torch.nan]))
        0.25
        >>> paired_gain(torch.tensor([torch.nan]), torch.tensor([0.5]))
    """
    difference = (values - reference).nanmean().item()
    return None if math.isnan(difference) else difference


def calibration_losses(logits: Tensor, own: int, patients: Sequence[str] | None) -> list[float]:
    """Mean negative log-likelihood of a site's own label at each of `TEMPERATURES` (Guo et al. 2017, "On Calibration of Modern Neural
    Networks", Sec. 4.2).

    The target is (n + 1) / (n + K) for the own site and 1 / (n + K) for each other, Laplace's rule (as Platt 1999, Sec. 2.2, for two
    classes): from n cases without an error nobody can say that there is none, so that no temperature goes to 0.

    Args:
        logits: of the selector (N, K).
        own: the site's label.
        patients: of every image, where a patient's mean scores choose: one case each; None: every image is a case.

    Returns:
        A loss for each temperature; nothing without images.

    Examples:
        >>> losses = calibration_losses(torch.tensor([[2.0, 0.0]] * 8), 0, None)  # always right: 9 to 1
        >>> round(TEMPERATURES[losses.index(min(losses))], 3)  # the nearest to 2 / log 9
        1.0
        >>> calibration_losses(torch.zeros(0, 2), 0, None)
        []
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
    """The temperature of least mean loss, every site at equal weight; 1 where no site has a loss.

    Args:
        losses: site -> see `calibration_losses`; a site with another number of losses is left out.

    Examples:
        >>> at = lambda best: [abs(temperature - best) for temperature in TEMPERATURES]
        >>> fitted_temperature({"A": at(0.5), "B": at(0.5), "C": []}), fitted_temperature({})
        (0.5, 1.0)
    """
    known = [list(values) for _, values in sorted(losses.items()) if len(values) == len(TEMPERATURES)]
    totals = [sum(column) for column in zip(*known, strict=True)]
    return TEMPERATURES[totals.index(min(totals))] if totals else 1.0


def tempered(selector: StateDict, temperature: float) -> StateDict:
    """A selector whose logits are divided by the temperature, which its last layer takes up: nobody who uses it needs to know.

    Args:
        selector: its weights; those of its last layer, which is linear, are named "head...".
        temperature: T > 0.

    Examples:
        >>> tempered({"body": torch.tensor(1.0), "head.weight": torch.tensor(1.0)}, 0.5)
        {'body': tensor(1.), 'head.weight': tensor(2.)}
    """
    return {name: tensor / temperature if name.startswith("head.") else tensor for name, tensor in selector.items()}


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


def ridge_solution(statistics: Mapping[int, StateDict], classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights and biases of class-balanced ridge regression onto one-hot labels, where class k's images are those of one site.

        min_{W, b} mean_k E_k ||W φ + b - e_k||² + λ Σ_f s_f² ||W_f||²

    with s_f² the variance of feature f over all classes, each counted alike; so features need no common scale. Source: Hoerl and Kennard
    1970, with every class at weight 1 / n_k.

    Args:
        statistics: class -> {"mean": E_k[φ], "products": E_k[φ φᵀ]}; a class that is missing is never predicted.
        classes: K.
        penalty: λ.

    Returns:
        W (K, F) and b (K,), float32. Predictions of the classes that are there add up to one; they become scores by a temperature.

    Examples:
        >>> at = lambda value: {"mean": torch.tensor([value]).double(), "products": torch.tensor([[value**2]]).double()}
        >>> weight, bias = ridge_solution({0: at(0.0), 1: at(2.0)}, classes=2, penalty=0.0)
        >>> weight.round(decimals=3), bias.round(decimals=3)  # 1 - φ / 2 and φ / 2
        (tensor([[-0.5000],
                [ 0.5000]]), tensor([1., 0.]))
    """
    present = sorted(statistics)
    means = torch.stack([statistics[k]["mean"] for k in present])
    centre = means.mean(dim=0)
    spread = torch.stack([statistics[k]["products"] for k in present]).mean(dim=0) - torch.outer(centre, centre)
    scale = spread.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 1e-6 * scale.max().clamp_min(1e-12), scale, torch.inf)  # a constant feature tells nothing
    system = spread / torch.outer(scale, scale) + (penalty + 1e-9) * torch.eye(len(centre), dtype=torch.float64)
    weight, bias = torch.zeros(classes, len(centre), dtype=torch.float64), torch.full((classes,), _NEVER, dtype=torch.float64)
    weight[present] = torch.linalg.solve(system, ((means - centre) / len(present) / scale).T).T / scale
    bias[present] = 1 / len(present) - weight[present] @ centre
    return weight.float(), bias.float()

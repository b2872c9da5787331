"""The formulas of FedDAG (Che et al., "FedDAG: Federated Domain Adversarial Generation", arXiv 2501.13967) as pure functions.

The text of the paper that can be had names its equations but has lost their typesetting, and no code is public. What the
words leave open is a reading; each function says which one it takes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.core.states import StateDict, weighted_mean
from medflare.methods.parts.tensors import refuse_shapes, widened


def instance_discrepancy(f: Tensor, f_hat: Tensor) -> Tensor:
    """1/2 ||f/||f|| - f^/||f^||||^2 = 1 - cos(f, f^) of every pair of rows: (N, D), (N, D) -> (N,), between 0 and 2.

    Examples:
        >>> instance_discrepancy(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
        tensor([0.])
        >>> instance_discrepancy(torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]]))
        tensor([2.])
    """
    refuse_shapes(f=f, f_hat=f_hat)
    gap = F.normalize(widened(f), dim=1) - F.normalize(widened(f_hat), dim=1)  # of half precision 0 / 0, and norms beyond its range
    return (gap.square().sum(dim=1) / 2).to(torch.result_type(f, f_hat))


def discrepancy(f: Tensor, f_hat: Tensor, m: float, level: str = "instance") -> Tensor:
    """L_dis (Eq. 1): how far the features of generated images are from those of the originals, capped at m.

    Read as mean_i min(1/2 ||f_i/||f_i|| - f^_i/||f^_i||||^2, m): the cap works on each image, so that an image that is
    already different enough stops pulling at the generator while its neighbours still do. Without the 1/2 the same m is
    simply twice as large.

    Args:
        m: cap; 0 switches the loss off, 2 or more leaves it uncapped.
        level: "instance" caps each image, "batch" caps the mean over the batch.

    Returns:
        A scalar between 0 and min(m, 2).

    Examples:
        >>> f, f_hat = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> discrepancy(f, f_hat, m=0.5), discrepancy(f, f_hat, m=0.5, level="batch")
        (tensor(0.2500), tensor(0.5000))
    """
    each = instance_discrepancy(f, f_hat)
    if level == "instance":
        return each.clamp(max=m).mean()
    if level == "batch":
        return each.mean().clamp(max=m)
    raise ValueError(f"level must be 'instance' or 'batch', got {level!r}")


def similarity_loss(f: Tensor, f_hat: Tensor) -> Tensor:
    """L_sim (Eq. 4): the discrepancy without a cap, which the student minimises; (N, D), (N, D) -> scalar.

    Examples:
        >>> similarity_loss(torch.eye(2), torch.eye(2)), similarity_loss(torch.eye(2), torch.eye(2).flip(0))
        (tensor(0.), tensor(1.))
    """
    return instance_discrepancy(f, f_hat).mean()


@torch.no_grad()
def ema_update(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor], decay: float) -> None:
    """teacher <- decay * teacher + (1 - decay) * student, in place (Sec. III-B3, after Tarvainen and Valpola, 2017).

    Buffers such as BatchNorm's running statistics follow in the same way; integer entries are copied.

    Args:
        teacher: name -> tensor, changed in place.
        student: name -> tensor; every name of the teacher.
        decay: 1 leaves the teacher alone, 0 makes it the student.

    Examples:
        >>> teacher = {"w": torch.tensor(0.0)}
        >>> ema_update(teacher, {"w": torch.tensor(4.0)}, decay=0.75)
        >>> teacher
        {'w': tensor(1.)}
    """
    for name, tensor in teacher.items():
        if tensor.is_floating_point():
            tensor.lerp_(student[name].to(tensor.dtype), 1 - decay)
        else:
            tensor.copy_(student[name])


def ema_decay(step: int, decay: float, ramp: bool = False) -> float:
    """The decay of EMA step `step` (0-based); with `ramp` it grows as 1 - 1/(step + 1) until it reaches `decay`.

    Args:
        step: 0-based.
        decay: the constant, or what the ramp ends at.
        ramp: begin with the student itself (decay 0).

    Examples:
        >>> [ema_decay(step, 0.7, ramp=True) for step in (0, 1, 9)]
        [0.0, 0.5, 0.7]
    """
    return min(1 - 1 / (step + 1), decay) if ramp else decay


def round_decay(batches: int) -> float:
    """The teacher's decay by the round's length, exp(-1 / (0.2 B)), at most 0.99: its memory is a fifth of a round of B batches.

    Of the teacher that a round begins with, exp(-5) = 0.7 % is left in the teacher that a site sends, however short the round is; a fixed
    0.9 leaves 35 % after ten batches. From B = 498 on the decay is 0.99.

    Examples:
        >>> [round(round_decay(batches), 4) for batches in (1, 10, 50, 1000)]
        [0.0067, 0.6065, 0.9048, 0.99]
    """
    if batches < 1:
        raise ValueError(f"a round has at least one batch, got {batches}")
    return min(math.exp(-1 / (0.2 * batches)), 0.99)


@overload
def sharpness_perturbation(gradients: Mapping[str, Tensor], rho: float) -> StateDict: ...
@overload
def sharpness_perturbation(gradients: Tensor, rho: float) -> Tensor: ...
@overload
def sharpness_perturbation(gradients: Sequence[Tensor], rho: float) -> list[Tensor]: ...
def sharpness_perturbation(gradients: Mapping[str, Tensor] | Sequence[Tensor] | Tensor, rho: float) -> StateDict | list[Tensor] | Tensor:
    """epsilon = rho g / ||g||_2 with one norm over all gradients together (Sec. III-C1, after Foret et al., ICLR 2021).

    Args:
        gradients: of the task loss, by parameter name, in a sequence, or one tensor.
        rho: length of the perturbation, in the units of the parameters.

    Returns:
        epsilon in the form of `gradients`; zeros where all gradients vanish, for then no direction is the steepest.

    Raises:
        ValueError: a length below 0.

    Examples:
        >>> sharpness_perturbation({"w": torch.tensor([3.0, 4.0])}, rho=0.5), sharpness_perturbation(torch.zeros(1), rho=0.5)
        ({'w': tensor([0.3000, 0.4000])}, tensor([0.]))
    """
    if not rho >= 0:
        raise ValueError(f"rho must be a length, 0 or more, got {rho}")
    if isinstance(gradients, Tensor):
        return sharpness_perturbation([gradients], rho)[0]
    if not isinstance(gradients, Mapping):
        named = sharpness_perturbation({str(i): gradient for i, gradient in enumerate(gradients)}, rho)
        return list(named.values())
    norm = math.sqrt(sum(float(gradient.to(torch.float64).square().sum()) for gradient in gradients.values()))
    scale = rho / norm if norm > 0 else 0.0
    return {name: gradient.detach() * scale for name, gradient in gradients.items()}


def generalization_scores(metrics: Tensor, n_validation: Tensor | None = None) -> Tensor:
    """s_i (Eq. 5): the mean of what the other sites measure for site i's perturbed model, never site i itself.

    Args:
        metrics: (K, K), row = model, column = evaluating site, in [0, 1], higher is better; NaN where a site was not asked
            or its metric is undefined. The diagonal is not read.
        n_validation: (K,) validation images of the sites to weight by; None for the plain mean (the paper's words).

    Returns:
        (K,) float64; NaN for a model that nobody could score (a federation of one site, for example).

    Examples:
        >>> generalization_scores(torch.tensor([[0.9, 0.5], [0.75, 0.9]]))
        tensor([0.5000, 0.7500], dtype=torch.float64)
    """
    metrics = metrics.to(torch.float64)
    weights = torch.ones(len(metrics), dtype=torch.float64) if n_validation is None else n_validation.to(torch.float64)
    asked = ~metrics.isnan() & ~torch.eye(len(metrics), dtype=torch.bool)
    return (metrics.nan_to_num() * weights * asked).sum(dim=1) / (weights * asked).sum(dim=1)


def centred_scores(metrics: Tensor, n_validation: Tensor | None = None) -> Tensor:
    """s_i (Eq. 5) with the evaluators' own levels taken out: a_ij = s_i + v_j, by least squares.

    In the plain mean over the other sites, a site whose images are easy raises the score of every model but its own, so weights follow
    who was left out. Here the models that one evaluator scored are compared with each other alone. Of models that no chain of common
    evaluators joins (two sites score one model each) nothing can be told apart: their groups get equal means.

    Returns:
        (K,) float64 in [0, 1], with the mean of all metrics as their mean, unless the range cuts them; NaN for a model that nobody could
        score.

    Examples:
        >>> centred_scores(torch.tensor([[0.0, 0.25, 0.5], [0.75, 0.0, 0.5], [0.75, 0.25, 0.0]]))  # evaluators answer constants
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
    """
    metrics = metrics.to(torch.float64)
    weights = torch.ones(len(metrics), dtype=torch.float64) if n_validation is None else n_validation.to(torch.float64)
    asked = (~metrics.isnan() & ~torch.eye(len(metrics), dtype=torch.bool)) & (weights > 0)
    counts = asked.sum(dim=0).clamp(min=1)  # models of each evaluator
    values = metrics.nan_to_num() * asked
    centred = (values - values.sum(dim=0) / counts) * asked
    shared = asked.to(torch.float64)
    normal = torch.diag((shared * weights).sum(dim=1)) - (shared * (weights / counts)) @ shared.T
    effects = torch.linalg.pinv(normal, hermitian=True) @ (centred * weights).sum(dim=1)
    mean = (values * weights).sum() / (shared * weights).sum()
    scores = (mean + effects).clamp(0, 1).round(decimals=9)  # what is equal but for rounding must not exceed each other
    return torch.where(asked.any(dim=1), scores, math.nan)


def soft_balancing_weights(scores: Tensor | Sequence[float] | np.ndarray, beta: float = 1.0) -> Tensor:
    """w_i = s_i^beta / sum_j s_j^beta (Eq. 6, read after the soft-balancing weight of Che et al., MICCAI 2023).

    There the weights are inverted afterwards, because they balance losses; here a model that generalises better must weigh
    more, so they are not. A negative beta gives the inverse. Scores such as AUC lie close together, so beta = 1 is almost
    the plain mean.

    Args:
        scores: (K,), not negative; NaN for a model without a score, which then counts as an average one.
        beta: exponent; 0 gives equal weights.

    Returns:
        (K,) weights that sum to 1, equal where all scores are equal, zero or NaN; in the dtype of `scores`.

    Raises:
        ValueError: no score, or a negative or infinite one.

    Examples:
        >>> soft_balancing_weights([0.5, 0.5]), soft_balancing_weights([1.0, 3.0]), soft_balancing_weights([1.0, 3.0], beta=0)
        (tensor([0.5000, 0.5000]), tensor([0.2500, 0.7500]), tensor([0.5000, 0.5000]))
    """
    given = torch.as_tensor(scores)
    defined = _defined_scores(given)
    return torch.softmax(beta * defined.clamp(min=torch.finfo(torch.float64).tiny).log(), dim=0).to(_weight_dtype(given))


def softmax_weights(scores: Tensor | Sequence[float] | np.ndarray, temperature: float) -> Tensor:
    """w_i = exp(s_i / T) / sum_j exp(s_j / T): another reading of Eq. 6.

    Returns:
        (K,) weights that sum to 1, in the dtype of `scores`.

    Examples:
        >>> softmax_weights([0.5, 0.5], temperature=0.1)
        tensor([0.5000, 0.5000])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    given = torch.as_tensor(scores)
    return torch.softmax(_defined_scores(given) / temperature, dim=0).to(_weight_dtype(given))


def _defined_scores(scores: Tensor) -> Tensor:
    """Checked float64 scores, NaN replaced by the mean of the others (any constant where there are none)."""
    scores = scores.to(torch.float64)
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"scores must be a vector with one entry for each site, got shape {tuple(scores.shape)}")
    if bool((scores < 0).any()) or bool(scores.isinf().any()):
        raise ValueError(f"scores must be finite and not negative, got {scores.tolist()}")
    return scores.nan_to_num(nan=float(scores.nanmean().nan_to_num(nan=1.0)))


def _weight_dtype(scores: Tensor) -> torch.dtype:
    return scores.dtype if scores.is_floating_point() else torch.get_default_dtype()


def within_client_average(
    states: Sequence[StateDict], scores: Sequence[float], kappa: int, window: str = "rounds"
) -> tuple[StateDict, float]:
    """The within-client average of one site's models (Sec. III-C3): earlier models that scored higher join the current one.

    Args:
        states: the site's models by round, the current one last.
        scores: their scores; NaN for a model without one.
        kappa: how many earlier models may join; 0 leaves the current one alone.
        window: "rounds" looks at the kappa models before the current one and keeps those with a higher score; "passing"
            takes the latest kappa among all earlier ones with a higher score.

    Returns:
        (plain mean of these models and the current one, mean of their scores); integer buffers are the current one's. A current model
        without a score is returned alone: nothing can be said to exceed it.

    Raises:
        ValueError: no state, lists of different length, a negative kappa, an unknown window.

    Examples:
        >>> states = [{"w": torch.tensor(value)} for value in (8.0, 4.0, 2.0)]
        >>> within_client_average(states, [0.5, 1.0, 0.75], kappa=2)
        ({'w': tensor(3.)}, 0.875)
    """
    if not states or len(states) != len(scores):
        raise ValueError(f"states and scores must be as many, and at least one, got {len(states)} and {len(scores)}")
    if kappa < 0:
        raise ValueError(f"kappa must not be negative, got {kappa}")
    if window not in ("rounds", "passing"):
        raise ValueError(f"window must be 'rounds' or 'passing', got {window!r}")
    current = len(states) - 1
    first = max(0, current - kappa) if window == "rounds" else 0
    higher = [t for t in range(first, current) if scores[t] > scores[current]]
    chosen = [*higher[max(0, len(higher) - kappa) :], current]
    mean = weighted_mean({f"{t:09d}": states[t] for t in chosen}, {f"{t:09d}": 1.0 for t in chosen})
    counters = {name: tensor.clone() for name, tensor in states[-1].items() if not tensor.is_floating_point()}
    return {**mean, **counters}, float(sum(scores[t] for t in chosen) / len(chosen))


def choose_evaluators(sites: Sequence[str], number: int, generator: np.random.Generator) -> dict[str, list[str]]:
    """E_i (Eq. 5): which sites score whose perturbed model: all others, or `number` of them drawn anew for each model.

    Args:
        sites: those whose models are scored; all of them can evaluate.
        number: evaluators of each model; 0, or as many as there are others, for all.

    Returns:
        site -> the sites that score its model, sorted, never itself.

    Examples:
        >>> choose_evaluators(["A", "B", "C"], 0, np.random.default_rng(0))
        {'A': ['B', 'C'], 'B': ['A', 'C'], 'C': ['A', 'B']}
    """
    chosen = {}
    for site in sorted(sites):
        others = sorted(set(sites) - {site})
        if 0 < number < len(others):
            others = sorted(generator.choice(others, size=number, replace=False).tolist())
        chosen[site] = others
    return chosen

"""The formulas of FedDAG as pure functions.

Che et al., "FedDAG: Federated Domain Adversarial Generation", arXiv 2501.13967. The available text
of the paper describes its equations without symbols, and there is no public code. Each function
states its reading.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.core.states import State, StateDict
from medflare.methods.aggregation import plain_mean
from medflare.methods.parts.tensors import refuse_shapes


def instance_discrepancy(f: Tensor, f_hat: Tensor) -> Tensor:
    """1/2 ||f/||f|| - f^/||f^||||^2 = 1 - cos(f, f^) of every pair of rows, between 0 and 2: (N,
    D), (N, D) -> (N,).
    """
    refuse_shapes(f=f, f_hat=f_hat)
    gap = F.normalize(f, dim=1) - F.normalize(f_hat, dim=1)
    return gap.square().sum(dim=1) / 2


def discrepancy(
    f: Tensor, f_hat: Tensor, m: float, level: Literal["instance", "batch"] = "instance"
) -> Tensor:
    """L_dis (Eq. 1): how far features of generated images are from those of the originals.

    Read as mean_i min(1/2 ||f_i/||f_i|| - f^_i/||f^_i||||^2, m): the cap is applied to each image,
    so that an image that differs enough gives the generator no gradient. Without the 1/2, m has
    twice the size.

    Args:
        m: cap; 0 switches the loss off, 2 or more is no cap.
        level: "instance" caps each image, "batch" the mean over the batch.

    Returns:
        A scalar between 0 and min(m, 2).
    """
    each = instance_discrepancy(f, f_hat)
    if level == "batch":
        return each.mean().clamp(max=m)
    return each.clamp(max=m).mean()


def similarity_loss(f: Tensor, f_hat: Tensor) -> Tensor:
    """L_sim (Eq. 4), the discrepancy without a cap, minimised by the student: (N, D), (N, D) ->
    scalar.
    """
    return instance_discrepancy(f, f_hat).mean()


@torch.no_grad()
def ema_update(teacher: State, student: State, decay: float) -> None:
    """teacher <- decay * teacher + (1 - decay) * student, in place.

    Sec. III-B3, after Tarvainen and Valpola, 2017. Floating buffers such as BatchNorm's running
    statistics are averaged too; integer entries are copied.

    Args:
        teacher: name -> tensor, changed in place.
        student: name -> tensor; every name of the teacher.
        decay: 0 gives the student.
    """
    for name, tensor in teacher.items():
        if tensor.is_floating_point():
            tensor.lerp_(student[name].to(tensor.dtype), 1 - decay)
        else:
            tensor.copy_(student[name])


def round_decay(batches: int) -> float:
    """The teacher's decay by the round's length: exp(-1 / (0.2 B)) for B batches, at most 0.99
    (from B = 498).

    Up to there, exp(-5) = 0.7 % of the teacher at the start of a round is left at its end; a fixed
    0.9 leaves 35 % after ten batches.

    Examples:
        >>> [round(round_decay(batches), 4) for batches in (1, 10, 50, 1000)]
        [0.0067, 0.6065, 0.9048, 0.99]
    """
    return min(math.exp(-1 / (0.2 * batches)), 0.99)


def sharpness_perturbation(gradients: State, rho: float) -> StateDict:
    """epsilon = rho g / ||g||_2 with one norm over all gradients together (Sec. III-C1, after Foret
    et al., ICLR 2021).

    Args:
        gradients: of the task loss, by parameter name.
        rho: length of the perturbation, 0 or more, in the units of the parameters.

    Returns:
        epsilon by name; zeros if all gradients are 0.

    Examples:
        >>> sharpness_perturbation({"w": torch.tensor([3.0, 4.0])}, rho=0.5)
        {'w': tensor([0.3000, 0.4000])}
        >>> sharpness_perturbation({"w": torch.zeros(1)}, rho=0.5)
        {'w': tensor([0.])}
    """
    squares = [float(gradient.double().square().sum()) for gradient in gradients.values()]
    norm = math.sqrt(sum(squares))
    scale = rho / norm if norm > 0 else 0.0
    return {name: gradient.detach() * scale for name, gradient in gradients.items()}


def generalization_scores(metrics: Tensor, n_validation: Tensor | None = None) -> Tensor:
    """s_i (Eq. 5): the mean of the other sites' metrics of site i's perturbed model.

    Args:
        metrics: (K, K), row = model, column = evaluating site, in [0, 1], higher is better; NaN if
            not evaluated or undefined. The diagonal is not read.
        n_validation: (K,) validation images of the sites, as weights; None for the plain mean (the
            paper's).

    Returns:
        (K,) float64; NaN for a model without a score.
    """
    metrics = metrics.double()
    weights = torch.ones(len(metrics), dtype=torch.float64)
    if n_validation is not None:
        weights = n_validation.double()
    valid = _of_others(metrics)
    return (metrics.nan_to_num() * weights * valid).sum(dim=1) / (weights * valid).sum(dim=1)


def _of_others(metrics: Tensor) -> Tensor:
    """(K, K) mask of the metrics that count: those that are defined and not of a site's own
    model.
    """
    return ~metrics.isnan() & ~torch.eye(len(metrics), dtype=torch.bool)


def centred_scores(metrics: Tensor) -> Tensor:
    """s_i (Eq. 5) without the evaluators' own levels: a_ij = s_i + v_j, by least squares.

    In the plain mean, a site with easy images raises the score of every model but its own. Here
    only models of the same evaluator are compared. Groups of models without a common evaluator (two
    sites score one model each) get equal means.

    Args:
        metrics: see `generalization_scores`.

    Returns:
        (K,) float64 in [0, 1], whose mean is that of all metrics unless clipped; NaN for a model
        without a score.
    """
    metrics = metrics.double()
    valid = _of_others(metrics)
    counts = valid.sum(dim=0).clamp(min=1)  # models of each evaluator
    values = metrics.nan_to_num() * valid
    centred = (values - values.sum(dim=0) / counts) * valid
    scored = valid.double()
    normal = torch.diag(scored.sum(dim=1)) - (scored / counts) @ scored.T
    effects = torch.linalg.pinv(normal, hermitian=True) @ centred.sum(dim=1)
    mean = values.sum() / scored.sum()
    # Rounding errors must not decide which score is higher.
    scores = (mean + effects).clamp(0, 1).round(decimals=9)
    return torch.where(valid.any(dim=1), scores, math.nan)


def soft_balancing_weights(
    scores: Tensor | Sequence[float] | np.ndarray, beta: float = 1.0
) -> Tensor:
    """w_i = s_i^beta / sum_j s_j^beta (Eq. 6).

    Read after the soft-balancing weight of Che et al., MICCAI 2023. There the weights are then
    inverted, since they balance losses; here a better model has a larger weight. Scores such as AUC
    are similar, so beta = 1 is nearly the plain mean.

    Args:
        scores: (K,), not negative; NaN for a model without a score, which counts as an average one.
        beta: exponent; 0 gives equal weights, a negative one the inverse.

    Returns:
        (K,) weights that sum to 1, equal where all scores are equal, zero or NaN; in the dtype of
        `scores`.

    Raises:
        ValueError: a negative or infinite score.
    """
    values = torch.as_tensor(scores)
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    logs = _defined_scores(values).clamp(min=torch.finfo(torch.float64).tiny).log()
    return torch.softmax(beta * logs, dim=0).to(dtype)


def _defined_scores(scores: Tensor) -> Tensor:
    """The scores in float64, with the mean of the others for NaN."""
    scores = scores.double()
    if (scores < 0).any() or scores.isinf().any():
        raise ValueError(f"scores must be finite and not negative, got {scores.tolist()}")
    return scores.nan_to_num(nan=float(scores.nanmean().nan_to_num(nan=1.0)))


def within_client_average(
    states: Sequence[StateDict], scores: Sequence[float], kappa: int
) -> tuple[StateDict, float]:
    """The mean of a site's current model and its earlier models with a higher score (Sec. III-C3).

    Args:
        states: the site's models by round, the current one last.
        scores: their scores; NaN for a model without one.
        kappa: number of latest earlier models that are considered.

    Returns:
        (plain mean of the models, mean of their scores); integer buffers are the current one's. A
        current model without a score is returned alone.
    """
    current = len(states) - 1
    chosen = [t for t in range(max(0, current - kappa), current) if scores[t] > scores[current]]
    chosen.append(current)
    mean = plain_mean({f"{t:09d}": states[t] for t in chosen})
    for name, tensor in states[current].items():
        if not tensor.is_floating_point():
            mean[name] = tensor.clone()
    return mean, float(sum(scores[t] for t in chosen) / len(chosen))


def choose_evaluators(
    sites: Sequence[str], number: int, generator: np.random.Generator
) -> dict[str, list[str]]:
    """E_i (Eq. 5): site -> the sites that score its perturbed model, sorted: all others, or
    `number` of them, drawn for each model.

    Args:
        number: evaluators of each model; 0 for all others.

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

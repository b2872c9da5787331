"""Formulas of PRR's site algorithm: transfer stages, the CPA loss and its prototypes.

Those of the server are in `fourier.py`. Paper: Chen et al., "Personalized Retrogress-Resilient
Federated Learning Toward Imbalanced Medical Data", IEEE TMI 41(12), 2022. "Official" is the
authors' published code where it differs from the printed equations.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

# Deputy-Enhanced Transfer (Sec. III-C)

# Stages of an epoch; 0 stands for the start of a round.
RECOVER = 1
EXCHANGE = 2
SUBLIMATE = 3
EPOCHS_TO_HALVE = 25  # Sec. IV-A, both of the paper's tasks


def next_stage(
    stage: int,
    deputy: float,
    personal: float,
    lam1: float = 0.7,
    lam2: float = 0.9,
    rule: Literal["official", "threshold"] = "official",
) -> int:
    """The stage of the coming epoch (PRR, Sec. III-C).

    Args:
        stage: of the epoch before; 0 at the start of a round.
        deputy: validation metric phi(D), higher is better. NaN (undefined) gives Recover.
        personal: phi(P), likewise.
        lam1: ratio phi(D) / phi(P) at which Exchange begins.
        lam2: ratio at which Sublimate begins.
        rule: "official": the first epoch of a round is Recover, and Sublimate only follows an epoch
            of Exchange; "threshold": the printed rule, the ratio alone.

    Returns:
        1 Recover, 2 Exchange or 3 Sublimate.
    """
    in_turn = rule == "official"
    if not deputy >= lam1 * personal or (in_turn and stage == 0):
        return RECOVER
    if not deputy >= lam2 * personal or (in_turn and stage == RECOVER):
        return EXCHANGE
    return SUBLIMATE


def halvings(halve_every: int | str, round: int, epoch: int, epochs: int) -> int:
    """How often the learning rate has been halved (PRR, Sec. IV-A: "divided by 2 after every 25
    epochs").

    Args:
        halve_every: rounds between two halvings, 0 for none; "auto": every 25 local epochs.
        round: 0-based.
        epoch: 0-based, within the round.
        epochs: of a round.

    Examples:
        >>> [halvings("auto", round, 0, epochs=5) for round in (0, 4, 5, 10)]
        [0, 0, 1, 2]
        >>> halvings(2, 3, 0, epochs=5), halvings(0, 99, 0, epochs=5)
        (1, 0)
    """
    if halve_every == "auto":
        return (round * epochs + epoch) // EPOCHS_TO_HALVE
    if not halve_every:
        return 0
    return round // int(halve_every)


def better_model(personal: float | None, deputy: float | None) -> str:
    """The model that a site deploys, "personal" or "global" (its deputy), by validation metrics,
    None if undefined (PRR, Sec. IV-A).
    """
    if personal is not None and deputy is not None and deputy > personal:
        return "global"
    return "personal"


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of logits (N, C, ...), mean over samples or pixels (Eq. 5-6).

    The teacher receives no gradient.
    """
    log_student = student.log_softmax(dim=1)
    log_teacher = teacher.detach().log_softmax(dim=1)
    total = functional.kl_div(log_student, log_teacher, reduction="sum", log_target=True)
    return total * student.shape[1] / student.numel()


# Conjoint Prototype-Aligned loss (Sec. III-D)


def conjoint_mask(counts: Tensor, beta: float) -> Tensor:
    """G_cj = min(1, (N_j / N_c)^beta), how much class j competes with true class c (PRR, Sec.
    III-D.1).

    Args:
        counts: (C,) training samples, or pixels, of each class over all sites.
        beta: 0 gives the cross entropy.

    Returns:
        (C, C) float64, row = true class. Row and column of a class without samples are 1.
    """
    present = counts > 0
    amount = torch.where(present, counts, 1).double()
    mask = (amount[None, :] / amount[:, None]).pow(beta).clamp(max=1.0)
    return torch.where(present[None, :] & present[:, None], mask, 1.0)


def prototype_gamma(local: Tensor, global_: Tensor, tau: float) -> Tensor:
    """gamma_c = (1 + tau) / (cos(f_c, f_bar_c) + tau), the weight of class c at a site (PRR, Eq.
    11-12).

    Args:
        local: (C, D) prototypes of the site; a zero row stands for a class without a prototype.
        global_: (C, D) prototypes of all sites, likewise.
        tau: smoothing; the denominator is at least 1e-3 (opposite prototypes with tau <= 1).

    Returns:
        (C,) gamma; 1 for a class without a local or a global prototype.

    Raises:
        ValueError: prototypes of two shapes.
    """
    if local.shape != global_.shape:
        raise ValueError(
            f"local prototypes of shape {tuple(local.shape)} "
            f"and global ones of {tuple(global_.shape)}; both are (C, D)"
        )
    present = (local != 0).any(dim=1) & (global_ != 0).any(dim=1)
    similarity = functional.cosine_similarity(local, global_, dim=1)  # Eq. 11
    gamma = (1 + tau) / (similarity + tau).clamp(min=1e-3)  # Eq. 12
    return torch.where(present, gamma, 1.0)


def cpa_loss(
    logits: Tensor, targets: Tensor, counts: Tensor | None, gamma: Tensor | None, beta: float
) -> Tensor:
    """L_CPA = mean_i -gamma_{y_i} log p_hat_{y_i} (PRR, Eq. 9 and 13).

    Adding log G_cj to logit j turns the modified softmax of Eq. 9 into an ordinary one, so no
    exponent overflows.

    Args:
        logits: (N, C), or (N, C, ...) for pixels.
        targets: (N, ...) true classes.
        counts: (C,) global class counts of the conjoint objective; None: G = 1.
        gamma: (C,) see `prototype_gamma`; None: gamma = 1.
        beta: see `conjoint_mask`.

    Raises:
        ValueError: counts or gamma of another number of classes than the logits.
    """
    for name, numbers in (("counts", counts), ("gamma", gamma)):
        if numbers is not None and numbers.shape != logits.shape[1:2]:
            shape = tuple(numbers.shape)
            raise ValueError(f"{name} of shape {shape} for {logits.shape[1]} classes")
    if counts is not None:
        log_mask = conjoint_mask(counts.to(logits.device), beta).log().to(logits.dtype)
        logits = logits + log_mask.T[:, targets].movedim(0, 1)
    if gamma is None:
        return functional.cross_entropy(logits, targets)
    weight = gamma.to(logits)
    total = functional.cross_entropy(logits, targets, weight=weight, reduction="sum")
    return total / targets.numel()


class PrototypeMean:
    """Running mean of the embeddings of each class, f_c of Eq. 10; for segmentation, masked average
    pooling over all pixels.
    """

    def __init__(self, classes: int, width: int, device: torch.device | str = "cpu"):
        self.sums = torch.zeros(classes, width, dtype=torch.float64, device=device)
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Adds embeddings (N, D) or (N, D, ...) of the classes `targets` (N, ...).

        No gradient flows through prototypes.
        """
        features = features.detach()
        if features.dim() == 2:
            features = features[:, :, None]
        rows = features.flatten(2)
        classes = torch.arange(len(self.counts), device=targets.device)
        members = targets.reshape(len(targets), 1, -1) == classes[None, :, None]
        self.sums += torch.einsum("ncp,ndp->cd", members.to(rows.dtype), rows)
        self.counts += members.sum(dim=(0, 2))

    def means(self) -> Tensor:
        """(C, D) float32 prototypes; zero for a class without samples."""
        return (self.sums / self.counts.clamp(min=1)[:, None]).float()


def global_prototypes(
    local: Tensor,
    present: Tensor,
    noise: Tensor,
    spread: Literal["gaussian", "clamped", "mean"] = "gaussian",
) -> Tensor:
    """Sample f_bar_c ~ N(mu, sigma^2) from the sites' prototypes of each class (PRR, Sec. III-D.2).

    Args:
        local: (K, C, D) prototypes.
        present: (K, C) whether the site has the class.
        noise: (C, D) standard normal numbers.
        spread: "gaussian": population variance, as printed; "clamped": unbiased standard deviation
            of at least 1, as in the official code; "mean": mu itself.

    Returns:
        (C, D); zero for a class that no site has.
    """
    member = present.to(local.dtype)[:, :, None]
    sites = member.sum(dim=0)
    mean = (local * member).sum(dim=0) / sites.clamp(min=1)
    if spread == "mean":
        return mean
    squares = ((local - mean).square() * member).sum(dim=0)
    if spread == "gaussian":
        return mean + noise * (squares / sites.clamp(min=1)).sqrt()
    deviation = (squares / (sites - 1).clamp(min=1)).sqrt().clamp(min=1.0)
    return mean + noise * deviation * (sites > 0)


def most_representative(counts: Mapping[str, Tensor]) -> str:
    """The site whose class distribution is closest to that of all sites, by total variation (PRR,
    Sec. IV-E); ties go to the first name.

    Args:
        counts: site -> (G, C) counts of G groups of C classes.
    """
    everyone = _frequencies(torch.stack(list(counts.values())).sum(dim=0))

    def distance(site: str) -> float:
        return float((_frequencies(counts[site]) - everyone).abs().sum())

    return min(sorted(counts), key=distance)


def _frequencies(counts: Tensor) -> Tensor:
    return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)

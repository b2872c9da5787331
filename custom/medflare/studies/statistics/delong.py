"""DeLong's test: two areas under the ROC curve measured on the same cases. No library that this package uses has it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Areas:
    """Two areas under the ROC curve on the same cases.

    Attributes:
        first, second: the areas.
        variance: of second - first.
    """

    first: float
    second: float
    variance: float


def delong(first: Floats, second: Floats, truth: NDArray[np.bool_]) -> Areas:
    """Both areas and the variance of their difference.

    With m positive scores X_i and n negative scores Y_j of a classifier (DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988):

        θ = 1/(mn) Σ_i Σ_j ψ(X_i, Y_j),   ψ = 1 where X > Y, 1/2 where X = Y, else 0     (Eq. 1)
        V10(X_i) = 1/n Σ_j ψ(X_i, Y_j),   V01(Y_j) = 1/m Σ_i ψ(X_i, Y_j)                 (Sec. 3)
        var(θ_2 - θ_1) = var_i(V10_2 - V10_1) / m + var_j(V01_2 - V01_1) / n             (Eq. 5 with L = (-1, 1))

    V10 and V01 come from midranks (Sun and Xu, IEEE Signal Processing Letters 21, 2014, Eqs. 8-12), in the time that sorting takes.

    Args:
        first: scores of one classifier, (cases,).
        second: of the other one.
        truth: which cases are positive.

    Returns:
        The areas; all NaN where the cases are of one kind, the variance NaN with a single case of a kind.

    Examples:
        >>> truth = np.array([True, True, False, False])
        >>> delong(np.array([4.0, 2.0, 3.0, 1.0]), np.array([4.0, 3.0, 2.0, 1.0]), truth)
        Areas(first=0.75, second=1.0, variance=0.125)
    """
    m, n = int(truth.sum()), int((~truth).sum())
    if not m or not n:
        return Areas(np.nan, np.nan, np.nan)
    positives, negatives = zip(*(_components(scores, truth) for scores in (first, second)), strict=True)
    one, other = (float(of.mean()) for of in positives)
    if m < 2 or n < 2:
        return Areas(one, other, np.nan)
    variance = np.var(positives[1] - positives[0], ddof=1) / m + np.var(negatives[1] - negatives[0], ddof=1) / n
    return Areas(one, other, float(variance))


def _components(scores: Floats, truth: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """V10 of the positive cases and V01 of the negative ones, from midranks among all and among one's own kind."""
    from scipy.stats import rankdata

    ranks = rankdata(scores)
    positive, negative = scores[truth], scores[~truth]
    v10 = (ranks[truth] - rankdata(positive)) / len(negative)
    v01 = 1 - (ranks[~truth] - rankdata(negative)) / len(positive)
    return v10, v01

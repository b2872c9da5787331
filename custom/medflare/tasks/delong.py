"""DeLong's variance of areas under the ROC curve: an interval of one, a test of two measured on the same cases.

No library that this package uses has it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NORMAL_975 = 1.959963984540054  # quantile of the normal distribution: an interval of 95 %


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


@dataclass(frozen=True)
class Area:
    """An area under the ROC curve.

    Attributes:
        value: the area; NaN where the cases are of one kind.
        low, high: its 95 % interval; NaN with a single case of a kind.
    """

    value: float
    low: float
    high: float


def area_interval(scores: Floats, truth: NDArray[np.bool_]) -> Area:
    """An area and its interval, θ ± 1.96 sqrt(var(θ)), cut to [0, 1].

        var(θ) = var_i(V10) / m + var_j(V01) / n     (DeLong et al. 1988, Eq. 5 with L = 1; symbols as for `delong`)

    Cases are taken for independent: several images of one patient make the interval too narrow.

    Args:
        scores: (cases,).
        truth: which cases are positive.

    Examples:
        >>> area_interval(np.array([4.0, 2.0, 3.0, 1.0]), np.array([True, True, False, False]))
        Area(value=0.75, low=0.057..., high=1.0)
    """
    m, n = int(truth.sum()), int((~truth).sum())
    if not m or not n:
        return Area(np.nan, np.nan, np.nan)
    v10, v01 = _components(scores, truth)
    value = float(v10.mean())
    if m < 2 or n < 2:
        return Area(value, np.nan, np.nan)
    half = _NORMAL_975 * float(np.sqrt(np.var(v10, ddof=1) / m + np.var(v01, ddof=1) / n))
    return Area(value, max(0.0, value - half), min(1.0, value + half))


def _components(scores: Floats, truth: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """V10 of the positive cases and V01 of the negative ones, from midranks among all and among one's own kind."""
    from scipy.stats import rankdata

    ranks = rankdata(scores)
    positive, negative = scores[truth], scores[~truth]
    v10 = (ranks[truth] - rankdata(positive)) / len(negative)
    v01 = 1 - (ranks[~truth] - rankdata(negative)) / len(positive)
    return v10, v01

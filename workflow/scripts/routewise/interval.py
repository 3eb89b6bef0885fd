"""Intervals: what a count or a set of samples allows one to say about the thing sampled.

A share of differing positions is binomial: the bound for 0 of n is the exact one-sided one, the
interval for k of n is Clopper and Pearson's (Biometrika 26, 1934). A median has a distribution-free
interval between two order statistics (Conover, Practical Nonparametric Statistics, section 3.2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta, binom

LEVEL = 0.95

ONE_SIDED = "exact one-sided upper bound, 0 of n: 1 - (1 - level)^(1/n)"
CLOPPER_PEARSON = "Clopper-Pearson, two-sided"
ORDER_STATISTICS = "order statistics of the median, two-sided"


def detectable_share(n: int, level: float = LEVEL) -> float | None:
    """Return the smallest share of differing positions that ``n`` positions show with ``level``.

    The same holds for replies. A share p escapes n independent ones with probability (1 - p)^n, so
    this is 1 - (1 - level)^(1/n). None where nothing was measured.
    """
    if n < 0:
        raise ValueError(f"n must not be negative: {n}")
    return None if n == 0 else float(-np.expm1(np.log1p(-level) / n))


def share_interval(
    k: int, n: int, level: float = LEVEL, unit: str | None = None
) -> dict[str, Any] | None:
    """Return the interval of a share of which ``k`` of ``n`` were seen, or None for n = 0.

    Keys: ``quantity``, ``k``, ``n``, ``low``, ``high`` (shares in [0, 1]), ``level``, ``method``.
    What was sampled are positions; with ``unit`` the interval has that key and says which it was:
    ``positions`` or ``replies``. They are taken as independent, which positions of one prompt and
    copies of one round are not quite.
    """
    if not 0 <= k <= n:
        raise ValueError(f"need 0 <= k <= n, got k = {k}, n = {n}")
    if n == 0:
        return None
    if k == 0:
        low, high, method = 0.0, detectable_share(n, level), ONE_SIDED
    else:
        tail = (1.0 - level) / 2.0
        low = float(beta.ppf(tail, k, n - k + 1))
        high = 1.0 if k == n else float(beta.ppf(1.0 - tail, k + 1, n - k))
        method = CLOPPER_PEARSON
    return {
        "quantity": f"share of differing {unit or 'positions'}",
        **({"unit": unit} if unit else {}),
        "k": int(k),
        "n": int(n),
        "low": low,
        "high": high,
        "level": level,
        "method": method,
    }


def median_interval(values: ArrayLike, level: float = LEVEL) -> tuple[float, float] | None:
    """Return (low, high) of the median of finite ``values`` (one axis), in their own unit.

    None where there are too few values for the level: at 0.95 that is fewer than six.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if ordered.ndim != 1 or not np.isfinite(ordered).all():
        raise ValueError("need one axis of finite values")
    rank = int(binom.ppf((1.0 - level) / 2.0, len(ordered), 0.5)) if len(ordered) else 0
    if rank < 1:
        return None
    return float(ordered[rank - 1]), float(ordered[len(ordered) - rank])

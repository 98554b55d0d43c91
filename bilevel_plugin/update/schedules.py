"""The weight α_k of a step, k = 1, 2, …, as plain functions of k."""

from __future__ import annotations

from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """α_k = value: Φ is the same map at every step, so that it has a fixed point (`cg`, `neumann`).

    Examples:
        >>> import bilevel_plugin as bilevel
        >>> bilevel.constant(0.5)(16)
        0.5
    """
    if not 0 <= value <= 1:
        raise ValueError(f"bilevel.constant: α must lie in [0, 1], got {value}.")
    return lambda k: value


def power(p: float = 0.25) -> Schedule:
    """α_k = k^−p: the schedule of the paper's experiments (p = 0.25).

    Under `BiGSAM` the weight of h vanishes, so that w_k goes to argmin g as k grows.

    Examples:
        >>> import bilevel_plugin as bilevel
        >>> bilevel.power(0.25)(16)
        0.5
    """
    if not p >= 0:
        raise ValueError(f"bilevel.power: p must be at least 0, got {p}.")
    return lambda k: k**-p


def convergent(c: float = 1.0, p: float = 0.5) -> Schedule:
    """α_k = 1 − c·(k + 1)^−p, 0 < c ≤ 1, 0 < p ≤ 1.

    Under `BiGSAM` the weight of g vanishes and its sum diverges: w_k goes to the point of argmin h at
    which g is least (Sabach & Shtern 2017), the solution of the paper's Eq. 3. Along argmin h the influence
    of the start fades like exp(−k^(1−p)). With their p = 1 it fades like a power of k, slowly if s is small.

    Examples:
        >>> import bilevel_plugin as bilevel
        >>> bilevel.convergent()(3)
        0.5
    """
    if not (0 < c <= 1 and 0 < p <= 1):
        raise ValueError(f"bilevel.convergent: c and p must lie in (0, 1], got c={c}, p={p}.")
    return lambda k: 1 - c * (k + 1) ** -p

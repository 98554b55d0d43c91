import math
from itertools import pairwise

import pytest

from bilevel_plugin import constant, convergent, power


def test_values():
    assert power(0.25)(16) == pytest.approx(0.5)
    assert power()(1) == 1
    assert constant(0.3)(7) == 0.3
    assert convergent(p=1.0)(1) == 0.5
    assert convergent()(3) == 0.5
    assert convergent(0.5, 0.5)(3) == pytest.approx(0.75)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_what_the_convergence_proof_asks_of_the_weight_of_g(p):
    """1 − α_k → 0 and Σ (1 − α_k) = ∞ (Sabach & Shtern); in the paper's power law the weight of h vanishes."""
    weights = [1 - convergent(p=p)(k) for k in range(1, 100_001)]
    assert weights[-1] < 1e-2
    assert all(a >= b for a, b in pairwise(weights))
    assert sum(weights) > 10  # for p = 1 a logarithm: it grows without bound, slowly
    assert 1 - power()(100_000) > 0.9


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: constant(1.5), r"constant: α must lie in \[0, 1\], got 1.5"),
        (lambda: constant(math.nan), r"constant: α must lie in \[0, 1\], got nan"),
        (lambda: power(-1), "power: p must be at least 0, got -1"),
        (lambda: power(math.nan), "power: p must be at least 0, got nan"),
        (lambda: convergent(0), "convergent: c and p must lie in .*, got c=0, p=0.5"),
        (lambda: convergent(1, 2), "convergent: c and p must lie in .*, got c=1, p=2"),
    ],
)
def test_wrong_arguments(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()

"""The engine of the differences on functions whose derivatives are known."""

import math

import pytest
import torch

from bilevel_plugin.check.differences import NotChecked, Scale, compare, groups

FINE = Scale((1e-4, 1e-5, 1e-3), 1e-6, 2**-53)


def number(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize(("f", "slope"), [(math.sin, 1.0), (math.exp, 1.0), (lambda x: x**3 - 2 * x, -2.0)])
@pytest.mark.parametrize("here", [False, True])
def test_right_and_wrong_derivatives(f, slope, here):
    at = lambda by: number(f(by))
    known = at(0.0) if here else None
    assert compare(slope, at, FINE, here=known).verdict == "ok"
    wrong = compare(1.01 * slope, at, FINE, here=known)
    assert wrong.verdict == "WRONG"
    assert wrong.error == pytest.approx(0.01 / 1.01, rel=1e-3)


def test_vectors():
    at = lambda by: torch.stack([number(math.sin(by)), number(by * by + 3 * by)])
    assert compare(torch.tensor([1.0, 3.0]), at, FINE).verdict == "ok"
    assert compare(torch.tensor([1.0, 0.0]), at, FINE).error == pytest.approx(3 / 10**0.5, rel=1e-6)


def test_one_evaluation_is_enough_where_a_one_sided_difference_agrees():
    calls = []
    at = lambda by: calls.append(by) or number(math.sin(by))
    sentinel = Scale((1e-7, 1e-9, 1e-5), 1e-4, 2**-53)
    assert compare(1.0, at, sentinel, here=number(0.0)).verdict == "ok"
    assert calls == [1e-7]


def test_a_kink_is_left_by_a_smaller_step():
    assert compare(-1.0, lambda by: number(abs(by - 5e-5)), FINE).verdict == "ok"


def test_rounding_is_undecided():
    """A constant hides the function: what is 10 % off may be right. What is 100 % off is not."""
    at = lambda by: number(1e12 + by)
    assert compare(1.1, at, FINE).verdict == "?"
    assert compare(2.0, at, FINE).verdict == "WRONG"


def test_noise_is_not_checked():
    noise = torch.Generator().manual_seed(0)
    at = lambda by: number(by) + 1e-9 * torch.rand((), generator=noise, dtype=torch.float64)
    with pytest.raises(NotChecked, match="a different value at each evaluation"):
        compare(2.0, at, FINE, here=at(0.0))


def test_small_parts_are_measured_by_what_is_typical():
    at = lambda by: number(1e-12 * by)
    assert compare(0.0, at, FINE, typical=1e-4).verdict == "ok"
    assert compare(0.0, at, FINE).verdict == "WRONG"
    assert compare(0.0, lambda by: number(0.0), FINE).verdict == "ok"


def test_what_is_not_finite_is_wrong():
    assert compare(1.0, lambda by: number(math.nan), FINE).verdict == "WRONG"


def test_groups_are_of_similar_size():
    sizes = {"a": 1.0, "b": 0.5, "c": 1e-3, "d": 0.0, "e": 0.0, "f": 5e-4}
    assert groups(sizes) == [
        ["a", "b"],
        ["c", "f"],
        ["d", "e"],
    ]
    assert groups({}) == []
    assert groups({"a": 0.0}) == [["a"]]

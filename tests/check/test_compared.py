"""The parts of a derivative that is known: those that are wrong are named, and no other."""

import torch

from bilevel_plugin.check.compared import WEIGHTS, Outer, Parts


def parts_of(f, names, outer):
    """The parts of f(numbers along the weights, outer variables), with differences of `true`."""
    t = {n: torch.zeros((), dtype=torch.float64, requires_grad=True) for n in names}
    leaves = [x.detach().double().requires_grad_() for x in outer]
    parts = Parts(t, [Outer(x, y.detach(), [y]) for x, y in zip(outer, leaves, strict=True)])
    value = f(t, leaves)
    parts.differentiate(value)
    return parts, value.detach()


def compared(f, true, names, outer, trained=()):
    parts, here = parts_of(f, names, outer)

    def at(by, moving, moved):
        t = {n: torch.tensor(by if n in moving else 0.0, dtype=torch.float64) for n in names}
        return true(t, [moved[id(x)] for x in outer]).detach(), set(moved)

    return parts.compared(at, here, trained)


ONE, OTHER = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)


def test_all_is_right():
    f = lambda t, xs: (1 + t["a"]).exp() * xs[0].sum() + xs[1].square().sum() * t["b"].cos()
    found = compared(f, f, ["a", "b"], [ONE, OTHER])
    assert [x.difference.verdict for x in found] == ["ok"] * len(found)
    assert found[0].what == WEIGHTS


def test_the_variable_that_is_wrong_is_named():
    """The wrong one is a ten-thousandth of the other, and zero to autograd."""
    f = lambda t, xs: t["a"] + 1e4 * xs[0].sum() + 0 * xs[1].sum()
    true = lambda t, xs: t["a"] + 1e4 * xs[0].sum() + xs[1].sum() - 3
    verdicts = {x.what: x.difference.verdict for x in compared(f, true, ["a"], [ONE, OTHER])}
    assert verdicts == {
        WEIGHTS: "ok", "the outer variable of shape (2,)": "ok", "the outer variable of shape (1,)": "WRONG",
    }  # fmt: skip


def test_of_a_group_that_is_wrong_each_is_tried():
    f = lambda t, xs: xs[0].sum() + xs[1].sum()
    true = lambda t, xs: xs[0].sum() + 2 * xs[1].sum() - 3
    (weights, wrong) = compared(f, true, ["a"], [ONE, OTHER])
    assert weights.difference.verdict == "ok"
    assert not weights.says_something
    assert wrong.what == "the outer variable of shape (1,)"
    assert abs(wrong.difference.error - 0.5) < 1e-6


def test_weights_that_neither_autograd_nor_a_step_moves_stay():
    f = lambda t, xs: t["a"] * 1
    true = lambda t, xs: t["a"] + t["b"]
    assert compared(f, true, ["a", "b"], [])[0].difference.verdict == "ok"
    assert compared(f, true, ["a", "b"], [], {"b"})[0].difference.verdict == "WRONG"


def test_what_is_not_read_again_is_left_out():
    f = lambda t, xs: xs[0].sum()
    parts, here = parts_of(f, [], [ONE])
    found = parts.compared(lambda by, names, moved: (here, set()), here, ())
    assert [x.what for x in found] == [WEIGHTS]

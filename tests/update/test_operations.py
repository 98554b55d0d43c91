"""The operations of the rules: those of torch.optim for numbers, and the same functions of options that are tensors."""

import pytest
import torch

from bilevel_plugin.update.operations import average, average_of_squares, plus, plus_ratio, safe_root, with_decay

pytestmark = pytest.mark.usefixtures("double")

OPERATIONS = {
    "plus": (lambda x, y, c: plus(x, c, y), lambda x, y, c: x + c * y),
    "plus_ratio": (lambda x, y, c: plus_ratio(x, c, y, 1 + x * x), lambda x, y, c: x + c * y / (1 + x * x)),
    "average": (lambda x, y, c: average(x, y, c), lambda x, y, c: c * x + (1 - c) * y),
    "average_of_squares": (lambda x, y, c: average_of_squares(x, y, c), lambda x, y, c: c * x + (1 - c) * y**2),
    "with_decay": (lambda x, y, c: with_decay(x, y, c, maximize=True), lambda x, y, c: c * x - y),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_and_tensors_as_options(name):
    """The value is that of the formula, and so is the derivative with respect to an option that is a tensor."""
    ours, formula = OPERATIONS[name]
    x, y, c = torch.randn(5), torch.randn(5), torch.tensor(0.3, requires_grad=True)
    torch.testing.assert_close(ours(x, y, 0.3), formula(x, y, 0.3))
    torch.testing.assert_close(ours(x, y, c), formula(x, y, c))
    got, expected = (torch.autograd.grad(f(x, y, c).sum(), c)[0] for f in (ours, formula))
    torch.testing.assert_close(got, expected)


def test_the_root_has_slope_0_at_0():
    v = torch.tensor([0.0, 4.0], requires_grad=True)
    root = safe_root(v)
    assert root.tolist() == [0, 2]
    assert torch.autograd.grad(root.sum(), v)[0].tolist() == [0, 0.25]

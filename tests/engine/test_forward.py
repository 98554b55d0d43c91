"""Forward mode: what it follows, and what it says of the rest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from problems import Ridge, relative

import bilevel_plugin as bilevel


def test_forward_refuses_many_directions_and_what_it_did_not_follow(parts):
    model, h, g, lam, x, y = parts
    many = torch.zeros(300, requires_grad=True)
    wide = lambda m, x, y: h(m, x, y) * many.exp().mean()
    with bilevel.inner(model, wide, g, lr=0.1, engine="forward") as loop:
        with pytest.raises(ValueError, match=r"would follow 30\d outer directions.*Forward\(wrt="):
            loop.step(x, y, outer=(x, y))
    with bilevel.inner(model, wide, g, lr=0.1, engine=bilevel.Forward(wrt=[lam])) as loop:
        loop.run(3, x, y, outer=(x, y))
        followed = loop.hypergrad(lam)
        with pytest.raises(ValueError, match=r"did not follow the input of shape .300,."):
            loop.hypergrad([lam, many])
    with bilevel.inner(model, wide, g, lr=0.1) as loop:
        loop.run(3, x, y, outer=(x, y))
        torch.testing.assert_close(loop.hypergrad(lam), followed)


def test_as_many_directions_as_the_limit_says(parts):
    model, h, g, lam, x, y = parts
    with bilevel.inner(model, h, g, lr=0.1, engine=bilevel.Forward(limit=6)) as loop:  # one for each sample
        loop.run(2, x, y, outer=(x, y))
        assert loop.hypergrad(lam).shape == (6,)
    with bilevel.inner(model, h, g, lr=0.1, engine=bilevel.Forward(limit=5)) as loop:
        with pytest.raises(ValueError, match=r"would follow 6 outer directions.*\(limit 5\)"):
            loop.step(x, y, outer=(x, y))


def test_forward_follows_a_non_leaf_that_is_named():
    ridge = Ridge.random()
    decay = ridge.lam.exp()
    h = lambda m: (ridge.X @ m.w - ridge.y).square().sum() / 2 + decay * m.w.square().sum() / 2
    grads = []
    for how in (bilevel.Forward(wrt=[decay]), "reverse"):
        with bilevel.inner(ridge.model(), h, ridge.g, lr=0.2, engine=how) as loop:
            loop.run(5)
            grads.append(loop.hypergrad(decay))
    assert relative(*grads) < 1e-12
    with bilevel.inner(ridge.model(), h, ridge.g, lr=0.2, engine="forward") as loop:
        loop.run(5)
        assert relative(loop.hypergrad(ridge.lam), grads[1] * decay.detach()) < 1e-12  # by name: the leaves
        with pytest.raises(ValueError, match=r"did not follow the input of shape \(\)"):
            loop.hypergrad(decay)


LOSSES = {
    "mean": lambda z, y, c: c[0].exp() * F.cross_entropy(z, y),
    "sum": lambda z, y, c: c[0].exp() * F.cross_entropy(z, y, reduction="sum", ignore_index=2),
    "weights": lambda z, y, c: (c.exp() * F.cross_entropy(z, y, reduction="none")).mean(),
    "smooth": lambda z, y, c: c[0].exp() * F.cross_entropy(z, y, label_smoothing=0.1),
    "nll": lambda z, y, c: c[0].exp() * F.nll_loss(z.log_softmax(1), y),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tasks", [None, 2])
@pytest.mark.parametrize("contiguous", [False, True])
def test_cross_entropy_of_each_position(name, tasks, contiguous):
    """Logits (N, C, T), transposed from those of a linear layer, and (N, C, H, W)."""
    x, y, c = torch.randn(4, 5, 3), torch.randint(0, 6, (4, 5)), torch.randn(5).requires_grad_()
    rate, model, grads = torch.tensor(0.3, requires_grad=True), torch.nn.Linear(3, 6), []

    def loss(model, x, y, c=c):
        z = model(x).transpose(1, 2)
        z = z.contiguous() if contiguous else z
        image = F.cross_entropy(z[..., None], y[..., None])
        return LOSSES[name](z, y, c) + c[1] * image

    g = lambda m, x, y: loss(m, x, y, torch.zeros(5))
    if tasks is not None:
        x, y = (part.expand(tasks, *part.shape) for part in (x, y))
    for engine in ("forward", "reverse"):
        options = {} if tasks is None else {"tasks": tasks}
        with bilevel.inner(model, loss, g, solver="gd", lr=rate, engine=engine, **options) as loop:
            loop.run(3, x, y, outer=(x, y))
            grads.append(torch.cat([part.flatten() for part in loop.hypergrad([c, rate])]))
    assert relative(*grads) < 1e-12
    assert all(grads[0][[0, 1, -1]] != 0)

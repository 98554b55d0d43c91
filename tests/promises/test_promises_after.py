"""What changes between the last step and the hypergradient, or between two replays: the steps were as they were."""

import numpy as np
import torch
from promise import Loop, constructs, error, indexed, is_right, mlp, rows, squares, verdict, weighted
from torch import nn

ALL = "reverse sqrt memory blocks unroll forward tasks"


class Switch:
    on = True


def outer_variable_detached(when):
    """λ is used, but for its derivative: value and gradient of every loss are the same."""

    def build(lam):
        state = Switch()

        def h(m, x, y, i):
            w = lam if state.on else lam.detach()
            return (torch.sigmoid(w[i]) * squares(m, x, y)).mean()

        def off():
            state.on = False

        def before(k):
            state.on = k != when

        return Loop(mlp(), h, error, indexed(), rows(5), after=off if when is None else lambda: None, before=before)

    return build


def part_of_it_detached(lam):
    """One of two places that use λ, after the last step."""
    state = Switch()

    def h(m, x, y, i):
        w = lam if state.on else lam.detach()
        decay = sum(p.square().sum() for p in m.parameters())
        return (torch.sigmoid(w[i]) * squares(m, x, y)).mean() + 0.05 * lam[0].exp() * decay

    def off():
        state.on = False

    return Loop(mlp(), h, error, indexed(), rows(5), after=off)


def other_leaf(lam):
    """After the last step, the loss uses a copy of λ."""
    held = [lam]

    def h(m, x, y, i):
        return (torch.sigmoid(held[0][i]) * squares(m, x, y)).mean()

    def swap():
        held[0] = lam.detach().clone().requires_grad_()

    return Loop(mlp(), h, error, indexed(), rows(5), after=swap)


def number(lam):
    state = Switch()
    state.scale = 1.0

    def after():
        state.scale = 2.0

    h = lambda m, x, y, i: state.scale * weighted(lam)(m, x, y, i)
    return Loop(mlp(), h, error, indexed(), rows(5), after=after)


def gradient_scaled(lam):
    """A trick that scales the gradient and not the value, switched after the last step, without biases."""
    state = Switch()

    def h(m, x, y, i):
        z = m[0](x)
        z = z if state.on else 0.5 * z + (0.5 * z).detach()
        return (torch.sigmoid(lam[i]) * (m[2](z.tanh()).squeeze(-1) - y).square()).mean()

    def off():
        state.on = False

    return Loop(mlp(bias=False), h, error, indexed(), rows(5), after=off)


def data_of_lambda(lam):
    """λ is moved through .data, as an optimizer of old did, before the hypergradient was taken."""
    return Loop(mlp(), weighted(lam), error, indexed(), rows(5), after=lambda: lam.data.mul_(1.5))


def numpy_of_lambda(lam):
    def after():
        lam.detach().numpy()[2] += 1.0

    return Loop(mlp(), weighted(lam), error, indexed(), rows(5), after=after)


def numpy_in_the_batch(lam):
    """NumPy's arrays in the batch, refilled by the loader."""
    x, y, i = indexed()
    array = x.numpy().copy()

    def before(k):
        array[:] = x.numpy() * (1 + 0.3 * k)

    h = lambda m, array, y, i: weighted(lam)(m, torch.tensor(array), y, i)
    return Loop(mlp(), h, error, (array, y, i), rows(5), before=before)


def object_in_the_batch(lam):
    x, y, i = indexed()
    meta = {"scale": 1.0}

    def before(k):
        meta["scale"] = 1 + 0.3 * k

    h = lambda m, x, y, i, meta: meta["scale"] * weighted(lam)(m, x, y, i)
    return Loop(mlp(), h, error, lambda k: (x, y, i, meta), rows(5), before=before)


CHANGED = {
    "the outer variable detached after the steps": outer_variable_detached(None),
    "the outer variable detached in step 2": outer_variable_detached(1),
    "one use of it detached after the steps": part_of_it_detached,
    "another leaf after the steps": other_leaf,
    "a number after the steps": number,
    "a scaled gradient after the steps": gradient_scaled,
    "the outer variable moved through .data": data_of_lambda,
    "the outer variable moved by NumPy": numpy_of_lambda,
    "an array of the batch": numpy_in_the_batch,
    "an object of the batch": object_in_the_batch,
}
NAMES = r"outer variable|\bleaf\b|\bleaves\b|\bscale\b|(?<!hyper)gradient of|batch of h|shape \(6,\)"


@constructs(CHANGED, ALL)
def test_what_changed_since_the_steps(construct, variant):
    """Where graphs are kept, the result is right; the sentinel may warn of the losses as they are by then."""
    found = verdict(construct, variant)
    if found.kind != "false alarm" or variant not in ("memory", "unroll", "forward"):
        assert found.keeps(NAMES), str(found)


def modes(lam):
    """A model with Dropout is put into eval mode after the last step."""
    m = mlp(nn.Dropout(0.3))
    m.train()
    g = lambda m, x, y: error(m.eval(), x, y)
    return Loop(m, weighted(lam), g, indexed(), rows(5), after=m.eval)


def draws(lam):
    """The log draws random numbers after the steps."""
    m = mlp(nn.Dropout(0.3))
    g = lambda m, x, y: error(m.eval(), x, y)

    def after():
        torch.rand(7)
        np.random.default_rng().random()

    return Loop(m, lambda m, x, y, i: weighted(lam)(m.train(), x, y, i), g, indexed(), rows(5), after=after)


def rates(lam):
    """Gradients of the model are set by the user's log after the steps."""
    m = mlp()

    def after():
        for p in m.parameters():
            p.grad = torch.ones_like(p)

    return Loop(m, weighted(lam), error, indexed(), rows(5), after=after)


FINE = {"the mode": modes, "random numbers": draws, "gradients": rates}


@constructs(FINE, ALL)
def test_what_does_not_belong_to_the_steps_may_change(construct, variant):
    is_right(construct, variant)

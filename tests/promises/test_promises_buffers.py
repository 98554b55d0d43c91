"""State that steps change and losses read, and that is not differentiated: buffers, closed-over tensors."""

import numpy as np
import torch
from promise import Loop, constructs, each, error, indexed, is_right, keeps_the_promise, mlp, rows, squares, weighted
from torch import nn

import bilevel_plugin as bilevel

ALL = "reverse sqrt memory blocks unroll forward tasks"


class Remembers(nn.Module):
    """A layer with a buffer that each forward moves, and reads: `how(self, z)` does both."""

    def __init__(self, how, start):
        super().__init__()
        self.a, self.out, self.how = nn.Linear(3, 2), nn.Linear(2, 1), how
        self.double()
        self.register_buffer("seen", start)

    def forward(self, x):
        z = self.a(x)
        return self.out(self.how(self, z).tanh())


def written(m, z):
    """A running mean, moved in place under no_grad; what is read is the mean before."""
    old = m.seen.clone()
    with torch.no_grad():
        m.seen.mul_(0.5).add_(0.5 * z.mean(0))
    return z - old


def replaced(m, z):
    old = m.seen
    m.seen = 0.5 * m.seen + 0.5 * z.detach().mean(0)
    return z - old


def by_data(m, z):
    old = m.seen.clone()
    m.seen.data.copy_(0.5 * m.seen + 0.5 * z.detach().mean(0))
    return z - old


def complex_one(m, z):
    old = m.seen
    with torch.no_grad():
        m.seen = 0.5 * m.seen + 0.5 * torch.complex(z.mean(0), z.square().mean(0))
    return z - old.real - 0.3 * old.imag


def complex_in_place(m, z):
    old = m.seen.clone()
    with torch.no_grad():
        m.seen.mul_(0.5).add_(0.5 * torch.complex(z.mean(0), z.square().mean(0)))
    return z - old.real - 0.3 * old.imag


def largest(m, z):
    """A range that a fake quantiser watches."""
    with torch.no_grad():
        m.seen.copy_(torch.maximum(m.seen, z.abs().mean(0)))
    return z / (m.seen + 1)


def stopped(m, z):
    """What the docs advise: the path is part of the state."""
    old = m.seen
    m.seen = bilevel.stop_gradient(0.5 * m.seen + 0.5 * z.mean(0))
    return z - old


def counted(m, z):
    """A counter that scales: an integer, in which nothing is differentiated."""
    m.seen += 1
    return z / (1 + m.seen)


def remembers(how, start=None):
    def build(lam):
        first = torch.zeros(2, dtype=torch.float64) if start is None else start.clone()

        def h(m, x, y, i):
            return weighted(lam)(m.train(), x, y, i)

        def g(m, x, y):
            return error(m.eval(), x, y)

        return Loop(Remembers(how, first), h, g, indexed(), rows(5))

    return build


def in_a_plain_attribute(lam):
    """A tensor in an attribute, which is no buffer."""
    m = Remembers(replaced, torch.zeros(2, dtype=torch.float64))
    del m._buffers["seen"]
    m.seen = torch.zeros(2, dtype=torch.float64)
    return Loop(m, weighted(lam), error, indexed(), rows(5))


def in_a_list(lam):
    """A memory bank: features of earlier steps in a list, closed over."""
    m, bank = mlp(), []

    def h(m, x, y, i):
        z = m[0](x)
        loss = weighted(lam)(m, x, y, i)
        if bank:
            loss = loss + 0.2 * (z - bank[-1]).square().mean()
        bank.append(z.detach())
        return loss

    return Loop(m, h, error, indexed(), rows(5))


def in_a_frozen_parameter(lam):
    """A running mean in a parameter that does not require grad (MAML-Pytorch's vars_bn)."""
    m = Remembers(written, torch.zeros(2, dtype=torch.float64))
    del m._buffers["seen"]
    m.seen = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
    return Loop(m, weighted(lam), error, indexed(), rows(5))


def from_the_loop(lam):
    """A target network: a copy that the user's loop moves between the steps, and that h reads."""
    m = mlp()
    target = mlp().requires_grad_(False)
    target.load_state_dict(m.state_dict())

    def h(m, x, y, i):
        return weighted(lam)(m, x, target(x).squeeze(-1) + 0.5 * y, i)

    def before(k):
        with torch.no_grad():
            for old, new in zip(target.parameters(), m.parameters(), strict=True):
                old.mul_(0.5).add_(0.5 * new)

    return Loop(m, h, error, indexed(), rows(5), before=before)


def in_training_alone(how):
    """g, in eval mode, does not read what the steps have changed; later steps do."""
    return lambda m, z: how(m, z) if m.training else z


ZERO = torch.zeros(2, dtype=torch.complex128)
BUFFERS = {
    "written in place": remembers(written),
    "replaced": remembers(replaced),
    "written through .data": remembers(by_data),
    "complex, replaced": remembers(complex_one, ZERO),
    "complex, in place": remembers(complex_in_place, ZERO),
    "a range": remembers(largest),
    "in place, read by h alone": remembers(in_training_alone(written)),
    "replaced, read by h alone": remembers(in_training_alone(replaced)),
    "complex, read by h alone": remembers(in_training_alone(complex_one), ZERO),
    "a range, read by h alone": remembers(in_training_alone(largest)),
    "in a plain attribute": in_a_plain_attribute,
    "in a list": in_a_list,
    "in a frozen parameter": in_a_frozen_parameter,
    "a target network of the loop": from_the_loop,
}
NAMES = r"'seen'|\bseen\b|buffer|attribute|target|closed-over|frozen"
WHOLE = {
    "stopped": remembers(stopped),
    "a counter": remembers(counted, torch.zeros((), dtype=torch.long)),
}


@constructs(BUFFERS, ALL)
def test_a_state_that_steps_change_and_losses_read(construct, variant):
    keeps_the_promise(construct, variant, NAMES)


@constructs(WHOLE, ALL)
def test_a_buffer_whose_path_is_known_is_right(construct, variant):
    is_right(construct, variant)


# --- refilled between the steps -----------------------------------------------------------------------------------


def refilled(fill, closed=True, aliased=False):
    """One buffer of memory for all batches, as a data loader of NumPy has it."""

    def build(lam):
        m, (x, y, i) = mlp(), indexed()
        memory = x.clone()
        shown = torch.from_numpy(memory.numpy()) if aliased else memory

        def before(k):
            fill(memory, x * (1 + 0.3 * k))

        def closing(m, y, i):
            return (torch.sigmoid(lam[i]) * squares(m, shown, y)).mean()

        if closed:
            return Loop(m, closing, error, (y, i), rows(5), before=before)
        return Loop(m, weighted(lam), error, (shown, y, i), rows(5), before=before)

    return build


def by_numpy(memory, new):
    np.copyto(memory.numpy(), new.numpy())


def one_entry(memory, new):
    memory.numpy()[3, 1] = float(new[3, 1])


def through_data(memory, new):
    memory.data.copy_(new)


def by_storage(memory, new):
    memory.untyped_storage().copy_(new.clone().untyped_storage())


def by_hand(memory, new):
    memory.copy_(new)


def targets_replaced(lam):
    """A coefficient in a closed-over tensor, refilled through a view; the loss is linear in it."""
    m, c = mlp(), torch.zeros(3, dtype=torch.float64)
    view = c.numpy()

    def h(m, x, y, i):
        return weighted(lam)(m, x, y, i) + (c * m[0].weight[0]).sum()

    def before(k):
        view[:] = 0.1 * k

    return Loop(m, h, error, indexed(), rows(5), before=before)


def outer_refilled(lam):
    """The batch of g is refilled after the steps that descend it... and before the hypergradient."""
    m, (x, y) = mlp(), rows(5)

    def before(k):
        y.numpy()[:] = 0.1 * k

    return Loop(m, weighted(lam), error, indexed(), (x, y), before=before)


REFILLED = {
    "closed over, by NumPy": refilled(by_numpy),
    "closed over, one entry by NumPy": refilled(one_entry),
    "closed over, through .data": refilled(through_data),
    "closed over, by its storage": refilled(by_storage),
    "closed over, in place": refilled(by_hand),
    "closed over, an alias of NumPy's memory": refilled(by_numpy, aliased=True),
    "in the batch, by NumPy": refilled(by_numpy, closed=False),
    "in the batch, one entry by NumPy": refilled(one_entry, closed=False),
    "in the batch, through .data": refilled(through_data, closed=False),
    "in the batch, in place": refilled(by_hand, closed=False),
    "in the batch, an alias of NumPy's memory": refilled(by_numpy, closed=False, aliased=True),
    "a coefficient by NumPy": targets_replaced,
}


@constructs(REFILLED, ALL)
def test_a_tensor_that_is_refilled_between_the_steps(construct, variant):
    keeps_the_promise(construct, variant, r"batch of h|refilled|closed-over|[(\[](1, )?(6, )?3,?[)\]]")


@each(ALL)
def test_the_batch_of_g_is_taken_as_it_is(variant):
    is_right(outer_refilled, variant)

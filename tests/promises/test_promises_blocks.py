"""`blocks=`: what a block gives to the loss besides its result, and what it reads besides its input."""

import dataclasses

import torch
from promise import Loop, constructs, each, error, indexed, is_right, keeps_the_promise, rows, squares, weighted
from torch import nn


class Block(nn.Module):
    """A residual block, with what is needed of a balance loss, features and a scale."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.balance = torch.zeros(())
        self.scale = 1.0

    def forward(self, x):
        gate = torch.softmax(self.a(x), -1)
        self.balance = gate.mean(0).square().sum()
        return x + self.scale * torch.tanh(self.b(gate))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return x + self.norm(self.a(x)).tanh()


class Collects(nn.Module):
    """Puts its features where the loss takes them from."""

    def __init__(self, shelf):
        super().__init__()
        self.a, self.shelf = nn.Linear(3, 3), shelf

    def forward(self, x):
        y = self.a(x)
        self.shelf.append(y) if isinstance(self.shelf, list) else self.shelf.update({id(self): y})
        return x + y.tanh()


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    gate: torch.Tensor


class Returns(nn.Module):
    """Returns an object that is no tree of tensors."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        y = self.a(x)
        return Output(x + y.tanh(), y)


class Stack(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([block(), block()]), nn.Linear(3, 1)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            x = y.hidden if isinstance(y, Output) else y
        return self.out(x)


def stack(block, more=None, before=lambda m, k: None, mode=None):
    """Two blocks; `more(model)` is what h adds, `before(model, k)` what the loop does before a step."""

    def build(lam):
        m = Stack(block)

        def h(m, x, y, i):
            if mode:
                m.train()
            loss = weighted(lam)(m, x, y, i)
            return loss if more is None else loss + more(m, lam)

        def g(m, x, y):
            if mode:
                m.eval()
            return error(m, x, y)

        return Loop(m, h, g, indexed(), rows(5), before=lambda k: before(m, k))

    return build


def hooked(lam):
    """Features that a forward hook inside of each block takes."""
    m, seen = Stack(Block), []
    for block in m.blocks:
        block.a.register_forward_hook(lambda module, args, y: seen.append(y))

    def h(m, x, y, i):
        seen.clear()
        loss = weighted(lam)(m, x, y, i)
        return loss + 0.3 * sum(s.square().mean() for s in seen)

    return Loop(m, h, error, indexed(), rows(5))


def shelved(kind):
    def build(lam):
        shelf = kind()
        m = Stack(lambda: Collects(shelf))

        def h(m, x, y, i):
            shelf.clear()
            loss = weighted(lam)(m, x, y, i)
            return loss + 0.3 * sum(s.square().mean() for s in (shelf if kind is list else shelf.values()))

        return Loop(m, h, error, indexed(), rows(5))

    return build


def with_outer_variable(lam):
    """A block whose forward closes over λ."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return x + (self.a(x) * lam[:3]).tanh()

    return Loop(Stack(Scaled), lambda m, x, y, i: squares(m, x, y).mean(), error, indexed(), rows(5))


def momentum(m, k):
    for block in m.blocks:
        block.norm.momentum = 0.5 / (k + 1)


def scale(m, k):
    for block in m.blocks:
        block.scale = 1.0 / (k + 1)


BLOCKS = {
    "a balance loss in an attribute": stack(Block, lambda m, lam: 0.5 * sum(b.balance for b in m.blocks)),
    "a balance loss with a learnable weight": stack(
        Block, lambda m, lam: lam[0].exp() * sum(b.balance for b in m.blocks)
    ),
    "features by a hook": hooked,
    "features in a list": shelved(list),
    "features in a dict": shelved(dict),
    "an object as the result": stack(Returns),
    "a momentum that a schedule moves": stack(Normalised, before=momentum, mode=True),
    "a scale that a schedule moves": stack(Block, before=scale),
    "a weight of a block in a penalty": stack(Block, lambda m, lam: lam[1].exp() * m.blocks[0].a.weight.square().sum()),
    "an outer variable in a block": with_outer_variable,
    "nothing": stack(Block),
}
NAMES = r"attribute|hook|list|balance|momentum|scale|block|feature"


@constructs(BLOCKS, "auto reverse memory unroll")
def test_what_a_block_gives_and_reads(construct, variant):
    keeps_the_promise(construct, variant, NAMES)


@each("auto reverse")
def test_noise_in_a_direction_under_dropout(variant):
    """Both draw with torch, as the advice has it: nothing is left to refuse."""

    def build(lam):
        m = Stack(lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3)))
        noise = lambda d: {n: x + 0.01 * torch.randn_like(x) for n, x in d.items()}
        return Loop(m, weighted(lam), error, indexed(), rows(5), transform=noise)

    keeps_the_promise(build, variant, "noise|direction=.*random|direction=.*draw")
    is_right(build, variant)


def test_blocks_are_taken_where_nothing_stands_against_it():
    """`blocks=` is not merely switched off."""
    from promise import verdict

    found = verdict(BLOCKS["nothing"], "auto")
    assert found.kind == "right"
    assert not found.notes

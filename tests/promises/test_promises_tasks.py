"""`tasks=`: losses that need a value, and what a model keeps in its attributes."""

import torch
from promise import Loop, constructs, each, error, indexed, keeps_the_promise, mlp, opened, rows, weighted
from torch import nn

ALL = "reverse sqrt memory blocks unroll forward tasks"


def tasked(loss):
    """A loss with something that vmap has no value of."""

    def build(lam):
        return Loop(mlp(), lambda m, x, y, i: loss(weighted(lam)(m, x, y, i), m, x), error, indexed(), rows(5))

    return build


def branch(value, m, x):
    return value if value > 0.1 else 2 * value


UNDER_VMAP = {
    "item": tasked(lambda value, m, x: value / (1 + 0 * value.item())),
    "float": tasked(lambda value, m, x: value / (1 + 0 * float(value))),
    "a branch": tasked(branch),
    "numpy": tasked(lambda value, m, x: value + 0 * float(value.detach().numpy())),
    "tolist": tasked(lambda value, m, x: value + 0 * sum(x.sum(1).tolist())),
    "int": tasked(lambda value, m, x: value + 0 * int(x.sum())),
    "a format": tasked(lambda value, m, x: value + 0 * len(f"{value:.3f}")),
    "nonzero": tasked(lambda value, m, x: value + m(x[x.sum(1) > 0]).sum()),
    "data": tasked(lambda value, m, x: value + 0 * value.data),
    "an assertion": tasked(lambda value, m, x: value if bool(torch.isfinite(x).all()) else 0 * value),
    "a random number": tasked(lambda value, m, x: value * (1 + 0 * torch.rand(()))),
    "a write to a closed-over tensor": tasked(lambda value, m, x: value + 0 * LOG.copy_(value.detach())),
}
LOG = torch.zeros((), dtype=torch.float64)
VMAP_NAMES = r"tasks="


@constructs(UNDER_VMAP, "tasks")
def test_tasks_with_what_needs_a_value(construct, variant):
    keeps_the_promise(construct, variant, VMAP_NAMES)


class Remembers(nn.Module):
    """A model that keeps its features in an attribute."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(3, 2), nn.Linear(2, 1)
        self.seen, self.features = [], None
        self.double()

    def forward(self, x):
        self.features = self.a(x)
        self.seen.append(self.features)
        return self.out(self.features.tanh())


@each(ALL)
def test_a_model_that_sets_an_attribute_has_living_tensors_in_it_after_the_block(variant):
    def build(lam):
        return Loop(Remembers(), weighted(lam), error, indexed(), rows(5))

    model = opened(build, variant, lambda block, loop, lam: (block.hypergrad(lam), loop.model)[1])
    for x in (model.features, *model.seen):
        if x is None:
            continue
        try:
            assert repr(x + 1)
        except RuntimeError as why:
            raise AssertionError(f"a dead tensor: {why}") from why

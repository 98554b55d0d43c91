"""A guard against waste: operators and bytes are counted, not seconds, on two problems that people run."""

import pytest
import torch
import torch.nn.functional as F
from problems import weighted
from torch import nn
from torch.func import functional_call

import bilevel_plugin as bilevel
from benchmarks.measure import Counter
from benchmarks.runners import Host

PRODUCTS = "mm", "addmm", "bmm"
VIEWS = "detach", "t", "transpose", "view", "_unsafe_view", "expand", "as_strided", "alias", "unsqueeze"


def per_step(engine):
    """(matrix products, operators other than views) that one more step costs: data cleaning, a linear model."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(7, 3), torch.randn(20, 7), torch.randint(3, (20,))
    lam = torch.zeros(20, requires_grad=True)

    h, g = weighted(lam)

    def by_hand(steps):
        w = {f"model.{n}": p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        for _ in range(steps):
            loss = 0.1 * functional_call(Host(model), w, (h, (x, y)))
            grads = torch.autograd.grad(loss, list(w.values()), create_graph=True)
            w = {n: p - d for (n, p), d in zip(w.items(), grads, strict=True)}
        torch.autograd.grad(functional_call(Host(model), w, (g, (x, y))), lam)

    def by_us(steps):
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, hypergrad=engine) as loop:
            loop.run(steps, x, y, outer=(x, y))
            loop.hypergrad(lam)

    def run(steps):
        with Counter() as count:
            by_hand(steps) if engine is None else by_us(steps)
        return count.of(*PRODUCTS), count.count - count.of(*VIEWS)

    return tuple((b - a) / 4 for a, b in zip(run(4), run(8), strict=True))


@pytest.mark.parametrize(
    ("engine", "products", "operators"),
    [
        ("unroll", 4, 2),
        (bilevel.Reverse(memory="1GiB"), 4, 4),
        ("reverse", 5, 26),
        (bilevel.Reverse(checkpoint=4), 6.5, 38),  # 3 of 4 steps are run once more
    ],
)
def test_data_cleaning(engine, products, operators):
    found, raw = per_step(engine), per_step(None)
    assert raw[0] == 4
    assert found[0] == products
    assert found[1] - raw[1] <= operators  # what a step has beyond the loop that one writes by hand


def test_an_encoder_is_gone_through_once_whatever_the_number_of_steps():
    """Few-shot: 4 tasks, features in the batch. The convolutions are those of one forward and one backward pass."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
    images, y = torch.randn(4 * 10, 1, 8, 8), torch.arange(5).repeat(4, 2)
    head = nn.Linear(64, 5)
    loss = lambda head, f, y: F.cross_entropy(head(f), y)

    def run(steps, engine):
        with Counter() as count:
            f = encoder(images).reshape(4, 10, -1)
            with bilevel.inner(head, loss, loss, solver="gd", lr=0.1, tasks=4, hypergrad=engine) as loop:
                loop.run(steps, f, y, outer=(f, y))
                loop.backward()
        return count.of("convolution"), count.of("convolution_backward"), count.of(*PRODUCTS)

    for engine, products in (("unroll", 6), ("reverse", 8), (bilevel.Reverse(memory="1GiB"), 6)):
        first, second = run(3, engine), run(5, engine)
        assert first[:2] == second[:2] == (2, 2)
        assert (second[2] - first[2]) / 2 == products

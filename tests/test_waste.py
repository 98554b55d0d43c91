"""A guard against waste: operators and bytes are counted, not seconds, on two problems that people run."""

import pytest
import torch
import torch.nn.functional as F
from problems import weighted
from torch import nn
from torch.func import functional_call

import bilevel_plugin as bilevel
from benchmarks.measure import Counter, live
from benchmarks.runners import Host
from bilevel_plugin.pullback import lean

PRODUCTS = "mm", "addmm", "bmm"
VIEWS = "detach", "t", "transpose", "view", "_unsafe_view", "expand", "as_strided", "alias", "unsqueeze"


def cleaning(engine):
    """run(steps): data cleaning with a linear model, by an engine, or by hand if it is None; and the bytes of w."""
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
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine, check=False) as loop:
            loop.run(steps, x, y, outer=(x, y))
            loop.hypergrad(lam)

    return by_hand if engine is None else by_us, sum(p.nbytes for p in model.parameters())


def few_shot(engine):
    """The same for 4 tasks of 5 ways, whose features come from an encoder; by hand, heads as one batched product."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
    images, y = torch.randn(4 * 10, 1, 8, 8), torch.arange(5).repeat(4, 2)
    head, lam = nn.Linear(64, 5), list(encoder.parameters())
    loss = lambda head, f, y: F.cross_entropy(head(f), y)

    def by_hand(steps):
        f = encoder(images).reshape(4, 10, -1)
        w = [p.detach().expand(4, *p.shape).clone().requires_grad_() for p in head.parameters()]
        total = lambda: 4 * F.cross_entropy(torch.baddbmm(w[1][:, None], f, w[0].mT).flatten(0, 1), y.flatten())
        for _ in range(steps):
            grads = torch.autograd.grad(0.1 * total(), w, create_graph=True)
            w = [p - d for p, d in zip(w, grads, strict=True)]
        torch.autograd.grad(total(), lam)

    def by_us(steps):
        f = encoder(images).reshape(4, 10, -1)
        with bilevel.inner(head, loss, loss, solver="gd", lr=0.1, tasks=4, engine=engine, check=False) as loop:
            loop.run(steps, f, y, outer=(f, y))
            loop.hypergrad(lam)

    return by_hand if engine is None else by_us, 4 * sum(p.nbytes for p in head.parameters())


def counted(run, steps):
    with Counter() as count:
        run(steps)
    return count


def per_step(engine):
    """(matrix products, operators other than views) that one more step of data cleaning costs."""
    run, _ = cleaning(engine)
    few, many = counted(run, 4), counted(run, 8)
    products = many.of(*PRODUCTS) - few.of(*PRODUCTS)
    return products / 4, (many.count - many.of(*VIEWS) - few.count + few.of(*VIEWS)) / 4


@pytest.mark.parametrize(
    ("engine", "products", "operators"),
    [
        ("unroll", 4, 2),
        (bilevel.Reverse(memory="1GiB"), 4, 4),
        ("reverse", 5, 26),
        (bilevel.Reverse(checkpoint=4), 6.5, 38),  # 3 of 4 steps are run once more
    ],
)
def test_data_cleaning(engine, products, operators, monkeypatch):
    monkeypatch.setattr(lean, "LARGE", 0)  # as for a large model, whose products are left out
    found, raw = per_step(engine), per_step(None)
    assert raw[0] == 4
    assert found[0] == products
    assert found[1] - raw[1] <= operators  # what a step has beyond the loop that one writes by hand


@pytest.mark.parametrize(("engine", "products"), [("unroll", 6), ("reverse", 8), (bilevel.Reverse(memory="1GiB"), 6)])
def test_an_encoder_is_gone_through_once_whatever_the_number_of_steps(engine, products):
    """Few-shot: the convolutions are those of one forward and one backward pass."""
    few, many = (counted(few_shot(engine)[0], steps) for steps in (3, 5))
    for count in (few, many):
        assert (count.of("convolution"), count.of("convolution_backward")) == (2, 2)
    assert (many.of(*PRODUCTS) - few.of(*PRODUCTS)) / 2 == products


@pytest.mark.parametrize("problem", [cleaning, few_shot])
def test_bytes_that_a_step_leaves_behind(problem):
    """One more step: the weights, if its graph is not kept; else what the loop by hand keeps, and no copy of it."""

    def stored(engine):
        run, weights = problem(engine)
        run(2)
        return (live(lambda: run(96)) - live(lambda: run(32))) / 64, weights

    by_hand, weights = stored(None)
    assert stored("reverse")[0] <= 1.3 * weights  # rows are bought in bulk
    assert stored(bilevel.Reverse("sqrt"))[0] <= 0.2 * weights
    assert stored("unroll")[0] <= 1.1 * by_hand
    assert stored(bilevel.Reverse(memory="1GiB"))[0] <= 1.1 * by_hand + weights


@pytest.mark.parametrize("engine", ["reverse", bilevel.Reverse("sqrt")], ids=["reverse", "sqrt"])
def test_bytes_that_an_outer_loss_on_the_way_leaves_behind(engine):
    """None to speak of beside the weights, where its graph has forty times their bytes."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(7, 3), torch.randn(20, 7), torch.randint(3, (20,))
    weights, lam = sum(p.nbytes for p in model.parameters()), torch.zeros(20, requires_grad=True)
    h, g = weighted(lam)

    def run(steps, losses):
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine, check=False) as loop:
            for _ in range(steps):
                loop.step(x, y)
                if losses:
                    loop.add_outer_loss(outer=(x.repeat(2, 1), y.repeat(2)) if losses == "a batch each" else (x, y))
            if losses:
                loop.hypergrad(lam)

    run(2, "one batch")
    stored = lambda losses: (live(lambda: run(96, losses)) - live(lambda: run(32, losses))) / 64
    assert stored("one batch") <= stored(None) + 0.3 * weights
    batch = 2 * (x.nbytes + y.nbytes)
    assert stored("a batch each") <= stored(None) + 0.3 * weights + 1.1 * batch

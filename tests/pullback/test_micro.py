"""."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Cleaning, M, N, relative, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel
from benchmarks.measure import live


def same(one, other, tol=1e-12):
    assert len(one) == len(other)
    for x, y in zip(one, other, strict=True):
        assert relative(x, y) < tol


ENGINES = {
    "reverse": "reverse",
    "checkpoint": bilevel.Reverse(checkpoint=2),
    "sqrt": bilevel.Reverse(checkpoint="sqrt"),
    "truncate": bilevel.Reverse(truncate=2),
    "memory": bilevel.Reverse(memory="1GiB"),
    "little memory": bilevel.Reverse(memory="60kB"),
    "unroll": "unroll",
    "forward": "forward",
}


def halved(d):
    return {n: x / 2 + x.abs().sum() * 0.01 for n, x in d.items()}


OPTIONS = {
    "sgd": {},
    "gd": {"solver": "gd"},
    "momentum": {"lr": None, "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)},
    "adam": {"lr": None, "optimizer": lambda m: torch.optim.Adam(m.parameters(), lr=0.05)},
    "clip": {"clip": 0.1},
    "direction": {"direction": halved},
}


def made(options, model):
    return {n: x(model) if n == "optimizer" else x for n, x in options.items()}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_with_every_update(engine, options):
    data = Cleaning()
    whole, parts = (
        data.run(micro, steps=4, engine=ENGINES[engine], **made(OPTIONS[options], data.model)) for micro in (None, M)
    )
    same(parts, whole)


@pytest.mark.parametrize("engine", ["cg", "neumann"])
def test_implicit_engines(engine):
    data = Cleaning()
    rule = bilevel.BiGSAM(0.5, alpha=bilevel.constant(0.6))
    data.h = lambda model, x, y, rows: (
        Cleaning.h(data, model, x, y, rows) + sum(p.square().sum() for p in model.parameters())
    )
    whole, parts = (data.run(m, steps=200, engine=engine, solver=rule, lr=None) for m in (None, M))
    same(parts, whole, 1e-8)  # the linear systems are solved to within 1e-6, by the same iterations


@pytest.mark.parametrize("micro", [1, 2, 7, N, 3 * N])
@pytest.mark.parametrize("options", ["sgd", "adam"])
def test_any_number_of_parts(micro, options):
    """Also more than there are samples, and other ones for h than for g."""
    data = Cleaning()
    whole, parts = (data.run(m, **made(OPTIONS[options], data.model)) for m in (None, micro))
    same(parts, whole)


@given(
    n=st.integers(1, 9),
    micro=st.integers(1, 11),
    reduction=st.sampled_from(["mean", "sum"]),
    options=st.sampled_from(["sgd", "momentum", "adam"]),
    checkpoint=st.sampled_from([1, 2, "sqrt"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_whatever_the_sizes(n, micro, reduction, options, checkpoint, seed):
    data = Cleaning(seed, n)
    if reduction == "sum":
        data.h = lambda model, x, y, rows: (
            (data.lam[rows].exp() * F.cross_entropy(model(x), y, reduction="none")).sum() * (0.2 + data.scale)
        )
    engine = bilevel.Reverse(checkpoint=checkpoint)
    whole, parts = (data.run(m, engine=engine, **made(OPTIONS[options], data.model)) for m in (None, micro))
    same(parts, whole, 1e-11)


def test_the_derivative_against_differences_of_the_plain_loop():
    data = Cleaning()
    found = data.run(M, solver="gd")[1]
    v = torch.randn(20, generator=torch.Generator().manual_seed(3)).double()

    def plain(by):
        weights = {n: p.detach().clone() for n, p in data.model.named_parameters()}
        data.lam = (lam + by * v).requires_grad_()
        for _ in range(3):
            loss = data.h(data.model, data.x, data.y, data.rows)
            grads = torch.autograd.grad(loss, list(data.model.parameters()))
            with torch.no_grad():
                for p, d in zip(data.model.parameters(), grads, strict=True):
                    p -= 0.2 * d
        value = float(data.g(data.model, data.xv, data.yv).detach())
        data.model.load_state_dict(weights)
        return value

    lam = data.lam.detach()
    expected = (plain(1e-4) - plain(-1e-4)) / 2e-4
    assert abs(float(found @ v) - expected) < 1e-6 * abs(expected)


@pytest.mark.parametrize("engine", ["reverse", bilevel.Reverse(checkpoint=2), "unroll", "forward"])
def test_accumulate_in_parts_and_a_step_of_what_was_gathered(engine):
    data = Cleaning()

    def run(micro):
        with bilevel.inner(data.model, data.h, data.g, lr=0.2, engine=engine, check=False) as loop:
            for _ in range(2):
                for rows in (slice(0, 7), slice(7, N)):
                    loop.accumulate(data.x[rows], data.y[rows], data.rows[rows], micro=micro)
                loop.step(outer=(data.xv, data.yv), micro=micro)
            return loop.hypergrad(data.inputs)

    same(run(3), run(None))


@pytest.mark.parametrize("engine", ["reverse", "unroll", bilevel.Reverse(memory="1GiB")])
def test_features_of_an_encoder_get_their_gradient(engine):
    """A tensor of the batch with a graph behind it is cut off, and its stand-in is sliced."""
    data = Cleaning()
    encoder = nn.Linear(4, 4).double()

    def run(micro):
        x, xv = encoder(data.x), encoder(data.xv)
        with bilevel.inner(data.model, data.h, data.g, lr=0.2, engine=engine, check=False) as loop:
            loop.run(3, x, data.y, data.rows, outer=(xv, data.yv), micro=micro)
            return list(loop.hypergrad(encoder).values())

    same(run(M), run(None))


def test_batches_by_name_in_trees_with_lists_numbers_and_arrays():
    data = Cleaning()
    names = [str(i) for i in range(N)]

    def h(model, pair, *, rest, temperature):
        x, y = pair["x"], rest[0]
        weights = torch.tensor([1 + int(name) / 10 for name in rest[1]], dtype=torch.float64)
        shift = torch.from_numpy(rest[2])
        return (
            weights * F.cross_entropy(model(x + rest[3]) / temperature + shift[:, None], y, reduction="none")
        ).mean()

    def run(micro):
        with bilevel.inner(data.model, h, data.g, lr=0.2, check=False) as loop:
            shared = torch.full((1, 4), 0.5, dtype=torch.float64)
            rest = [data.y, names, np.linspace(0, 1, N), shared]
            for _ in range(2):
                loop.step({"x": data.x}, rest=rest, temperature=data.scale + 1, outer=(data.xv, data.yv), micro=micro)
            return [loop.hypergrad(data.scale)]

    same(run(M), run(None))


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_tasks_are_split_along_the_second_dimension(engine):
    data = Cleaning()
    x, y = torch.randn(3, 10, 4).double(), torch.randint(3, (3, 10))
    h = lambda model, x, y: F.cross_entropy(model(x) * data.scale.exp(), y)

    def run(micro):
        with bilevel.inner(data.model, h, h, lr=0.2, tasks=3, engine=engine, check=False) as loop:
            loop.run(3, x, y, outer=(x, y), micro=micro)
            return [loop.hypergrad(data.scale), *(w.detach() for w in loop.weights.values())]

    same(run(4), run(None))


def test_dropout_draws_the_same_numbers_again():
    """In parts it draws others than for the whole batch: against unroll, which runs nothing again."""
    data = Cleaning()
    data.model.insert(2, nn.Dropout(0.3))
    for options in ("momentum", "adam"):
        runs = [data.run(M, engine=e, **made(OPTIONS[options], data.model)) for e in ("reverse", "unroll")]
        runs += [data.run(M, engine=bilevel.Reverse(checkpoint=2), **made(OPTIONS[options], data.model))]
        same(runs[0], runs[1], 1e-10)
        same(runs[2], runs[1], 1e-10)


def test_running_statistics_of_other_steps_are_followed():
    """Steps in training mode move them, and a step in parts reads them, in eval mode."""
    data = Cleaning()
    data.model.insert(1, nn.BatchNorm1d(6).double())

    def run(micro, engine):
        with bilevel.inner(data.model, data.h, data.g, lr=0.2, engine=engine, check=False) as loop:
            for _ in range(2):
                loop.train().step(data.x, data.y, data.rows, outer=(data.xv, data.yv))
                loop.eval().step(data.x, data.y, data.rows, micro=micro)
            return loop.hypergrad(data.inputs)

    for engine in ("reverse", "unroll"):
        same(run(M, engine), run(None, "unroll"), 1e-10)


LOSSES = {
    "stop_gradient": lambda m, x, y: (
        F.cross_entropy(m(x), y, reduction="none") * bilevel.stop_gradient(m(x)).exp().sum(1)
    ).mean(),
    "checkpointed": lambda m, x, y: F.cross_entropy(checkpoint(m, x, use_reentrant=False), y),
    "a parameter that is closed over": lambda m, x, y: F.cross_entropy(m(x), y) + m[0].weight.square().sum(),
}


@pytest.mark.parametrize("options", ["sgd", "adam"])
@pytest.mark.parametrize("name", LOSSES)
def test_what_losses_do(name, options):
    data = Cleaning()
    data.h = lambda model, x, y, rows: LOSSES[name](model, x, y) * (1 + data.lam[rows].sum() * 0 + data.scale)
    whole, parts = (data.run(m, inputs=[data.scale], **made(OPTIONS[options], data.model)) for m in (None, M))
    same(parts, whole)


def test_a_part_of_the_weights():
    data = Cleaning()

    def run(micro):
        with bilevel.inner(data.model, data.h, data.g, lr=0.2, check=False) as loop:
            for part in (data.model[0], data.model[2], data.model[0]):
                loop.step(data.x, data.y, data.rows, outer=(data.xv, data.yv), only=part, micro=micro)
            return loop.hypergrad(data.inputs)

    same(run(M), run(None))


def test_under_autocast():
    data = Cleaning()
    data.model.float()
    data.x, data.xv = data.x.float(), data.xv.float()

    def run(micro, engine):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return data.run(micro, engine=engine)[2]

    assert relative(run(M, "reverse"), run(M, "unroll")) < 0.02
    assert relative(run(M, "reverse"), run(None, "reverse")) < 0.05


def test_losses_are_those_of_the_whole_batch_and_aux_is_a_list():
    data = Cleaning()
    h = lambda model, x, y: (F.cross_entropy(model(x), y), model(x))
    with bilevel.inner(data.model, h, data.g, check=False) as loop:
        whole = loop.step(data.x, data.y, outer=(data.xv, data.yv))
    with bilevel.inner(data.model, h, data.g, check=False) as loop:
        parts = loop.step(data.x, data.y, outer=(data.xv, data.yv), micro=M)
    same(parts[:1], whole[:1])
    assert [len(x) for x in parts.aux] == [3, 3, 2, 2, 2]
    assert not any(x.requires_grad for x in parts.aux)
    same([torch.cat(parts.aux)], [whole.aux])


def test_an_outer_loss_without_a_batch_goes_whole():
    data = Cleaning()
    g = lambda model: sum((p - data.scale).square().sum() for p in model.parameters())

    def run(micro):
        with bilevel.inner(data.model, data.h, g, lr=0.1, check=False) as loop:
            loop.run(3, data.x, data.y, data.rows, micro=micro)
            return loop.hypergrad(data.inputs)

    same(run(4), run(None))


def test_the_sentinel_looks_at_a_part():
    data = Cleaning()
    wrong = lambda model, x, y: F.cross_entropy(model(x), y) * (1 + model(x).detach().square().mean())
    with bilevel.inner(data.model, wrong, data.g, lr=0.2, check="always") as loop:
        loop.run(2, data.x, data.y, outer=(data.xv, data.yv), micro=3, reduction="mean")
        with pytest.warns(bilevel.DerivativeWarning, match="second derivative"):
            loop.hypergrad(data.scale)
    with bilevel.inner(data.model, data.h, data.g, lr=0.2, check="always") as loop:
        loop.run(2, data.x, data.y, data.rows, outer=(data.xv, data.yv), micro=3)
        loop.hypergrad(data.inputs)


def test_compiled_loops_run_steps_in_parts_eagerly_and_say_so(compiler):
    data = Cleaning()
    with pytest.warns(UserWarning, match="does not apply to steps with micro="):
        parts = data.run(M, engine=bilevel.Reverse(compile=True))
    same(parts, data.run(None))


def test_a_loss_that_is_not_finite_is_told_of_by_the_step():
    data = Cleaning()
    with pytest.raises(FloatingPointError, match="h is nan"):
        step(data, lambda m, x, y: m(x).mean() * float("nan"))


# --- memory ---


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam])
def test_memory_is_that_of_a_part(optimizer):
    """Peak bytes of tensors in steps and sweep on a small CNN: with 8 parts at most a quarter."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(4),
        nn.Flatten(), nn.Linear(8 * 16, 4),
    )  # fmt: skip
    x, y, lam = torch.randn(64, 1, 16, 16), torch.randint(4, (64,)), torch.zeros(64, requires_grad=True)
    rows = torch.arange(64)
    h = lambda m, x, y, i: (lam[i].sigmoid() * F.cross_entropy(m(x), y, reduction="none")).mean()
    g = lambda m: sum(p.square().sum() for p in m.parameters())

    def run(micro):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            how = {"lr": 0.1} if optimizer is None else {"optimizer": optimizer(model.parameters())}
            with bilevel.inner(model, h, g, solver="gd", check=False, **how) as loop:
                loop.run(2, x, y, rows, micro=micro)
                loop.hypergrad(lam)

    run(None)
    assert live(lambda: run(8)) <= live(lambda: run(None)) / 4

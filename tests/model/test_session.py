"""What a block found in a model is there again after it, however it ended; blocks on one model nest, or are refused."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import ENGINES
from plain_loop import (
    MODELS,
    STEPS,
    Mine,
    assert_same,
    block,
    data,
    everything,
    losses,
    mlp,
    plain,
    sgd,
    start,
    tensors,
    train_and_eval,
    unchanged,
    worn,
)
from problems import refused, says, weighted
from torch import Tensor, nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


def raising(f: Callable[..., Tensor], at: int, error: type[BaseException]) -> Callable[..., Tensor]:
    calls = 0

    def loss(model, *batch):
        nonlocal calls
        calls += 1
        if calls == at:
            model(*batch[:1])  # buffers have moved by now
            model.eval()
            raise error("in a loss")  # a new one each time: what is raised twice carries both tracebacks
        return f(model, *batch)

    return loss


def end(loop, batch, outer, lam):
    loop.run(3, *batch, outer=outer)
    loop.hypergrad(lam)


def in_the_body(loop, batch, outer, lam):
    loop.run(2, *batch, outer=outer)
    raise Mine("in the body")


WORN = ["batchnorm and dropout", "lstm", "pruned", "old weight norm", "old spectral norm", "orthogonal", "odd", "tied"]


OTHERS = ["sqrt", "memory", "forward"]


WAYS_OUT: dict[
    str, tuple[Callable[..., Any], dict[str, tuple[int, type[BaseException]]], type[BaseException] | None]
] = {
    "the end": (end, {}, None),
    "an exception in the body": (in_the_body, {}, Mine),
    "an exception in h, at first": (end, {"h": (1, Mine)}, Mine),
    "an exception in h": (end, {"h": (3, Mine)}, Mine),
    "an interrupt in h": (end, {"h": (2, KeyboardInterrupt)}, KeyboardInterrupt),
    "an exception in g": (end, {"g": (1, Mine)}, Mine),
    "an interrupt in g": (end, {"g": (1, KeyboardInterrupt)}, KeyboardInterrupt),
    "memory that is out": (end, {"h": (3, MemoryError)}, MemoryError),
}


@pytest.mark.parametrize(
    ("way", "engine"),
    [*itertools.product(WAYS_OUT, ["reverse", "unroll"]), *itertools.product(["the end", "an exception in g"], OTHERS)],
)
@pytest.mark.parametrize("name", WORN)
def test_everything_is_what_it_was(name, way, engine):
    body, breaks, error = WAYS_OUT[way]
    model, lam, batch, outer = worn(name), start(), data(), data(5)
    h, g = weighted(lam)
    h, g = (raising(f, *breaks[n]) if n in breaks else f for n, f in (("h", h), ("g", g)))
    before = everything(model)
    with pytest.raises(error, match=r"^in (a loss|the body)$") if error else contextlib.nullcontext():
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=ENGINES[engine], check=False) as loop:
            body(loop, batch, outer, lam)
    unchanged(model, before)
    with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, check=False) as loop:  # nothing is left held
        loop.run(2, *batch, outer=outer)
    unchanged(model, before)


def test_modes_and_flags_that_the_body_changes_are_put_back():
    model, lam, batch, outer = worn("lstm"), start(), data(), data(5)
    model.add_module("words", nn.Embedding(3, 2, sparse=True))
    before = everything(model)
    with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, check=False) as loop:
        loop.run(2, *batch, outer=outer)
        for module in model.modules():
            module.training = not module.training
        for p in model.parameters():
            p.requires_grad_(not p.requires_grad)
    unchanged(model, before)
    assert model.words.sparse  # its gradients are dense in the block


@pytest.mark.parametrize("engine", ["reverse", "sqrt"])
@pytest.mark.parametrize("error", [Mine, KeyboardInterrupt, MemoryError])
def test_an_exception_in_a_replay_leaves_the_last_weights_in_the_model(engine, error):
    """In hypergrad the model goes back through w_{K−1}, …: the block goes on from w_K all the same."""
    build, lam = losses(MODELS["batchnorm and dropout"], train_and_eval), start()
    expected, whole = plain(build, lam, steps=STEPS + 1), block(build, lam, steps=STEPS + 1)
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    before = everything(model)
    torch.manual_seed(1)
    h = raising(h, STEPS + 2, error)
    with bilevel.inner(model, h, g, solver="gd", optimizer=sgd(model), engine=ENGINES[engine], check=False) as loop:
        loop.run(STEPS, *batch, outer=outer)
        held, random = tensors(model), torch.get_rng_state()
        with pytest.raises(error, match=r"^in a loss$"):
            loop.hypergrad(lam)
        assert_same(tensors(model), held)
        assert all(m.training for m in model.modules())
        torch.set_rng_state(random)
        loop.step(*batch, outer=outer)
        assert_same(tensors(model), expected.state)
        torch.testing.assert_close(loop.hypergrad(lam), whole.grad, rtol=1e-12, atol=0)
    unchanged(model, before)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("how", ["dropped", "closed", "thrown into"])
def test_an_abandoned_generator(how, engine):
    model, lam, batch, outer = worn("lstm"), start(), data(), data(5)
    before = everything(model)

    def train():
        with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
            while True:
                yield float(loop.step(*batch, outer=outer).h)

    running = train()
    assert next(running) != next(running)
    if how == "closed":
        running.close()
    elif how == "thrown into":
        with pytest.raises(Mine):
            running.throw(Mine())
    del running
    gc.collect()
    unchanged(model, before)


@pytest.mark.parametrize("second", ["reverse", "unroll", "memory"])
@pytest.mark.parametrize("first", ["reverse", "unroll"])
@pytest.mark.parametrize("out_of_order", [False, True])
def test_two_blocks_on_one_model(first, second, out_of_order):
    """The second starts from the first one's weights; whichever closes last, the model is what it was before both."""
    model, lam, batch, outer = worn("lstm"), start(), data(), data(5)
    before = everything(model)
    blocks = [
        bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, engine=ENGINES[e], check=False)
        for e in (first, second)
    ]
    one = blocks[0].__enter__()
    one.run(2, *batch, outer=outer)
    middle = tensors(model)
    model.train(not model.training)  # which is not how the first block found it
    two = blocks[1].__enter__()
    assert_same(tensors(model), middle)
    two.run(2, *batch, outer=outer)
    last = tensors(model)
    if out_of_order:
        blocks[0].__exit__(None, None, None)
        assert_same(tensors(model), last)
        two.step(*batch, outer=outer)
        got = two.hypergrad(lam)
        blocks[1].__exit__(None, None, None)
    else:
        blocks[1].__exit__(None, None, None)
        assert_same(tensors(model), middle)
        one.step(*batch, outer=outer)
        got = one.hypergrad(lam)
        blocks[0].__exit__(None, None, None)
    unchanged(model, before)
    other = worn("lstm")
    with torch.no_grad():
        for n, p in other.named_parameters():
            p.copy_(middle[n] if out_of_order else p)
    with bilevel.inner(other, *weighted(lam), solver="gd", lr=0.1, check=False) as loop:
        loop.run(3, *batch, outer=outer)
        torch.testing.assert_close(got, loop.hypergrad(lam), rtol=1e-10, atol=1e-14)


def test_an_exception_through_two_blocks():
    model, lam, batch, outer = worn("pruned"), start(), data(), data(5)
    before = everything(model)
    options = {"solver": "gd", "lr": 0.1, "check": False}
    with pytest.raises(Mine), bilevel.inner(model, *weighted(lam), **options) as one:
        one.run(2, *batch, outer=outer)
        with bilevel.inner(model, *weighted(lam), engine="unroll", **options) as two:
            two.run(2, *batch, outer=outer)
            raise Mine
    unchanged(model, before)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_steps_of_two_blocks_in_turns(engine):
    """Two generators on one model, one step each: refused, and the model is put back."""
    build, lam = losses(mlp), start()
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    before = everything(model)

    def train():
        with bilevel.inner(model, h, g, solver="gd", optimizer=sgd(model), engine=engine, check=False) as loop:
            for _ in range(2):
                loop.step(*batch, outer=outer)
                yield None
            yield loop.hypergrad(lam)

    one, two = train(), train()
    try:
        with refused("block"):
            for _ in range(2):
                next(one)
                next(two)
    finally:
        one.close()
        two.close()
    unchanged(model, before)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_a_commit_in_a_nested_block_is_a_change_by_hand(engine):
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    before = everything(model)
    options = {"solver": "gd", "lr": 0.1, "check": False}
    words = "was changed by hand after step k = 2"
    with refused(words), bilevel.inner(model, *weighted(lam), engine=engine, **options) as one:
        one.run(2, *batch, outer=outer)
        with bilevel.inner(model, *weighted(lam), **options) as two:
            two.step(*batch, outer=outer)
            two.commit_()
        one.step(*batch, outer=outer)
    unchanged(model, before)


def test_commit_keeps_what_the_plain_loop_ends_with(engine):
    build, lam = losses(MODELS["batchnorm and dropout"], train_and_eval), start()
    expected = plain(build, lam)
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    parameters = [(p, p.data_ptr()) for p in model.parameters()]
    torch.manual_seed(1)
    with bilevel.inner(model, h, g, solver="gd", optimizer=sgd(model), engine=engine, check=False) as loop:
        loop.run(STEPS, *batch, outer=outer)
        loop.commit_()
        loop.hypergrad(lam)
        loop.step(*batch, outer=outer)
    assert_same(tensors(model), expected.state, False)
    assert all(p is q and p.data_ptr() == at for p, (q, at) in zip(model.parameters(), parameters, strict=True))
    assert all(p.requires_grad and p.is_leaf and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["the model", "a module around it"])
@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_a_second_thread_with_the_same_model_is_refused(engine, wrap):
    model, lam, batch, outer = worn("lstm"), start(), data(), data(5)
    before = everything(model)
    caught: list[BaseException] = []

    def another():
        try:
            with bilevel.inner(wrap(model), *weighted(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
                loop.run(2, *batch, outer=outer)
        except BaseException as error:
            caught.append(error)

    def in_a_thread():
        thread = threading.Thread(target=another)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "it waits for the other block to end"

    with bilevel.inner(model, *weighted(lam), solver="gd", lr=0.1, engine=engine, check=False) as loop:
        loop.run(2, *batch, outer=outer)
        held = tensors(model)
        in_a_thread()
        assert_same(tensors(model), held)
        loop.step(*batch, outer=outer)
        loop.hypergrad(lam)
    unchanged(model, before)
    (error,) = caught
    assert isinstance(error, RuntimeError)
    says(error, ("thread", "copy"))
    caught.clear()
    in_a_thread()  # the block has ended: nobody else has it now
    assert not caught
    unchanged(model, before)

"""Many outer losses in one sweep: a vector g or `loss=` gives a row for each entry, equal to a sweep for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel
from bilevel_plugin.autograd import rows
from bilevel_plugin.autograd.look import hooks_on_saved

pytestmark = pytest.mark.usefixtures("double")
ROWS, QUERIES, EPS = 9, 4, 1e-12


class Opaque(torch.autograd.Function):
    """x³ by a backward that reads a number, which no vmap allows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, a: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * a * x**2 if float(a.detach().abs().sum()) >= 0 else a


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Opaque.apply(x)


class Again(nn.Module):
    """Dropout under activation checkpointing, whose mask is drawn again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)


def between(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), middle, nn.Linear(6, 3))


MODELS = {
    "linear": lambda: nn.Linear(5, 3),
    "tanh": lambda: between(nn.Identity()),
    "batch norm": lambda: between(nn.BatchNorm1d(6)),
    "dropout": lambda: between(nn.Dropout(0.3)),
    "layer norm": lambda: between(nn.LayerNorm(6)),
    "convolution": lambda: between(
        nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3, padding=1), nn.AvgPool1d(2), nn.Flatten())
    ),
    "attention": lambda: between(
        nn.Sequential(nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True), nn.Flatten())
    ),
    "no vmap": lambda: between(Cubed()),
    "checkpointing": lambda: between(Again()),
}
OPTIMIZERS = {
    "rate": None,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02, eps=1e-1),
}
ENGINES: dict[str, Any] = {
    "reverse": "reverse",
    "sqrt": bilevel.Reverse("sqrt"),
    "memory": bilevel.Reverse(memory="1GiB"),
    "truncate": bilevel.Reverse(truncate=2),
    "blocks": bilevel.Reverse(blocks=nn.Linear),
    "unroll": "unroll",
    "forward": "forward",
}
if hooks_on_saved is None:  # torch 2.6, where blocks= is off
    del ENGINES["blocks"]


class Problem:
    def __init__(self, model: str = "tanh", optimizer: str = "rate", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = MODELS[model]()
        self.x, self.y = torch.randn(ROWS, 5), torch.randint(3, (ROWS,))
        self.test = torch.randn(QUERIES, 5), torch.randint(3, (QUERIES,))
        self.lam = torch.randn(ROWS).requires_grad_()
        self.heat = torch.tensor(0.2, requires_grad=True)
        self.rate = torch.tensor(0.1, requires_grad=True)
        self.inputs = [self.lam, self.heat, *([self.rate] if optimizer == "rate" else [])]
        self.optimizer = OPTIMIZERS[optimizer]

    def h(self, model: nn.Module) -> Tensor:
        model.train()
        return (self.lam.sigmoid() * F.cross_entropy(model(self.x), self.y, reduction="none")).mean()

    def g(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each query."""
        model.eval()
        return F.cross_entropy(self.heat.exp() * model(x), y, reduction="none")

    def block(self, engine: Any, **options: Any) -> Any:
        made = {"lr": self.rate} if self.optimizer is None else {"optimizer": self.optimizer(self.net.parameters())}
        return bilevel.inner(self.net, self.h, self.g, solver="gd", engine=engine, **made, **options)


def one_by_one(loop: Any, inputs: list[Tensor], batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return what Q sweeps find."""
    x, y = batch
    each = [loop.hypergrad(inputs, outer=(x[i : i + 1], y[i : i + 1])) for i in range(len(x))]
    return [
        torch.stack([g.reshape(lam.shape) for g in of_input])
        for lam, of_input in zip(inputs, zip(*each, strict=True), strict=True)
    ]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape
        assert float((x - y).norm()) <= EPS * max(float(y.norm()), 1e-3)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    model=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    engine=st.sampled_from(sorted(ENGINES)),
    steps=st.integers(0, 4),
    queries=st.sampled_from([None, 1, 3, 4, 9]),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore:bilevel.Reverse. with blocks=", "ignore:bilevel.Reverse. blocks= is off")
def test_a_vector_gives_the_rows_of_as_many_sweeps(model, optimizer, engine, steps, queries, seed):
    problem = Problem(model, optimizer, seed)
    with problem.block(ENGINES[engine]) as loop:
        for _ in range(steps):
            loop.step(outer=problem.test)
        options = {"outer": problem.test, "allow_unused": True}
        inputs = problem.inputs if steps else [problem.heat]
        found = loop.hypergrad(inputs, queries=queries, **options)
        assert_same(found, one_by_one(loop, inputs, problem.test))


@pytest.mark.parametrize("engine", [bilevel.CG(tol=1e-14), bilevel.Neumann(iterations=5000, tol=1e-15)])
def test_implicit_engines_solve_for_each_row(engine):
    problem = Problem("linear", "rate")
    h = problem.h
    problem.h = lambda model: h(model) + 0.1 * sum(p.square().sum() for p in model.parameters())
    problem.rate = torch.tensor(1.0)
    with problem.block(engine) as loop:
        loop.run(300, outer=problem.test)
        inputs = [problem.lam, problem.heat]
        assert_same(loop.hypergrad(inputs), one_by_one(loop, inputs, problem.test))
        assert_same(loop.hypergrad(inputs, queries=3), loop.hypergrad(inputs))


@pytest.mark.parametrize("engine", ["reverse", "sqrt", "memory", "unroll", "forward"])
def test_added_vectors_are_summed_entry_by_entry(engine):
    problem = Problem("batch norm", "momentum")
    found: list[list[Tensor]] = []
    for entries in (slice(None), *(slice(i, i + 1) for i in range(QUERIES))):
        x, y = (t[entries] for t in problem.test)
        with problem.block(ENGINES[engine]) as loop:
            for k in range(3):
                loop.step()
                loop.add_outer_loss(outer=(x, y), weight=k + 1.0)
            loop.add_outer_loss(loss=problem.g(loop, x, y))
            assert loop.value.shape == (len(x),)
            found.append(loop.hypergrad(problem.inputs))
            assert_same(loop.hypergrad(problem.inputs, queries=3), found[-1])
    assert_same(found[0], [torch.cat(parts) for parts in zip(*found[1:], strict=True)])


def test_added_losses_of_different_lengths_are_refused():
    problem = Problem()
    x, y = problem.test
    with problem.block("reverse") as loop:
        loop.step()
        loop.add_outer_loss(outer=(x, y))
        with pytest.raises(ValueError, match=r"g is a vector of 2, while an earlier one is a vector of 4"):
            loop.add_outer_loss(outer=(x[:2], y[:2]))
        with pytest.raises(ValueError, match=r"loss= is a scalar, while an earlier one is a vector of 4"):
            loop.add_outer_loss(loss=problem.g(loop, x, y).sum())
        assert_same([loop.hypergrad(problem.lam)], [loop.hypergrad(problem.lam, queries=2)])


@pytest.mark.parametrize("engine", ["reverse", "memory", "unroll", "forward"])
def test_the_entries_of_one_loss_can_be_differentiated_one_after_the_other(engine):
    """The sweep writes other weights into the model, and the graph of the losses is as good as before."""
    problem = Problem("batch norm")
    with problem.block(ENGINES[engine]) as loop:
        for _ in range(3):
            loop.step()
        losses = problem.g(loop, *problem.test)
        whole = loop.hypergrad(problem.lam, loss=losses)
        each = torch.stack([loop.hypergrad(problem.lam, loss=losses[i]) for i in range(QUERIES)])
        assert_same([each], [whole])
        loop.step()
        if engine != "unroll":  # whose graphs lead on from any step
            with pytest.raises(ValueError, match="of an earlier step"):
                loop.hypergrad(problem.lam, loss=losses)


def test_rows_pass_through_the_graph_behind_a_batch_and_to_the_initial_weights():
    problem, encoder = Problem(), nn.Linear(5, 5)
    weights = list(problem.net.parameters())
    h = lambda m, x: problem.h(m) + m(x).square().mean()

    with bilevel.inner(problem.net, h, problem.g, solver="gd", lr=0.1) as loop:
        x = encoder(problem.x)
        for _ in range(3):
            loop.step(x, outer=problem.test)
        inputs = [*encoder.parameters(), *weights]
        found = loop.hypergrad(inputs, queries=3, retain_graph=True)
        x, y = problem.test
        each = [loop.hypergrad(inputs, outer=(x[i : i + 1], y[i : i + 1]), retain_graph=True) for i in range(QUERIES)]
        wanted = [
            torch.cat([g.reshape(1, *p.shape) for g in gs])
            for p, gs in zip(inputs, zip(*each, strict=True), strict=True)
        ]
        assert_same(found, wanted)


def test_unrolled_rows_can_be_differentiated_again():
    problem = Problem("linear")
    with problem.block("unroll") as loop:
        loop.run(3, outer=problem.test)
        rows = loop.hypergrad(problem.lam, create_graph=True)
        (second,) = torch.autograd.grad(rows[1].sum(), problem.lam, retain_graph=True)
        x, y = problem.test
        row = loop.hypergrad(problem.lam, outer=(x[1:2], y[1:2]), create_graph=True)
        (wanted,) = torch.autograd.grad(row.sum(), problem.lam)
        assert_same([second], [wanted])


def test_hooks_on_outer_variables_see_a_row_at_a_time():
    problem = Problem()
    seen: list[tuple[int, ...]] = []
    problem.lam.register_hook(lambda g: (seen.append(tuple(g.shape)), 2 * g)[1])
    with problem.block("reverse") as loop:
        loop.run(2, outer=problem.test)
        assert_same([loop.hypergrad(problem.lam)], one_by_one(loop, [problem.lam], problem.test))
    assert set(seen) == {(ROWS,)}


def test_hooks_on_weights_and_functions_of_the_direction_take_rows():
    problem = Problem()
    for p in problem.net.parameters():
        p.register_hook(lambda g: g / (1 + g.norm()))
    with problem.block("reverse", clip=0.5) as loop:
        loop.run(3, outer=problem.test)
        assert_same(loop.hypergrad(problem.inputs), one_by_one(loop, problem.inputs, problem.test))


def test_parts_of_a_batch_and_accumulated_batches_take_rows():
    problem = Problem("tanh", "adam")
    h = lambda m, x, y: F.cross_entropy(m(x), y) * problem.lam.mean().exp()
    optimizer = torch.optim.Adam(problem.net.parameters(), lr=0.05, eps=1e-2)
    with bilevel.inner(problem.net, h, problem.g, solver="gd", optimizer=optimizer) as loop:
        loop.step(problem.x, problem.y, micro=3, outer=problem.test)
        loop.accumulate(problem.x[:4], problem.y[:4])
        loop.accumulate(problem.x[4:], problem.y[4:])
        loop.step()
        assert_same([loop.hypergrad(problem.lam)], one_by_one(loop, [problem.lam], problem.test))


def test_the_value_is_the_vector_and_backward_refuses_it():
    problem = Problem()
    for engine in ("reverse", "unroll", "forward"):
        with problem.block(engine) as loop:
            loop.run(2, outer=problem.test)
            assert torch.allclose(loop.value, problem.g(loop, *problem.test))
            for inputs in (None, [problem.lam]):
                with pytest.raises(ValueError, match="takes a scalar, and the outer loss is a vector of 4"):
                    loop.backward(inputs)
            loop.add_outer_loss()
            with pytest.raises(ValueError, match="Sum it"):
                loop.backward()
        assert problem.lam.grad is None


def test_what_takes_no_vector_is_refused_by_name():
    problem = Problem("linear")
    g = lambda m, x: m(x).flatten()
    with bilevel.inner(problem.net, problem.h, g, solver="gd", lr=0.1) as loop:
        loop.step(outer=problem.x)
        for queries in (0, -1, 2.0, True):
            with pytest.raises(ValueError, match="queries is how many rows"):
                loop.hypergrad(problem.lam, queries=queries)
        with pytest.raises(ValueError, match=r"loss= must return a scalar, got a tensor of shape \(9, 3\)"):
            loop.hypergrad(problem.lam, loss=loop(problem.x))
        with pytest.raises(ValueError, match=r"g must return a scalar, got a tensor of shape \(0,\)"):
            loop.hypergrad(problem.lam, outer=problem.x[:0])
    with (
        bilevel.inner(problem.net, problem.h, g, solver="bigsam", lr=0.1) as loop,
        pytest.raises(ValueError, match="A vector of outer losses is for hypergrad alone"),
    ):
        loop.run(2, outer=problem.x)
    with bilevel.inner(nn.Linear(5, 3), lambda m, x: m(x).mean(), g, solver="gd", lr=0.1, tasks=2) as loop:
        batch = problem.x[:2].unsqueeze(1)
        loop.step(batch, outer=batch)
        losses = torch.stack([w.sum() for w in loop.weights.values()])
        with pytest.raises(ValueError, match="with tasks= an outer loss is a scalar, and loss= is a vector of 2"):
            loop.hypergrad(problem.lam, loss=losses, allow_unused=True)
        with pytest.raises(ValueError, match="without tasks="):
            loop.hypergrad(problem.lam, allow_unused=True)


def test_blocks_take_the_rows_one_after_the_other_and_say_so():
    if hooks_on_saved is None:
        pytest.skip("blocks= is off on torch 2.6")
    problem = Problem()
    with problem.block(ENGINES["blocks"]) as loop:
        loop.run(2, outer=problem.test)
        with pytest.warns(UserWarning, match="the 4 rows of a vector of outer losses go through each step one after"):
            loop.hypergrad(problem.lam)


def test_a_sweep_that_can_be_resumed_takes_a_vector_at_once(tmp_path):
    problem = Problem()
    with problem.block(bilevel.Reverse(store=tmp_path, resume=True, every=0)) as loop:
        loop.run(3, outer=problem.test)
        assert_same([loop.hypergrad(problem.lam)], one_by_one(loop, [problem.lam], problem.test))
        with pytest.raises(ValueError, match="several sweeps, and the journal"):
            loop.hypergrad(problem.lam, queries=2)


def test_what_can_be_batched_is(monkeypatch):
    """Rows one after the other are for graphs that need it, and those alone."""
    one_by_one, stacked = list[object](), rows.stacked
    monkeypatch.setattr(rows, "stacked", lambda parts: one_by_one.append(parts) or stacked(parts))
    for model, batched in (("tanh", True), ("convolution", True), ("attention", True), ("no vmap", False)):
        problem = Problem(model, "adam")
        with problem.block("reverse") as loop:
            loop.run(2, outer=problem.test)
            loop.hypergrad(problem.lam)
        assert (not one_by_one) == batched, model


def test_an_error_that_is_not_about_rows_is_raised_as_it_is():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, a: Tensor) -> Tensor:
            raise ArithmeticError("this backward is broken")

    problem = Problem()
    with problem.block("reverse", check=False) as loop:
        loop.step()
        with pytest.raises(ArithmeticError, match="this backward is broken"):
            loop.hypergrad(problem.lam, loss=Broken.apply(problem.g(loop, *problem.test)))

"""Outer losses at several steps, `loop.add_outer_loss`: Σ_j c_j·g_j(w_{k_j}, λ) by every engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import Ridge, Vector, differences, relative
from torch import Tensor, nn

import bilevel_plugin as bilevel
from bilevel_plugin.autograd.look import hooks_on_saved
from bilevel_plugin.engine import ENGINES, reverse

pytestmark = pytest.mark.usefixtures("double")
STEPS, AT = 6, {0: 0.7, 2: -0.4, 3: 1.5, 6: 0.3}  # the steps after which losses are added, and their weights

EXACT: dict[str, Any] = {
    "unroll": "unroll",
    "forward": "forward",
    "reverse": "reverse",
    "every third": bilevel.Reverse(3),
    "sqrt": bilevel.Reverse("sqrt"),
    "memory": bilevel.Reverse(memory="1GiB"),
    "little memory": bilevel.Reverse(memory="24kB"),
    "blocks": bilevel.Reverse(blocks=nn.Linear),
}
if hooks_on_saved is None:  # torch 2.6, where blocks= is off
    del EXACT["blocks"]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 2))


class Problem:
    """Weights of samples, a temperature in g and the weights of the losses, on a network with all kinds of state."""

    def __init__(self, eval_mode: bool = False) -> None:
        self.eval_mode = eval_mode
        self.x, self.y = torch.randn(8, 3), torch.randint(2, (8,))
        self.outer = [(torch.randn(7, 3), torch.randint(2, (7,))) for _ in range(STEPS + 1)]
        self.sample, self.heat = (torch.randn(n, requires_grad=True) for n in (8, 1))
        self.c = torch.tensor([AT.get(k, 0.0) for k in range(STEPS + 1)], requires_grad=True)
        self.lam = [self.sample, self.heat, self.c]

    def h(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.eval_mode:
            model.train()
        return (self.sample.sigmoid() * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.eval_mode:
            model.eval()
        return F.cross_entropy(self.heat.exp() * model(x), y)

    def plain(self, optimizer: Any) -> float:
        """The objective of the loop as a user would write it."""
        torch.manual_seed(0)
        model = network()
        stepper, total = optimizer(model.parameters()), 0.0
        torch.manual_seed(1)

        def look(loss: Callable[[], Tensor]) -> float:
            """A loss of the model, which is left as it was."""
            kept = {n: b.clone() for n, b in model.named_buffers()}
            with torch.random.fork_rng(), torch.no_grad():
                value = float(loss())
            model.train()
            model.load_state_dict(kept, strict=False)
            return value

        for k in range(STEPS + 1):
            if k:
                stepper.zero_grad()
                self.h(model, self.x, self.y).backward()
                stepper.step()
            if k in AT:
                total += look(lambda k=k: self.c[k] * self.g(model, *self.outer[k]))
            if k == 3:
                model.eval()
                total += look(lambda: self.own(model, list(model.parameters())))
        return total

    def own(self, model: Callable[[Tensor], Tensor], weights: Iterable[Tensor]) -> Tensor:
        """A loss= of one's own."""
        return (self.heat * model(self.outer[3][0])).square().mean() + sum(w.square().sum() for w in weights)

    def block(self, engine: Any, optimizer: Any) -> tuple[list[Tensor], float]:
        """The gradients for λ, and for a weight of the start where the engine goes back to it; the objective."""
        torch.manual_seed(0)
        model = network()
        torch.manual_seed(1)
        options: dict[str, Any] = {"solver": "gd", "optimizer": optimizer(model.parameters()), "engine": engine}
        with bilevel.inner(model, self.h, self.g, check=False, **options) as loop:
            for k in range(STEPS + 1):
                if k:
                    loop.step(self.x, self.y)
                if k in AT:
                    loop.add_outer_loss(weight=self.c[k], outer=self.outer[k])
                if k == 3:
                    loop.eval()
                    loop.add_outer_loss(loss=self.own(loop, loop.weights.values()))
                    loop.train()
            found = loop.hypergrad([*self.lam, *([] if engine == "forward" else [model[0].weight])])
            return found, float(loop.value)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.3, momentum=0.8)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.1, eps=0.1)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("eval_mode", [False, True], ids=["train", "eval"])
@pytest.mark.parametrize("engine", EXACT)
def test_it_is_the_derivative_of_the_plain_loop(engine: str, eval_mode: bool, optimizer: Any) -> None:
    """Against unroll, and central differences of the loop written out, with BatchNorm and Dropout."""
    problem = Problem(eval_mode)
    grads, value = problem.block(EXACT[engine], optimizer)
    for mine, theirs in zip(grads, problem.block("unroll", optimizer)[0], strict=False):
        assert relative(mine, theirs) <= 1e-10
    assert value == pytest.approx(problem.plain(optimizer), rel=1e-12)
    for x, grad in zip(problem.lam, grads, strict=False):
        v = torch.randn(x.shape)
        slope = differences(lambda: problem.plain(optimizer), x, v)
        assert float((grad * v).sum()) == pytest.approx(slope, abs=1e-6 * float(grad.norm()))


# --- closed forms ---


@pytest.mark.parametrize("engine", EXACT)
def test_closed_form_on_a_quadratic(engine: str) -> None:
    """h = (w − λ)²/2 from 0 by steps of rate t: w_k = s_k·λ, s_k = 1 − (1 − t)^k, and Σ c_k·(s_k·λ − 1)·s_k."""
    t, lam = 0.3, torch.tensor(2.0, requires_grad=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    h = lambda m: (m.weight - lam).square().sum() / 2
    g = lambda m: (m.weight - 1).square().sum() / 2
    with bilevel.inner(model, h, g, solver="gd", lr=t, engine=EXACT[engine]) as loop:
        for k in range(1, STEPS + 1):
            loop.step()
            if k in AT:
                found = loop.add_outer_loss(weight=AT[k])
                assert float(found) == pytest.approx(((1 - (1 - t) ** k) * 2.0 - 1) ** 2 / 2)
        s = {k: 1 - (1 - t) ** k for k in AT if k}
        assert float(loop.value) == pytest.approx(sum(AT[k] * (s[k] * 2.0 - 1) ** 2 / 2 for k in s), rel=1e-12)
        expected = sum(AT[k] * (s[k] * 2.0 - 1) * s[k] for k in s)
        assert float(loop.hypergrad(lam)) == pytest.approx(expected, rel=1e-12)
        loop.backward()
    assert float(lam.grad) == pytest.approx(expected, rel=1e-12)


RIDGE = {n: e for n, e in EXACT.items() if n != "blocks"} | {"little memory": bilevel.Reverse(memory=1700)}


def ridge_with(engine: Any, between: Callable[[int, bilevel.Loop], object], steps: int = STEPS) -> Tensor:
    torch.manual_seed(3)
    ridge = Ridge.random()
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="bigsam", lr=0.2, engine=engine) as loop:
        for k in range(1, steps + 1):
            loop.step(outer=())
            between(k, loop)
        return loop.hypergrad(ridge.lam)


def add(k: int, loop: bilevel.Loop) -> None:
    if k in AT:
        loop.add_outer_loss(weight=AT[k])


@pytest.mark.parametrize("engine", RIDGE)
def test_one_loss_of_weight_one_after_the_last_step_is_the_usual_hypergradient(engine: str) -> None:
    usual = ridge_with(RIDGE[engine], lambda k, loop: None)
    assert relative(ridge_with(RIDGE[engine], lambda k, loop: k == STEPS and loop.add_outer_loss()), usual) <= 1e-15


@pytest.mark.parametrize("engine", RIDGE)
def test_it_is_the_sum_of_the_hypergradients_of_shorter_loops(engine: str) -> None:
    apart = sum(AT[k] * ridge_with("reverse", lambda k, loop: None, steps=k) for k in AT if k)
    assert relative(ridge_with(RIDGE[engine], add), apart) <= 1e-12


@pytest.mark.parametrize("engine", RIDGE)
def test_a_hypergradient_on_the_way_is_that_of_the_losses_so_far_and_leaves_them(engine: str) -> None:
    torch.manual_seed(3)
    ridge = Ridge.random()
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="bigsam", lr=0.2, engine=RIDGE[engine]) as loop:
        for k in range(1, STEPS + 1):
            loop.step(outer=())
            add(k, loop)
            if k >= 2:  # for k = 4 and 5, later steps have no part in it
                first, second = loop.hypergrad(ridge.lam), loop.hypergrad(ridge.lam)
                assert relative(first, second) <= 1e-14  # graphs may have made room for states
                assert relative(first, ridge_with("unroll", lambda j, loop, k=k: j <= k and add(j, loop))) <= 1e-12


def test_its_result_can_be_differentiated_again_by_unroll() -> None:
    ridge = Ridge.random()

    def first() -> Tensor:
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.2, engine="unroll") as loop:
            for k in range(1, STEPS + 1):
                loop.step()
                add(k, loop)
            return loop.hypergrad(ridge.lam, create_graph=True)

    (second,) = torch.autograd.grad(first(), ridge.lam)
    slope = differences(lambda: float(first().detach()), ridge.lam, torch.ones(()))
    assert float(second) == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("engine", RIDGE)
def test_a_weight_that_is_written_to_later_counts_as_it_was(engine: str) -> None:
    weight = torch.ones(())

    def add_scaled(k: int, loop: bilevel.Loop) -> None:
        if k in AT:
            loop.add_outer_loss(weight=weight.fill_(AT[k]))

    assert relative(ridge_with(RIDGE[engine], add_scaled), ridge_with("unroll", add)) <= 1e-12


# --- tensors of the batch, tasks, truncation, a file ---


@pytest.mark.parametrize("engine", ["unroll", "reverse", "sqrt", "memory"])
@pytest.mark.parametrize("optimizer", [None, adam])
def test_tasks_agree_with_a_loop_over_them(engine: str, optimizer: Any) -> None:
    """Also with an encoder behind the batch, and weights of the losses that are computed from others."""
    encoder, head = (
        nn.Linear(4, 3, bias=False),
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
    )
    x, y = torch.randn(3, 6, 4), torch.randint(2, (3, 6))
    logits = torch.randn(STEPS, requires_grad=True)
    loss = lambda model, f, y: F.cross_entropy(model(f), y)
    lam = [logits, *encoder.parameters()]

    def solve(f: Tensor, y: Tensor, **options: Any) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        options |= {"lr": 0.3} if optimizer is None else {"optimizer": optimizer(head.parameters())}
        with bilevel.inner(head, loss, loss, solver="gd", engine=EXACT[engine], **options) as loop:
            for c in logits.softmax(0):
                loop.step(f, y)
                loop.add_outer_loss(weight=c, outer=(f, y))
            start = loop.hypergrad(head)
            return loop.hypergrad(lam, retain_graph=True), loop.value, start

    together, value, start = solve(encoder(x), y, tasks=3)
    apart, values, starts = zip(*(solve(encoder(x[i]), y[i]) for i in range(3)), strict=True)
    assert relative(value, sum(values)) <= 1e-12
    for mine, theirs in zip(together, zip(*apart, strict=True), strict=True):
        assert relative(mine, sum(theirs)) <= 1e-10
    assert all(relative(start[n], sum(s[n] for s in starts)) <= 1e-10 for n in start)


def test_a_tensor_of_the_batch_can_be_an_input() -> None:
    """Also one that was computed from others, with every engine; and a weight that was."""
    grads = []
    for engine in ("unroll", "reverse", bilevel.Reverse(memory="1GiB"), bilevel.Forward()):
        torch.manual_seed(0)
        raw, model = torch.randn(3, requires_grad=True), nn.Linear(3, 1)
        x, c = raw.tanh(), raw.sum().exp()
        h, g = lambda m, x: m(x).square().sum(), lambda m, x: (m(x) - 1).square().sum() + x.sum()
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine) as loop:
            for _ in range(3):
                loop.step(x)
                loop.add_outer_loss(weight=c, outer=(x,))
            inputs = [raw] if isinstance(engine, bilevel.Forward) else [raw, x, c]
            grads.append(loop.hypergrad(inputs, retain_graph=True))
    for other in grads[1:]:
        assert all(relative(mine, theirs) <= 1e-12 for mine, theirs in zip(other, grads[0], strict=False))


@pytest.mark.parametrize("closed_over", [False, True])
def test_forward_counts_a_followed_tensor_of_the_batch_once(closed_over: bool) -> None:
    grads = []
    for of_engine in (lambda x: "unroll", lambda x: bilevel.Forward(wrt=[x])):
        torch.manual_seed(0)
        x, model = torch.randn(3, requires_grad=True).tanh(), nn.Linear(3, 1)
        h = lambda m, y, x=x: m(x if closed_over else y).square().sum()
        g = lambda m, y, x=x: (m(y) - 1).square().sum() + y.sum() + closed_over * x.prod()
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=of_engine(x)) as loop:
            for _ in range(3):
                loop.step(x.detach() if closed_over else x)
                loop.add_outer_loss(outer=(x,))
            grads.append(loop.hypergrad(x, retain_graph=True))
    assert relative(*grads) <= 1e-12


@pytest.mark.parametrize("where", ["h", "g"])
@pytest.mark.parametrize("added", [False, True])
def test_a_term_with_the_initial_weights_in_a_graph(where: str, added: bool) -> None:
    """‖w − w_0‖², with w_0 in a graph that was made before the block: exact where graphs are kept, or refused."""
    x, lam = torch.randn(4, 3), torch.tensor(0.3, requires_grad=True)
    model = nn.Linear(3, 1, bias=False)

    def losses(w_0: Tensor) -> tuple[Callable[[nn.Module], Tensor], ...]:
        near = lambda m, here: 0.3 * (m.weight - w_0).square().sum() if where == here else 0.0
        h = lambda m: (m(x) - lam).square().sum() + near(m, "h")
        return h, lambda m: m(x).exp().sum() + near(m, "g")

    def plain() -> float:
        other, total = nn.Linear(3, 1, bias=False), 0.0
        other.load_state_dict(model.state_dict())
        sgd, (h, g) = torch.optim.SGD(other.parameters(), 0.05), losses(model.weight.detach().clone())
        for k in range(3):
            sgd.zero_grad()
            h(other).backward()
            sgd.step()
            total += float(g(other).detach()) if added or k == 2 else 0.0
        return total

    def block(engine: Any, w_0: Tensor) -> list[Tensor]:
        with bilevel.inner(model, *losses(w_0), solver="gd", lr=0.05, engine=engine) as loop:
            for _ in range(3):
                loop.step()
                if added:
                    loop.add_outer_loss()
            return loop.hypergrad([lam, model.weight], retain_graph=True)

    for engine in ("unroll", bilevel.Reverse(memory="1GiB"), bilevel.Reverse(memory="5kB")):
        for y, grad in zip([lam, model.weight], block(engine, model.weight.clone()), strict=True):
            v = torch.randn(y.shape)
            assert float((grad * v).sum()) == pytest.approx(differences(plain, y, v), rel=1e-7)
        with pytest.raises(RuntimeError, match=r"^bilevel.inner: a tensor that a graph needs was changed.*\.clone\(\)"):
            block(engine, model.weight.square())  # which saves the weights themselves
    with pytest.raises(ValueError, match=r"a loss uses a tensor that was computed from the weights .*'unroll'"):
        block("reverse", model.weight.clone())


def test_truncation_takes_losses_of_the_last_steps() -> None:
    """What lies before the last m steps is a constant: a loop of m steps from there; earlier losses are refused."""
    found = ridge_with(bilevel.Reverse(truncate=4), lambda k, loop: k in (2, 3, 6) and add(k, loop))
    torch.manual_seed(3)
    ridge = Ridge.random()
    solver = lambda begin: bilevel.BiGSAM(0.2, 0.2, lambda k: (k + begin) ** -0.25)
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=solver(0)) as loop:
        loop.run(2, outer=())
        there = Vector(loop.weights["w"].detach())
    with bilevel.inner(there, ridge.h, ridge.g, solver=solver(2), engine="unroll") as loop:
        add(0 + 2, loop)
        for k in range(3, STEPS + 1):
            loop.step(outer=())
            add(k, loop)
        expected = loop.hypergrad(ridge.lam)
    assert relative(found, expected) <= 1e-12
    with pytest.raises(ValueError, match=r"before the last 4 steps, which are all that truncate= goes back over"):
        ridge_with(bilevel.Reverse(truncate=4), lambda k, loop: k in (1, 6) and loop.add_outer_loss())


@pytest.mark.parametrize("checkpoint", [1, "sqrt"])
def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Any) -> None:
    class Stop(Exception):
        pass

    plain, gone, most = reverse.check_end, list[int](), [99]

    def stopping(*args: Any) -> None:
        gone.append(1)
        if len(gone) == most[0]:
            raise Stop
        plain(*args)

    monkeypatch.setattr(reverse, "check_end", stopping)

    def solve(at: dict[int, float] = AT) -> Tensor:
        engine = bilevel.Reverse(checkpoint, store=tmp_path, resume=True, every=0.0)
        return ridge_with(engine, lambda k, loop: k in at and loop.add_outer_loss(weight=at[k]))

    whole = solve()
    steps, most[0] = len(gone), 4
    gone.clear()
    with pytest.raises(Stop):  # the error of the test's own
        solve()
    most[0] = 99
    with pytest.raises(ValueError, match=r"the steps that have an outer loss and .* differ"):
        solve({k: AT[k] for k in (3, 6)})
    with pytest.raises(ValueError, match="sweep: the values or weights of the outer losses differ"):
        solve({**AT, 2: -0.5})
    gone.clear()
    assert torch.equal(solve(), whole)
    assert len(gone) == steps - 3
    assert list(tmp_path.iterdir()) == []


# --- what it costs ---


def test_g_is_evaluated_twice_and_no_state_is_kept_for_it() -> None:
    """Once when it is added and once in the sweep. The bytes are counted in test_waste.py."""
    ridge, calls = Ridge.random(), list[int]()
    model = nn.ParameterDict({"w": torch.zeros(1021)})  # a size that nothing else has
    h = lambda m: (m["w"][:3] - ridge.lam).square().sum() + m["w"].square().sum()
    g = lambda m: calls.append(1) or (m["w"] * ridge.lam).exp().square().sum()

    def made(losses: bool, given: bool = False) -> int:
        gc.collect()
        before = alive()
        with bilevel.inner(model, h, g, solver="gd", lr=0.1, check=False, engine=bilevel.Reverse("sqrt")) as loop:
            for _ in range(50):
                loop.step()
                if losses:
                    loop.add_outer_loss(loss=(loop.weights["w"] * ridge.lam).exp().sum() if given else None)
            gc.collect()
            count = alive() - before
            if losses:
                loop.hypergrad(ridge.lam)
        return count

    alive = lambda: sum(1 for x in gc.get_objects() if issubclass(type(x), Tensor) and x.shape == (1021,))
    without = made(losses=False)
    assert made(losses=True) == without
    assert len(calls) == 2 * 50
    assert made(losses=True, given=True) <= without + 50  # the gradient of each for the weights


# --- checks and refusals ---


def test_the_sentinel_looks_at_g_where_losses_are_added() -> None:
    ridge = Ridge.random()
    wrong = lambda m, v: (ridge.V @ m.w).square().sum() * (1 + m.w.detach().square().sum()) * v
    with bilevel.inner(ridge.model(), ridge.h, wrong, solver="gd", lr=0.2) as loop:
        loop.step()
        loop.add_outer_loss(outer=torch.ones(()))
        loop.step()
        with pytest.warns(bilevel.DerivativeWarning, match="the gradient of g is not the derivative of the loss"):
            loop.hypergrad(ridge.lam)


@pytest.mark.parametrize("engine", ["cg", "neumann"])
def test_a_fixed_point_has_no_steps_on_the_way(engine: str) -> None:
    words = f"engine={ENGINES[engine].__name__} differentiates the fixed point .* Use engine='reverse'"
    with pytest.raises(ValueError, match=words):
        ridge_with(engine, add)


def test_every_engine_takes_the_losses_or_refuses_them_by_name() -> None:
    expected = ridge_with("unroll", add)
    for engine, kind in ENGINES.items():
        if "fixed point" not in kind.needs:
            assert relative(ridge_with(engine, add), expected) <= 1e-12


def refused(
    kind: type[Exception], words: str, between: Callable[[int, bilevel.Loop], object], engine: Any = "reverse"
) -> None:
    with pytest.raises(kind, match=words) as caught:
        ridge_with(engine, between)
    assert str(caught.value).startswith("bilevel.inner: ")


def test_an_engine_of_ones_own_refuses_them_unless_it_has_add_loss() -> None:
    class OwnTape(bilevel.Tape):
        def begin(self, step: Any, z: Any, *, whole: bool) -> None:
            pass

        def pull(self, end: Any, inputs: Any, create_graph: bool) -> Any:
            raise AssertionError("it was not refused")

    class Own(bilevel.Engine):
        def tape(self) -> bilevel.Tape:
            return OwnTape()

    refused(ValueError, "this engine differentiates an outer loss at the last weights alone", add, Own())


def test_another_loss_beside_the_sum_is_refused() -> None:
    for given in ({"outer": ()}, {"loss": torch.zeros(())}):
        refused(ValueError, "is that of their sum. Add this one as well", lambda k, loop, given=given: (
            loop.add_outer_loss(), loop.hypergrad(torch.zeros(1, requires_grad=True), **given)))  # fmt: skip
        if "loss" in given:
            both = {"outer": (), **given}
            refused(ValueError, "outer= or loss=, not both", lambda k, loop, both=both: loop.add_outer_loss(**both))


@pytest.mark.parametrize("weight", ["1", None, torch.ones(2), float("nan"), torch.ones((), dtype=torch.int64)], ids=str)
def test_a_weight_is_a_number(weight: Any) -> None:
    refused(ValueError, "weight= of add_outer_loss is a finite number or a scalar tensor",
            lambda k, loop: loop.add_outer_loss(weight=weight))  # fmt: skip


@pytest.mark.parametrize("engine", ["reverse", "forward", "unroll"])
def test_a_loss_of_earlier_weights_is_refused_but_by_unroll(engine: str) -> None:
    kept: list[Tensor] = []

    def between(k: int, loop: bilevel.Loop) -> None:
        kept.append(loop.weights["w"].square().sum())
        loop.add_outer_loss(loss=kept[0])

    if engine == "unroll":
        ridge_with(engine, between)
    else:
        refused(ValueError, "from weights of an earlier step. .* each right after its step", between, engine)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_what_depends_on_the_weights_is_no_weight_or_batch(engine: str) -> None:
    """A step or the loss would take it for a constant."""
    ridge = Ridge.random()
    h = lambda m: (ridge.h(m), m.w.exp())
    g = lambda m, x: (m.w * x).sum()
    with bilevel.inner(ridge.model(), h, g, solver="gd", lr=0.2, engine=engine) as loop:
        aux = loop.step().aux
        with pytest.raises(ValueError, match="a tensor in weight= was computed from the weights of this loop"):
            loop.add_outer_loss(weight=loop.weights["w"].sum(), outer=1.0)
        confidence = loop.step(h=lambda m: (ridge.h(m), m.w.exp().mean())).aux
        with pytest.raises(ValueError, match="a tensor in weight= is what a loss of this loop returned"):
            loop.add_outer_loss(weight=confidence, outer=1.0)
        for wrong in (loop.add_outer_loss, lambda outer: loop.hypergrad(ridge.lam, outer=outer)):
            with pytest.raises(ValueError, match="a tensor in outer= is what a loss of this loop returned"):
                wrong(outer=aux)
            if engine == "reverse":
                with pytest.raises(TypeError, match="a batch holds an iterator"):
                    wrong(outer=iter([1.0]))
        loop.add_outer_loss(outer=aux.detach())


@pytest.mark.parametrize("engine", ["reverse", "forward", "unroll"])
@pytest.mark.parametrize("given", [False, True])
def test_a_loss_that_is_not_finite_is_told_at_once(engine: str, given: bool) -> None:
    """It is not added, so that a script that catches the error can go on."""
    ridge = Ridge.random()
    g = lambda m: m.w.square().sum() / (0.0 if len(steps) == 3 else 1.0)
    steps: list[int] = []
    with bilevel.inner(ridge.model(), ridge.h, g, solver="gd", lr=0.2, engine=engine) as loop:
        for _ in range(2):
            steps.append(1)
            loop.step()
            loop.add_outer_loss()
        before = loop.hypergrad(ridge.lam)
        steps.append(1)
        with pytest.raises(FloatingPointError, match=r"(g|loss=) is inf at step k = "):
            loop.add_outer_loss(loss=loop.weights["w"].square().sum() + 1 / torch.zeros(()) if given else None)
        steps.pop()
        assert torch.equal(loop.hypergrad(ridge.lam), before)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_a_gradient_that_is_not_finite_is_traced_to_its_loss(engine: str) -> None:
    ridge = Ridge.random()
    g = lambda m: (m.w * 0).abs().sqrt().sum()
    with bilevel.inner(ridge.model(), ridge.h, g, solver="gd", lr=0.2, engine=engine, check=False) as loop:
        loop.run(2)
        loop.add_outer_loss()
        loop.run(2)
        loop.add_outer_loss(loss=loop.weights["w"].sum())
        with pytest.raises(FloatingPointError, match="at step k = 3"):
            loop.hypergrad(ridge.lam)


def test_what_changed_before_the_sweep_is_noticed() -> None:
    """A tensor of the batch, an outer variable, and what is no tensor at all."""
    for changed, words in (
        ("batch", "a tensor in the batch of g .* changed in place after the outer loss after step k = 1 used it"),
        ("lam", "an outer variable .* changed in place"),
        ("number", "the outer loss after step k = 1, evaluated again for the hypergradient, has another value"),
    ):
        ridge, x, number = Ridge.random(), torch.ones(3), [1.0]
        mu = torch.ones((), requires_grad=True)
        g = lambda m, x, n=number, mu=mu: (m.w * x).square().sum() * n[0] * mu
        with bilevel.inner(ridge.model(), ridge.h, g, solver="gd", lr=0.2, check=False) as loop:
            loop.step()
            loop.add_outer_loss(outer=(x,))
            loop.step()
            with torch.no_grad():
                {"batch": x, "lam": mu, "number": torch.zeros(())}[changed].add_(1)
            number[0] += changed == "number"
            with pytest.raises(RuntimeError, match=words):
                loop.hypergrad(ridge.lam)


def test_an_input_behind_a_loss_that_is_gone_is_refused() -> None:
    ridge = Ridge.random()
    scale = ridge.lam.exp()
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.2) as loop:
        loop.step()
        loop.add_outer_loss(loss=loop.weights["w"].sum() * scale)
        loop.step()
        with pytest.raises(ValueError, match=r"known for leaves alone\. Name the leaves"):
            loop.hypergrad(scale)
        assert loop.hypergrad(ridge.lam).shape == ()

"""The contract that every solver and every engine of the tables meets, and what each engine promises of its own."""

import gc

import pytest
import torch
from problems import Ridge, relative
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.hypergrad import ENGINES
from bilevel_plugin.hypergrad.implicit import CG, Neumann
from bilevel_plugin.solvers import SOLVERS

IMPLICIT = (CG, Neumann)


def rule(solver, ridge):
    """The solver as it comes, but with weights that stay, so that it has a fixed point."""
    made = SOLVERS[solver](0.3)
    return type(made)(**{**vars(made), "alpha": bilevel.constant(0.6)}) if hasattr(made, "alpha") else made


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_engine_differentiates_every_solver(solver, engine):
    """Against unroll after as many steps as it takes to settle; before that, for the engines that do not need it."""
    ridge = Ridge.random()
    steps = 400 if issubclass(ENGINES[engine], IMPLICIT) else 5
    results = []
    for how in (engine, "unroll"):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=rule(solver, ridge), engine=how) as loop:
            loop.run(steps)
            results.append(loop.hypergrad(ridge.lam))
            ridge.lam.grad = None
            loop.backward()
            torch.testing.assert_close(ridge.lam.grad, results[-1])
    assert relative(*results) < (1e-5 if steps == 400 else 1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_takes_the_same_steps(engine):
    ridge = Ridge.random()
    weights = []
    for how in (engine, "unroll"):
        solver = bilevel.BiGSAM(0.2, alpha=0.5)
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=solver, engine=how) as loop:
            loop.run(7)
            weights.append(loop.weights["w"].detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_passes_gradients_to_tensors_of_the_batch(engine):
    ridge = Ridge.random()
    raw = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    h = lambda m, scale: ridge.h(m) * scale + m.w.sum() * scale**2
    grads = []
    for how in (engine, "unroll"):
        raw.grad = None
        scale = raw.exp()
        with bilevel.inner(ridge.model(), h, ridge.g, solver="gd", lr=0.2, engine=how) as loop:
            loop.run(400, scale)
            grads.append(loop.hypergrad(raw, retain_graph=True))
            loop.backward()
            torch.testing.assert_close(raw.grad, grads[-1])
    assert relative(*grads) < 1e-5


def test_forward_follows_a_non_leaf_that_is_named():
    ridge = Ridge.random()
    decay = ridge.lam.exp()
    h = lambda m: (ridge.X @ m.w - ridge.y).square().sum() / 2 + decay * m.w.square().sum() / 2
    grads = []
    for how in (bilevel.Forward(wrt=[decay]), "reverse"):
        with bilevel.inner(ridge.model(), h, ridge.g, lr=0.2, engine=how) as loop:
            loop.run(5)
            grads.append(loop.hypergrad(decay))
    assert relative(*grads) < 1e-12
    with bilevel.inner(ridge.model(), h, ridge.g, lr=0.2, engine="forward") as loop:
        loop.run(5)
        assert relative(loop.hypergrad(ridge.lam), grads[1] * decay.detach()) < 1e-12  # by name: the leaves
        with pytest.raises(ValueError, match=r"did not follow the input of shape \(\)"):
            loop.hypergrad(decay)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 9, 16, 17, 50])
@pytest.mark.parametrize("checkpoint", [1, 2, 3, 7, 100, "sqrt"])
def test_checkpoints_do_not_change_the_gradient(steps, checkpoint):
    ridge = Ridge.random()
    grads = []
    for how in ("unroll", bilevel.Reverse(checkpoint)):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, lr=0.2, engine=how) as loop:
            loop.run(steps)
            grads.append(torch.stack([loop.hypergrad(ridge.lam), loop.hypergrad(ridge.lam, outer=())]))
    assert relative(*grads) < 1e-12
    assert torch.equal(grads[1][0], grads[1][1])  # a second sweep is the first again


def alive(size):
    """The number of vectors of this size that Python knows."""
    return sum(1 for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.shape == (size,))


def held(engine, steps):
    """How many iterates a tape holds after the loop; for engines that store none, how many live vectors it has made."""
    ridge = Ridge.random(d=3)
    model = nn.ParameterDict({"w": torch.zeros(1009, dtype=torch.float64)})  # a size that nothing else has
    h = lambda m: (m["w"][:3] - ridge.lam).square().sum() + m["w"].square().sum()
    gc.collect()
    before = alive(1009)
    with bilevel.inner(model, h, h, solver="gd", lr=0.1, engine=engine) as loop:
        loop.run(steps)
        gc.collect()
        return len(loop._tape._saved) if hasattr(loop._tape, "_saved") else alive(1009) - before


def test_what_each_engine_holds():
    """Iterates held after K steps: all, every 10th, about √K, the last m, and a constant."""
    assert held("reverse", 100) == 100
    assert held(bilevel.Reverse(10), 100) == 10
    assert held(bilevel.Reverse("sqrt"), 100) <= 16
    assert held(bilevel.Reverse("sqrt"), 400) <= 32
    assert held(bilevel.Reverse(truncate=7), 100) == 7
    assert held("forward", 5) == held("forward", 100) <= 4
    assert held("neumann", 5) == held("neumann", 100) <= 3


@pytest.mark.parametrize("checkpoint", [1, "sqrt"])
def test_stored_iterates_take_their_own_size(checkpoint):
    """Rows of a few buffers, used again when an iterate is dropped: at most 1.25 times the bytes of the iterates."""
    model = nn.ParameterDict({"w": torch.zeros(100_003)})
    h = lambda m: m["w"].square().sum()
    with bilevel.inner(model, h, h, solver="gd", lr=0.1, engine=bilevel.Reverse(checkpoint)) as loop:
        loop.run(100)
        store, saved = loop._tape._store, loop._tape._saved
        assert store.rows == len(saved) - 1 + sum(map(len, store._free.values()))  # w_0 is not copied
        assert store.rows <= 1.25 * max(len(saved), 17)  # 17: held at most, before the checkpoints were widened
        assert all(x.untyped_storage().nbytes() <= 32 * 2**20 for z in saved.values() for x in z.values())


def test_stored_iterates_keep_their_layout():
    """channels_last stays so, since other strides would choose other kernels in the replay."""
    from bilevel_plugin.hypergrad.store import Store

    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    z = {"a": x, "b": torch.randn(3).expand(2, 3), "c": torch.randn(4, 3).T, "d": torch.zeros(0), "e": torch.ones(())}
    store = Store()
    kept = store.keep(z)
    for n, original in z.items():
        assert torch.equal(kept[n], original)
        assert not kept[n].requires_grad
    assert kept["a"].stride() == x.stride()
    assert kept["c"].stride() == z["c"].stride()
    store.drop(kept)
    again = store.keep(z)
    assert again["a"].data_ptr() == kept["a"].data_ptr()


def test_sqrt_runs_each_step_at_most_once_more():
    """K steps forward, at most K again without a graph, K with one."""
    ridge, calls = Ridge.random(), []
    h = lambda m: calls.append(1) or ridge.h(m)
    for how, most in (("reverse", 2), (bilevel.Reverse("sqrt"), 3), (bilevel.Reverse(5), 3), ("unroll", 1)):
        calls.clear()
        with bilevel.inner(ridge.model(), h, ridge.g, solver="gd", lr=0.1, engine=how, check=False) as loop:
            loop.run(50)
            loop.hypergrad(ridge.lam)
        assert len(calls) <= most * 50


def test_nothing_is_held_after_the_block():
    ridge = Ridge.random()
    model = nn.ParameterDict({"w": torch.zeros(1013, dtype=torch.float64)})
    h = lambda m: (m["w"][:3] - ridge.lam).square().sum() + m["w"].square().sum()
    gc.collect()
    gc.disable()  # what is left must go by reference counts alone, not when the collector comes round
    try:
        before = alive(1013)
        loops = []
        for engine in ENGINES:
            with bilevel.inner(model, h, h, solver="gd", lr=0.1, engine=engine) as loop:
                loop.run(30)
                loop.hypergrad(ridge.lam)
            loops.append(loop)  # even while the handle is kept
        assert alive(1013) == before
    finally:
        gc.enable()


def test_a_new_engine_and_a_new_solver_in_a_few_lines():
    """What the architecture promises: one class each, and the front takes them as they are."""
    from bilevel_plugin.solvers import StepRule

    class Alternate(StepRule):
        def weights(self, k):
            return (0.1, 0.0) if k % 2 else (0.0, 0.1)

    ridge = Ridge.random()
    grads = []
    for how in ("reverse", "unroll", "forward"):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver=Alternate(), engine=how) as loop:
            loop.run(6)
            grads.append(loop.hypergrad(ridge.lam))
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[2], grads[1])

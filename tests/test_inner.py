"""The front: block, decorator, handle."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from contract import ENGINES
from plain_loop import (
    MODELS,
    Case,
    attempt,
    data,
    exact,
    losses,
    mlp,
    slope,
    start,
)
from problems import Ridge, Vector, differences, refused, relative, same, snapshot, weighted
from torch import nn

import bilevel_plugin as bilevel

PLANNED = bilevel.Reverse(memory="1GiB")


def setup(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2)).to(dtype)
    x, y = torch.randn(6, 3, dtype=dtype), torch.randint(2, (6,))
    lam = torch.zeros(6, dtype=dtype, requires_grad=True)

    h, g = weighted(lam)
    return model, h, g, lam, x, y


def test_the_model_is_left_bit_identical(engine):
    model, h, g, lam, x, y = setup()
    before = snapshot(model)
    with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
        loop.run(5, x, y, outer=(x, y))
        assert not same(model, before)  # it holds w_5
        loop(x)
        loop.hypergrad(lam)
        loop.backward()
    assert same(model, before)


@pytest.mark.parametrize("at", [1, 3])
def test_the_model_is_left_bit_identical_by_an_exception(at):
    model, h, g, _lam, x, y = setup()
    before = snapshot(model)
    calls = 0

    def breaks(model, x, y):
        nonlocal calls
        calls += 1
        if calls == at:
            model(x)  # the buffers have moved by now
            raise KeyError("in the loss")
        return h(model, x, y)

    with pytest.raises(KeyError, match="in the loss"), bilevel.inner(model, breaks, g, lr=0.1) as loop:
        loop.run(5, x, y, outer=(x, y))
    assert same(model, before)


def test_commit_writes_weights_and_buffers():
    model, h, g, lam, x, y = setup()
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.run(3, x, y, outer=(x, y))
        weights = {n: w.detach().clone() for n, w in loop.weights.items()}
        loop.commit_()
        loop.step(x, y)  # the loop goes on
        loop.hypergrad(lam)
    for n, p in model.named_parameters():
        assert torch.equal(p, weights[n])
    # step 1 has α = 1 and leaves g out; steps 2 and 3 show the model both batches
    assert int(model[1].num_batches_tracked) == 5
    assert not torch.equal(model[1].running_mean, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_the_hypergradient_after_commit_is_that_before(engine):
    model, h, g, lam, x, y = setup()
    model.eval()
    with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
        loop.run(3, x, y, outer=(x, y))
        before = loop.hypergrad(lam)
        loop.commit_()
        assert torch.equal(loop.hypergrad(lam), before)


def test_buffers_are_those_of_a_plain_loop():
    """BatchNorm's statistics after K steps of GD are those of the training loop that was there before."""
    model, h, g, _lam, x, y = setup()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.manual_seed(3)
    for _ in range(4):
        optimizer.zero_grad()
        h(plain, x, y).backward()
        optimizer.step()
    torch.manual_seed(3)
    with bilevel.inner(model, h, g, solver="gd", lr=0.1) as loop:
        loop.run(4, x, y)
        loop.commit_()
    for (n, a), (_, b) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=n)


def test_backward_adds_and_hypergrad_returns():
    model, h, g, lam, x, y = setup()
    model.eval()
    lam.grad = torch.ones_like(lam)
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.run(3, x, y, outer=(x, y))
        grad = loop.hypergrad(lam)
        loop.backward()
    torch.testing.assert_close(lam.grad, 1 + grad)
    assert all(p.grad is None for p in model.parameters())


def test_structures_of_inputs():
    model, h, g, lam, x, y = setup()
    other = nn.Linear(1, 1, bias=False).double()
    scaled = lambda m, x, y: h(m, x, y) * other.weight.square().sum()
    with bilevel.inner(model, scaled, g, lr=0.1) as loop:
        loop.run(2, x, y, outer=(x, y))
        torch.manual_seed(1)
        one = loop.hypergrad(lam)
        torch.manual_seed(1)
        listed = loop.hypergrad([lam, other.weight])
        torch.manual_seed(1)
        named = loop.hypergrad({"a": lam})
        torch.manual_seed(1)
        module = loop.hypergrad(other)
        torch.manual_seed(1)
        generated = loop.hypergrad(p for p in (lam,))
    assert isinstance(listed, list)
    assert torch.equal(one, listed[0])
    assert torch.equal(one, generated[0])
    assert torch.equal(one, named["a"])
    assert torch.equal(module["weight"], listed[1])


@pytest.mark.parametrize("engine", ["reverse", "unroll", bilevel.Reverse("sqrt"), PLANNED])
def test_results_are_plain_tensors(engine):
    model, h, g, lam, x, y = setup()
    with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
        loop.run(3, x, y, outer=(x, y))
        results = [loop.hypergrad(lam), *loop.hypergrad(model).values(), loop.value, *loop.step(x, y)[:2]]
        assert not any(r.requires_grad for r in results)
        loop.backward()
        assert not lam.grad.requires_grad


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
def test_an_input_under_two_names_counts_once(engine):
    ridge = Ridge.random()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    with bilevel.inner(ridge.model(), lambda m, s: s * ridge.h(m), ridge.g, lr=0.1, engine=engine) as loop:
        loop.run(3, scale)
        one, other = loop.hypergrad(ridge.lam), loop.hypergrad(scale)
        again = loop.hypergrad([ridge.lam, scale, ridge.lam, scale])
    for a, b in zip(again, (one, other, one, other), strict=True):
        assert torch.equal(a, b)


def test_a_function_with_a_variable_of_its_own_is_no_leaf():
    """ctx.variable is a name like any other; only autograd's own leaf nodes end the search for λ."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lam):
            ctx.variable = "not a tensor"
            ctx.save_for_backward(x, lam)
            return x * lam

        @staticmethod
        def backward(ctx, grad):
            x, lam = ctx.saved_tensors
            return grad * lam, (grad * x).sum()

    ridge = Ridge.random()
    lam = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for h, expected in ((lambda m: Scale.apply(ridge.h(m), lam), None), (lambda m: ridge.h(m) * lam, "the same")):
        lam.grad = None
        with bilevel.inner(ridge.model(), h, ridge.g, solver="gd", lr=0.1) as loop:
            loop.run(3)
            loop.backward()
        if expected is None:
            got = lam.grad.clone()
    torch.testing.assert_close(got, lam.grad)


def test_a_non_leaf_goes_on_to_the_encoder_once():
    """Features of an encoder, in the batch or closed over: the same gradient; in the batch, one trip through it."""
    torch.manual_seed(0)
    encoder, head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), nn.Linear(4, 2).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    trips = []
    encoder[0].weight.register_hook(lambda _: trips.append(1))
    loss = lambda m, f, y: F.cross_entropy(m(f), y)
    features = encoder(x)
    with bilevel.inner(head, loss, loss, lr=0.2) as loop:
        loop.run(5, features, y, outer=(features, y))
        loop.backward()
    assert len(trips) == 1
    in_batch = [p.grad for p in encoder.parameters()]

    features = encoder(x)
    closed = lambda m: loss(m, features, y)
    with bilevel.inner(head, closed, closed, lr=0.2) as loop:
        loop.run(5)
        closed_over = loop.hypergrad(list(encoder.parameters()))
        at_features = loop.hypergrad(features)
    direct = torch.autograd.grad(features, list(encoder.parameters()), at_features, retain_graph=True)
    with bilevel.inner(head, closed, closed, lr=0.2, engine="unroll") as loop:
        loop.run(5)
        oracle = loop.hypergrad(list(encoder.parameters()))
    for a, b, c, d in zip(in_batch, closed_over, direct, oracle, strict=True):
        for other in (b, c, d):
            assert relative(a, other) < 1e-12


def test_a_tensor_both_in_the_batch_and_closed_over_counts_twice():
    ridge = Ridge.random()
    lam = ridge.lam
    h = lambda m, l: ridge.h(m) * l.exp()  # noqa: E741
    results = []
    for engine in ("reverse", "unroll", "forward"):
        with bilevel.inner(ridge.model(), h, ridge.g, solver="gd", lr=0.1, engine=engine) as loop:
            loop.run(4, lam)
            results.append(loop.hypergrad(lam))
            lam.grad = None
            loop.backward()
            results.append(lam.grad)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_the_initial_weights_as_outer_variable():
    """MAML: the gradient for w_0, by name or as a module; backward() gives it to the model only if it is named."""
    model, h, g, _lam, x, y = setup()
    model.eval()
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.run(3, x, y, outer=(x, y))
        grads = loop.hypergrad(model)
        loop.backward()
        assert all(p.grad is None for p in model.parameters())
        loop.backward(model)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[n])
    for engine in (bilevel.Reverse(truncate=2), "forward", "neumann"):
        solver = bilevel.BiGSAM(0.1, alpha=0.5)
        with bilevel.inner(model, h, g, solver=solver, engine=engine) as loop:
            loop.run(3, x, y, outer=(x, y))
            with pytest.raises(ValueError, match="does not go back to the initial weights"):
                loop.hypergrad(model)


def test_another_outer_loss_and_another_batch():
    model, h, g, lam, x, y = setup()
    model.eval()
    x2, y2 = torch.randn(4, 3, dtype=torch.float64), torch.randint(2, (4,))
    results = []
    for engine in ("reverse", "unroll"):
        with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
            loop.run(3, x, y, outer=(x, y))
            by_batch = loop.hypergrad(lam, outer=(x2, y2))
            by_loss = loop.hypergrad(lam, loss=F.cross_entropy(loop(x2), y2))
            torch.testing.assert_close(by_batch, by_loss)
            penalty = loop.hypergrad(lam, loss=sum(w.square().sum() for w in loop.weights.values()))
            results.append((by_batch, penalty))
            with pytest.raises(ValueError, match="not both"):
                loop.hypergrad(lam, outer=(x, y), loss=loop(x).sum())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_loss_of_earlier_weights_is_refused_where_it_would_be_wrong():
    model, h, g, lam, x, y = setup()
    model.eval()
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.run(2, x, y, outer=(x, y))
        early = F.cross_entropy(loop(x), y)
        loop.run(2, x, y)
        with pytest.raises(ValueError, match="computed from weights of an earlier step"):
            loop.hypergrad(lam, loss=early + F.cross_entropy(loop(x), y))
    with bilevel.inner(model, h, g, lr=0.1, engine="unroll") as loop:
        loop.run(2, x, y, outer=(x, y))
        early = F.cross_entropy(loop(x), y)
        loop.run(2, x, y)
        both = loop.hypergrad(lam, loss=early + F.cross_entropy(loop(x), y))
        torch.testing.assert_close(both, loop.hypergrad(lam, loss=early) + loop.hypergrad(lam))


def test_hypergrad_before_any_step_is_the_direct_gradient():
    model, h, g, _lam, x, y = setup()
    model.eval()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    scaled = lambda m, x, y: scale.square() * g(m, x, y)
    expected = 4 * g(model, x, y).detach()
    for engine in ("reverse", "unroll", "forward", bilevel.CG()):
        solver = bilevel.GD(0.1)
        with bilevel.inner(model, h, scaled, solver=solver, engine=engine) as loop:
            torch.testing.assert_close(loop.hypergrad(scale, outer=(x, y)), expected)
            loop.backward(outer=(x, y))
            torch.testing.assert_close(scale.grad, expected)
            scale.grad = None


def test_the_handle_after_its_block():
    model, h, g, lam, x, y = setup()
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.step(x, y, outer=(x, y))
    for use in (
        lambda: loop.step(x, y),
        lambda: loop.run(2, x, y),
        lambda: loop(x),
        lambda: loop.hypergrad(lam),
        lambda: loop.backward(),
        lambda: loop.commit_(),
        lambda: loop.value,
        lambda: loop.weights,
    ):
        with pytest.raises(RuntimeError, match="this loop's block has ended"):
            use()


def test_decorator():
    model, h, g, lam, x, y = setup()

    @bilevel.inner(model, h, g, lr=0.1)
    def train(loop, steps, *, scale=1.0):
        """What it does."""
        loop.run(steps, x, y, outer=(x, y))
        return scale * loop.hypergrad(lam), loop.steps

    torch.manual_seed(5)
    first = train(3)
    torch.manual_seed(5)
    again = train(3, scale=2.0)
    torch.testing.assert_close(again[0], 2 * first[0])
    assert first[1] == 3
    assert train.__doc__ == "What it does."


def test_a_decorator_follows_the_model_and_opens_inside_itself():
    ridge = Ridge.random()
    model = ridge.model()
    block = bilevel.inner(model, ridge.h, ridge.g, solver="gd", lr=0.1)

    @block
    def train(loop, depth=0):
        loop.step()
        inside = train(depth - 1) if depth else None
        return float(loop.value), inside, loop.steps

    value, inside, steps = train(1)
    with bilevel.inner(model, ridge.h, ridge.g, solver="gd", lr=0.1) as loop:
        values = [float(loop.value) for _ in range(2) if loop.step()]
    assert (value, inside[0], steps) == (values[0], values[1], 1)  # a block inside starts from the weights of now
    with torch.no_grad():
        model.w += 1
    assert train()[0] != value


def test_mini_batches_in_a_loop_that_exists():
    """A DataLoader with indices, λ per sample: the example of the design."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y, torch.arange(8)), batch_size=3)
    lam = torch.zeros(8, dtype=torch.float64, requires_grad=True)

    def h(model, x, y, i):
        return (torch.sigmoid(lam[i]) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model, x, y):
        return F.cross_entropy(model(x), y)

    grads = []
    for engine in ("reverse", "unroll", bilevel.Reverse("sqrt"), PLANNED):
        with bilevel.inner(model, h, g, lr=0.5, engine=engine) as loop:
            for xb, yb, i in loader:
                loop.step(xb, yb, i, outer=(x, y))
            grads.append(loop.hypergrad(lam))
    assert bool((grads[0] != 0).all())
    assert relative(grads[0], grads[1]) < 1e-12
    assert relative(grads[2], grads[1]) < 1e-12


def test_batches_of_any_structure():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    features = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    h = lambda m, b, flag: F.cross_entropy(m(b["x"][0]), b["y"]) * (2 if flag == "twice" else 1)
    batch = {"x": (features,), "y": torch.tensor([0, 1, 0, 1])}
    grads = []
    for engine in ("reverse", "unroll"):
        with bilevel.inner(model, h, lambda m, b: h(m, b, ""), lr=0.1, engine=engine) as loop:
            loop.run(3, batch, "twice", outer=batch)  # one object, not a tuple: it is the batch
            grads.append(loop.hypergrad(features))
    torch.testing.assert_close(*grads)


def test_inside_no_grad():
    model, h, g, lam, x, y = setup()
    model.eval()
    with torch.no_grad(), bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.run(3, x, y, outer=(x, y))
        inside = loop.hypergrad(lam)
        start = loop.hypergrad(model)
        assert not loop(x).requires_grad
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.run(3, x, y, outer=(x, y))
        torch.testing.assert_close(loop.hypergrad(lam), inside)
        torch.testing.assert_close(loop.hypergrad(model)["0.weight"], start["0.weight"])


def test_value_and_losses():
    ridge = Ridge.random()
    model = ridge.model()
    with bilevel.inner(model, ridge.h, ridge.g, lr=0.1) as loop:
        assert float(loop.value) == pytest.approx(float(ridge.g(model).detach()))
        before = float(ridge.h(model).detach())
        losses = loop.step()
        assert float(losses.h) == pytest.approx(before)
        assert float(loop.value) == pytest.approx(float(ridge.g(model).detach()))  # the model holds w_1
        assert losses.g is None  # α₁ = 1
        assert loop.step().g is not None
        assert not loop.value.requires_grad
        assert loop.steps == 2


def test_the_outer_batch_stays_until_another_is_given():
    model, h, g, _lam, x, y = setup()
    seen = []

    def watched(model, x, y):
        seen.append(len(x))
        return g(model, x, y)

    with bilevel.inner(model, h, watched, solver=bilevel.BiGSAM(0.1, alpha=0.5)) as loop:
        loop.step(x, y, outer=(x, y))
        loop.step(x, y)
        loop.step(x, y, outer=(x[:3], y[:3]))
        _ = loop.value
    assert seen == [6, 6, 3, 3]


def test_retain_graph_as_in_autograd():
    encoder, head = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    features = encoder(x).tanh()
    loss = lambda m, f, y: F.cross_entropy(m(f), y)
    with bilevel.inner(head, loss, loss, lr=0.2) as loop:
        loop.run(2, features, y, outer=(features, y))
        first = loop.hypergrad(encoder, retain_graph=True)
        loop.backward()
        torch.testing.assert_close(encoder.weight.grad, first["weight"])
        with pytest.raises(RuntimeError, match="second time"):
            loop.hypergrad(encoder)


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_a_loop_inside_a_loss(engine):
    """Three levels: μ weighs the loss of the innermost loop, whose result is part of the loss of the next."""
    mu = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    a = nn.ParameterDict({"a": torch.tensor([0.3], dtype=torch.float64)})
    b = nn.ParameterDict({"b": torch.tensor([0.5], dtype=torch.float64)})
    near = lambda m, a: mu * (m["b"] - a).square().sum()
    nested = bilevel.inner(b, near, near, solver="gd", lr=0.1, engine="unroll")

    def h(model):
        with nested as loop:
            loop.run(3, model["a"])
            return (loop.weights["b"] - 2).square().sum() + model["a"].square().sum()

    def run():
        with bilevel.inner(a, h, lambda m: (m["a"] - 1).square().sum(), solver="gd", lr=0.1, engine=engine) as loop:
            loop.run(4)
            return loop.hypergrad(mu), float(loop.value)

    got, _ = run()
    expected = differences(lambda: run()[1], mu, torch.ones_like(mu))
    assert float(got) == pytest.approx(expected, rel=1e-8)


# --- the block is the plain loop ---


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", MODELS)
def test_the_block_is_the_plain_loop(name, engine):
    """Bit for bit with reverse; attention has another kernel in the block than outside."""
    bits = False if name in ("attention", "weight norm", "old weight norm") else None
    exact(losses(MODELS[name]), engine, bits=bits)


@pytest.mark.usefixtures("double")
def test_ridge_as_a_plain_loop():
    """The judge itself, against a closed form: many plain steps, and differences of them."""
    ridge = Ridge.random()
    penalty = lambda m, lam: (lam.exp() - ridge.lam.exp()) * m.w.square().sum() / 2
    build = lambda lam: Case(ridge.model(), lambda m: ridge.h(m) + penalty(m, lam), ridge.g, (), ())
    lam = ridge.lam.detach().clone().requires_grad_()
    got = slope(build, lam, torch.ones(()), steps=300)
    assert got == pytest.approx(float(ridge.hypergradient()), rel=1e-6)


# --- names and options ---


def test_unknown_names(parts):
    model, h, g, _, _, _ = parts
    with pytest.raises(ValueError, match=r"unknown engine 'ift'. Known: 'reverse', 'unroll', 'forward', 'cg'"):
        bilevel.inner(model, h, g, engine="ift")
    with pytest.raises(ValueError, match=r"checkpoint must be .*'sqrt'"):
        bilevel.Reverse(checkpoint="root")  # pyright: ignore
    with pytest.raises(ValueError, match=r"checkpoint must be .*at least 1"):
        bilevel.Reverse(checkpoint=0)
    with pytest.raises(ValueError, match=r"truncate must be at least 1"):
        bilevel.Reverse(truncate=0)
    with bilevel.inner(model, h, g) as loop, pytest.raises(ValueError, match=r"run takes at least one step, got 0"):
        loop.run(0)


def test_a_class_in_place_of_an_object_is_named(parts):
    model, h, g, *_ = parts
    with pytest.raises(ValueError, match=r"Make an object of it: Reverse\(\)"):
        bilevel.inner(model, h, g, engine=bilevel.Reverse)
    with pytest.raises(ValueError, match=r"Make an object of it: GD\(t=0.1\)"):
        bilevel.inner(model, h, g, solver=bilevel.GD)


def test_a_loop_that_was_not_opened_says_how(parts):
    model, h, g, _, x, y = parts
    with pytest.raises(AttributeError, match=r"Open the block first: with bilevel.inner\(...\) as loop: loop.step"):
        bilevel.inner(model, h, g).step(x, y)


# --- a loop within a loss ---


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("outside", ["reverse", "unroll"])
@pytest.mark.parametrize("within", ["reverse", "sqrt", "memory", "forward"])
def test_a_loop_within_a_loss_that_has_no_graph(within, outside):
    """Only an unrolled loop hands on what it depends on; of any other the result looks like a constant."""
    mu = torch.tensor(0.7, requires_grad=True)
    a, b = Vector(torch.tensor([0.3])), Vector(torch.tensor([0.5]))
    near = lambda m, w: mu * (m.w - w).square().sum()

    def h(model):
        with bilevel.inner(b, near, near, solver="gd", lr=0.1, engine=ENGINES[within], check=False) as loop:
            loop.run(3, model.w)
            return (loop.weights["w"] - 2).square().sum() + model.w.square().sum()

    with refused("unroll"):
        attempt(a, h, lambda m: (m.w - 1).square().sum(), mu, engine=outside)


# --- options of the wrong kind ---


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": "0.5"}, "lr must be a number, .* got '0.5'"),
        ({"solver": ("GD", "0.5")}, "GD: t must be a number, .* got '0.5'"),
        ({"lr": [0.5]}, r"lr must be a number, .* got \[0.5\]"),
        ({"lr": None, "clip": "1"}, "clip= takes the largest norm as a number, .* got str"),
    ],
)
def test_options_of_the_wrong_kind(options, words):
    lam = start()
    with refused(words):
        if "solver" in options:
            options = {"solver": getattr(bilevel, options["solver"][0])(options["solver"][1]), "lr": None}
        attempt(mlp(), *weighted(lam), lam, data(), data(5), 1, **options)


# --- what the body may do ---


@torch.no_grad()
def evaluate_the_average(k, model, _):
    """As timm and diffusers do: the average into the model, a look at it, and the weights back."""
    stored = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.mul_(0.9)
    model(torch.ones(2, 3))
    for p, w in zip(model.parameters(), stored, strict=True):
        p.copy_(w)


DOES = {
    "to": lambda k, m, o: m.to(torch.float64).double().train().requires_grad_(True),
    "zero_grad": lambda k, m, o: (m.zero_grad(), o.zero_grad()),
    "backward": lambda k, m, o: m(torch.ones(2, 3)).sum().backward(),
    "deepcopy": lambda k, m, o: copy.deepcopy(m)(torch.ones(2, 3)).sum().backward(),
    "an average": evaluate_the_average,
    "look": lambda k, m, o: (m.state_dict(keep_vars=True), list(m.parameters()), o.state_dict()),
    "seed": lambda k, m, o: torch.manual_seed(k),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", DOES)
def test_what_the_body_may_do(name, engine):
    """None of it changes the loop."""
    exact(losses(mlp), engine, between=DOES[name], but="grad" if name == "backward" else "")

"""Bad input: each mistake gets an error that names it and the fix."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from problems import Ridge, Vector, differences, hypergrad, value, weighted
from torch import nn

import bilevel_plugin as bilevel


@pytest.fixture
def parts(double):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    lam = torch.zeros(6, requires_grad=True)

    h, g = weighted(lam)
    return model, h, g, lam, x, y


def step_with(model, h, g, x, y, **options):
    with bilevel.inner(model, h, g, solver=bilevel.BiGSAM(0.1, alpha=0.5), **options) as loop:
        loop.step(x, y, outer=(x, y))


# --- losses ---


@pytest.mark.parametrize("which", ["h", "g"])
@pytest.mark.parametrize(
    ("returns", "error", "message"),
    [
        (lambda m, x: m(x), ValueError, r"{} must return a scalar, got a tensor of shape \(6, 2\).*\.mean\(\)"),
        (lambda m, x: m(x).sum().item(), TypeError, r"{} must return a scalar tensor, got float.*loss\.item\(\)"),
        (lambda m, x: (m(x).sum(), 1, 2), TypeError, r"{} must return a scalar tensor, got tuple"),
        (lambda m, x: (1.0, m(x)), TypeError, r"{} must return a scalar tensor, got float"),
        (lambda m, x: None, TypeError, r"{} must return a scalar tensor, got NoneType"),
        (lambda m, x: m(x).argmax(), TypeError, r"{} must return a real floating-point loss, got torch.int64"),
        (lambda m, x: m(x).sum().detach(), ValueError, r"{} does not depend on the weights"),
        (lambda m, x: x.sum().requires_grad_(), ValueError, r"{} does not depend on the weights"),
    ],
)
def test_what_a_loss_returns(parts, which, returns, error, message):
    model, h, g, _, x, y = parts
    bad = lambda m, x, y: returns(m, x)
    with pytest.raises(error, match=r"bilevel.inner: " + message.format(which)):
        step_with(model, *((bad, g) if which == "h" else (h, bad)), x, y)
    with (
        pytest.raises(error, match=r"bilevel.inner: " + message.format("g")),
        bilevel.inner(model, h, bad, solver="gd", lr=0.1) as loop,
    ):
        loop.step(x, y, outer=(x, y))
        loop.backward()


def test_a_loss_that_is_no_function(parts):
    model, h, _, _, _, _ = parts
    with pytest.raises(TypeError, match=r"g must be a function of \(model, \*batch\), got Tensor"):
        bilevel.inner(model, h, torch.zeros(()))


def test_a_loss_with_other_arguments_than_its_batch(parts):
    model, h, g, _, x, y = parts
    with bilevel.inner(model, h, g, solver=bilevel.BiGSAM(0.1, alpha=0.5)) as loop:
        with pytest.raises(TypeError, match=r"h\(model, \*batch\) was called with a batch of 1.*loop\.step"):
            loop.step(x, outer=(x, y))
        with pytest.raises(TypeError, match=r"g\(model, \*batch\) was called with a batch of 0.*outer=\(\.\.\.\)"):
            loop.step(x, y, outer=())
    with pytest.raises(TypeError, match=r"from the loss itself"), bilevel.inner(model, h, g, lr=0.1) as loop:

        def raises(model, x, y):
            raise TypeError("from the loss itself")

        step_with(model, raises, g, x, y)


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
def test_a_loss_that_is_not_finite_names_its_step(parts, engine):
    model, h, g, _, x, y = parts
    count = 0

    def breaks(model, x, y):
        nonlocal count
        count += 1
        return h(model, x, y) * (math.nan if count == 3 else 1.0)

    with bilevel.inner(model, breaks, g, solver="gd", lr=0.1, engine=engine) as loop:
        loop.run(2, x, y)
        with pytest.raises(FloatingPointError, match=r"h is nan at step k = 3. A smaller rate may help"):
            loop.step(x, y)


def test_weights_that_are_not_finite_name_the_step_that_made_them():
    model = Vector(torch.ones(1))
    grow = lambda m: m.w.pow(4).sum()
    with bilevel.inner(model, grow, grow, solver="gd", lr=1e4) as loop, pytest.raises(FloatingPointError) as caught:
        loop.run(50)
    assert "The weight 'w' is not finite" in str(caught.value) or "h is inf" in str(caught.value)


@pytest.mark.parametrize("engine", ["reverse", "unroll", bilevel.Reverse("sqrt"), bilevel.Reverse(memory="1GiB")])
def test_an_adjoint_that_is_not_finite_names_its_step(engine):
    """√ at 0 in step 2 of 4: the loss and its gradient are finite, the second derivative is not."""
    model = Vector(torch.zeros(2, dtype=torch.float64))
    lam = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def h(m, k):
        return (lam * (m.w + 1).square()).sum() if k != 2 else (m.w.sum() + (lam * (m.w - m.w.detach())).pow(1.5).sum())

    with bilevel.inner(model, h, lambda m: m.w.square().sum(), solver="gd", lr=0.1, engine=engine) as loop:
        for k in range(1, 5):
            loop.step(k)
        with pytest.raises(FloatingPointError, match=r"not finite: it stops being so at step k = 2"):
            loop.hypergrad(lam)


# --- inputs ---


def test_inputs_that_no_loss_reaches(parts):
    model, h, g, lam, x, y = parts
    stranger = torch.zeros(3, requires_grad=True)
    for engine in ("reverse", "unroll", "forward"):
        with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
            loop.run(2, x, y, outer=(x, y))
            with pytest.raises(
                ValueError, match=r"neither loss depends on input 1 \(shape \(3,\)\).*allow_unused=True"
            ):
                loop.hypergrad([lam, stranger])
            assert torch.equal(loop.hypergrad([lam, stranger], allow_unused=True)[1], torch.zeros(3))


def test_inputs_of_the_wrong_kind(parts):
    model, h, g, _, x, y = parts
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        loop.step(x, y, outer=(x, y))
        with pytest.raises(ValueError, match=r"does not require grad.*before the first step"):
            loop.hypergrad(x)
        with pytest.raises(ValueError, match=r"torch.int64.*only floating-point tensors"):
            loop.hypergrad(y)
        with pytest.raises(TypeError, match=r"must be tensors, got str"):
            loop.hypergrad(["lam"])
        with pytest.raises(ValueError, match=r"the inputs are empty"):
            loop.hypergrad([])


def test_backward_without_an_outer_variable(parts):
    model, _, g, _, x, y = parts
    with bilevel.inner(model, g, g, lr=0.1) as loop:
        loop.step(x, y, outer=(x, y))
        with pytest.raises(ValueError, match=r"found no outer variable"):
            loop.backward()


# --- changes between the loop and the reverse sweep ---


@pytest.mark.parametrize("checkpoint", [1, "sqrt"])
@pytest.mark.parametrize("what", ["batch", "outer batch", "outer variable"])
def test_changed_in_place(parts, what, checkpoint):
    model, h, g, lam, x, y = parts
    xv = x.clone()
    solver = bilevel.BiGSAM(0.1, alpha=0.5)
    with bilevel.inner(model, h, g, solver=solver, engine=bilevel.Reverse(checkpoint)) as loop:
        loop.run(3, x, y, outer=(xv, y))
        tensor = {"batch": x, "outer batch": xv, "outer variable": lam}[what]
        message = {"batch": "a tensor in the batch of h", "outer batch": "a tensor in the batch of g"}.get(what, what)
        loop.step(x, y)
        with torch.no_grad():
            tensor.add_(1)
        with pytest.raises(RuntimeError, match=f"{message}.*was changed in place after step k = "):
            loop.hypergrad(lam, outer=(x.clone(), y))


@pytest.mark.parametrize("engine", ["reverse", bilevel.Reverse("sqrt"), bilevel.Reverse(memory="1GiB"), "unroll"])
@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_weights_changed_by_hand(parts, at, data, engine):
    """A projection, say: w_k is no longer what step k gave, and its derivative is not known."""
    model, h, g, lam, x, y = parts
    with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
        if at:
            loop.run(at, x, y, outer=(x, y))
        weight = loop.weights["0.weight"]
        with torch.no_grad():
            (weight.data if data else weight).clamp_(-0.1, 0.1)
        with pytest.raises(RuntimeError, match=rf"the weight '0.weight' was changed by hand after step k = {at}"):
            loop.hypergrad(lam, outer=(x, y)) if at == 5 else loop.step(x, y, outer=(x, y))


def test_weights_that_are_looked_at(parts):
    model, h, g, lam, x, y = parts
    with bilevel.inner(model, h, g, lr=0.1) as loop:
        for _ in range(3):
            loop.step(x, y, outer=(x, y))
            assert all(w.isfinite().all() for w in loop.weights.values())
        loop.hypergrad(lam)


def test_changes_that_no_version_tells(parts):
    """A closed-over number, Python's random numbers, a non-leaf written to under no_grad: the replay notices."""
    model, h, g, lam, x, y = parts
    scale = 1.0
    features = (x * 1.0).requires_grad_() * 1.0
    losses = {
        "number": lambda m, x, y: scale * h(m, x, y),
        "random": lambda m, x, y: random.random() * h(m, x, y),
        "non-leaf": lambda m, x, y: h(m, features, y),
    }
    for name, loss in losses.items():
        with bilevel.inner(model, loss, g, solver="gd", lr=0.1) as loop:
            loop.run(3, x, y, outer=(x, y))
            scale = 2.0 if name == "number" else scale
            if name == "non-leaf":
                with torch.no_grad():
                    features.mul_(2)
            with pytest.raises(RuntimeError, match=r"step k = \d, run again for the hypergradient, ended elsewhere"):
                loop.hypergrad(lam)
    with bilevel.inner(model, losses["random"], g, solver="gd", lr=0.1, engine="unroll", check=False) as loop:
        loop.run(3, x, y, outer=(x, y))
        loop.hypergrad(lam)  # nothing is run again


# --- names and options ---


def test_unknown_names(parts):
    model, h, g, _, _, _ = parts
    with pytest.raises(ValueError, match=r"unknown engine 'ift'. Known: 'reverse', 'unroll', 'forward', 'cg'"):
        bilevel.inner(model, h, g, engine="ift")
    with pytest.raises(ValueError, match=r"checkpoint must be 'sqrt' or at least 1"):
        bilevel.Reverse(checkpoint="root")  # pyright: ignore
    with pytest.raises(ValueError, match=r"checkpoint must be 'sqrt' or at least 1"):
        bilevel.Reverse(checkpoint=0)
    with pytest.raises(ValueError, match=r"truncate must be at least 1"):
        bilevel.Reverse(truncate=0)
    with bilevel.inner(model, h, g) as loop, pytest.raises(ValueError, match=r"run takes at least one step, got 0"):
        loop.run(0)


def test_implicit_engines_refuse_what_has_no_fixed_point(parts):
    model, h, g, _, _, _ = parts
    with pytest.raises(ValueError, match=r"CG needs a fixed point of the step, and every=3 alternates"):
        bilevel.inner(model, h, g, solver=bilevel.BiGSAM(0.1, alpha=0.5, every=3), engine="cg")
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"Neumann needs a fixed point of the step, and Adam divides by a root"):
        bilevel.inner(model, h, g, optimizer=adam, engine="neumann")
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(ValueError, match=r"CG needs a symmetry of the step, and with momentum.*'neumann' takes it"):
        bilevel.inner(model, h, g, optimizer=momentum, engine="cg")
    groups = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.2)
    with pytest.raises(ValueError, match=r"with a rate for each group"):
        bilevel.inner(model, h, g, optimizer=groups, engine="cg")


def test_implicit_engines_refuse_a_loop_that_has_not_settled():
    ridge = Ridge.random()
    for engine in ("cg", "neumann"):
        with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.2, engine=engine) as loop:
            loop.run(2)
            with pytest.raises(RuntimeError, match=r"has not come to it: one step on, the gradient would change by"):
                loop.hypergrad(ridge.lam)
            loop.run(200)
            loop.hypergrad(ridge.lam)


def test_implicit_engines_say_when_they_fail():
    line = Ridge.random()
    flat = lambda m: (m.w.sum() - line.lam).square()  # a line of minimisers: no derivative of w(λ)
    with bilevel.inner(line.model(), flat, line.g, solver="gd", lr=0.1, engine="cg") as loop:
        loop.run(100)
        with pytest.raises(RuntimeError, match=r"bilevel.CG: it met a direction of curvature"):
            loop.hypergrad(line.lam)
    ridge = Ridge.random()
    with bilevel.inner(ridge.model(), ridge.h, ridge.g, solver="gd", lr=0.1, engine=bilevel.Neumann(3)) as loop:
        loop.run(300)
        with pytest.raises(RuntimeError, match=r"bilevel.Neumann: it has a relative residual of .* after 3 iterations"):
            loop.hypergrad(ridge.lam)
    bent = lambda m: (m.w.square() * ridge.lam).sum() / 2
    with bilevel.inner(ridge.model(), bent, ridge.g, solver="gd", lr=10.0, engine="neumann") as loop:
        with torch.no_grad():
            ridge.lam.fill_(1.0)
        loop.run(2)  # from 0, where it stays, at a rate that does not contract
        with pytest.raises(RuntimeError, match=r"the Neumann series diverges"):
            loop.hypergrad(ridge.lam)


def test_forward_refuses_many_directions_and_what_it_did_not_follow(parts):
    model, h, g, lam, x, y = parts
    many = torch.zeros(300, requires_grad=True)
    wide = lambda m, x, y: h(m, x, y) * many.exp().mean()
    with bilevel.inner(model, wide, g, lr=0.1, engine="forward") as loop:
        with pytest.raises(ValueError, match=r"would follow 30\d outer directions.*Forward\(wrt="):
            loop.step(x, y, outer=(x, y))
    with bilevel.inner(model, wide, g, lr=0.1, engine=bilevel.Forward(wrt=[lam])) as loop:
        loop.run(3, x, y, outer=(x, y))
        followed = loop.hypergrad(lam)
        with pytest.raises(ValueError, match=r"did not follow the input of shape .300,."):
            loop.hypergrad([lam, many])
    with bilevel.inner(model, wide, g, lr=0.1) as loop:
        loop.run(3, x, y, outer=(x, y))
        torch.testing.assert_close(loop.hypergrad(lam), followed)


# --- models and modes ---


def test_inference_mode(parts):
    model, h, g, _, x, y = parts
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode is on.*no_grad is fine"):
        with bilevel.inner(model, h, g):
            pass
    with bilevel.inner(model, h, g, lr=0.1) as loop, torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"inference_mode is on"):
            loop.step(x, y)
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"'weight' was made under torch.inference_mode"):
        bilevel.inner(model, h, g)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, on the way to its compiler
def test_compiled_modules(parts):
    model, h, g, _, _, _ = parts
    with pytest.raises(TypeError, match=r"the model is torch.compile'd.*_orig_mod"):
        bilevel.inner(torch.compile(model), h, g)
    with pytest.raises(TypeError, match=r"the submodule '0' is torch.compile'd"):
        bilevel.inner(nn.Sequential(torch.compile(model)), h, g)
    model[0].compile()
    with pytest.raises(TypeError, match=r"the submodule '0' is torch.compile'd"):
        bilevel.inner(model, h, g)


def test_parameters_that_can_not_be_trained(parts):
    _, h, g, _, _, _ = parts

    class Holder(nn.Module):
        def __init__(self, tensor):
            super().__init__()
            self.p = nn.Parameter(tensor, requires_grad=tensor.is_complex())

    with pytest.raises(ValueError, match=r"no trainable parameter.*torch.int64; integer ones can't be trained"):
        bilevel.inner(Holder(torch.arange(3)), h, g)
    with pytest.raises(TypeError, match=r"'p' is complex .torch.complex128..*real and imaginary parts"):
        bilevel.inner(Holder(torch.ones(3, dtype=torch.complex128)), h, g)
    with pytest.raises(ValueError, match=r"no trainable parameter"):
        bilevel.inner(nn.Linear(2, 2).requires_grad_(False), h, g)
    with pytest.raises(ValueError, match=r"no trainable parameter"):
        bilevel.inner(nn.Tanh(), h, g)
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got function"):
        bilevel.inner(h, h, g)  # pyright: ignore


def test_an_integer_parameter_beside_trainable_ones_is_like_a_buffer(parts):
    _, _, _, _, x, y = parts

    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.shift = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)

        def forward(self, x):
            return super().forward(x) + self.shift

    g = lambda m, x, y: F.cross_entropy(m(x), y)
    scale = torch.ones((), requires_grad=True)
    problem, batch = (Shifted(), lambda m, x, y: scale * g(m, x, y), g), (x, y)
    got = hypergrad(*problem, scale, batch, batch, lr=0.1)
    expected = differences(lambda: value(*problem, batch, batch, lr=0.1), scale, torch.ones_like(scale))
    assert float(got) == pytest.approx(expected, rel=1e-7)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class OnceModule(nn.Module):
    def forward(self, x):
        return Once.apply(x)


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward", "cg"])
def test_once_differentiable_functions_are_refused(parts, engine):
    """autograd.grad takes them for constants, so that an unrolled gradient is wrong without a word."""
    _, h, g, lam, x, y = parts
    model = nn.Sequential(nn.Linear(3, 4), OnceModule(), nn.Linear(4, 2))
    with bilevel.inner(model, h, g, solver=bilevel.GD(0.1), engine=engine) as loop:
        with pytest.raises(RuntimeError, match=r"once_differentiable, and that has no second derivative"):
            loop.run(2, x, y, outer=(x, y))
            loop.hypergrad(lam)
    gave_nothing = torch.autograd.grad(
        torch.autograd.grad(Once.apply(x.requires_grad_()).square().sum(), x, create_graph=True)[0].sum(),
        x, allow_unused=True,
    )  # fmt: skip
    assert gave_nothing == (None,)  # what the refusal is for


def test_fused_weight_norm_is_refused_where_it_can_not_be_replaced(parts):
    """Called by hand, the fused kernel of torch has a wrong second derivative; the parametrization is replaced."""
    model, _, g, lam, x, y = parts
    fused = lambda m, x, y: lam[0].exp() * g(m, x, y) + torch._weight_norm(m[0].weight, torch.ones(4, 1)).sum()
    with bilevel.inner(model, fused, g, solver="gd", lr=0.1) as loop:
        with pytest.raises(RuntimeError, match=r"uses torch's weight_norm and that has no second derivative"):
            loop.step(x, y, outer=(x, y))


def test_a_wrapped_optimizer_is_to_be_unwrapped():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = nn.Linear(2, 1)
    wrapped = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(TypeError, match=r"Give the wrapped one: optimizer.optimizer"):
        bilevel.inner(model, lambda m: m.weight.sum(), lambda m: m.weight.sum(), optimizer=wrapped)

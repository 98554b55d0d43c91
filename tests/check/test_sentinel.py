"""The sentinel on a sample of the zoo; `make sentinel` runs all of it."""

import warnings

import pytest
import sentinel_study
import torch
import zoo

import bilevel_plugin as bilevel

HONEST = sentinel_study.spread(zoo.honest(), 40)
DISHONEST = sentinel_study.spread(zoo.dishonest(), 24)


@pytest.mark.parametrize("problem", HONEST, ids=lambda p: p.name)
def test_no_alarm_where_all_is_right(problem):
    row = sentinel_study.examine(problem, True, False)
    assert not row.alarm, row.message
    assert not row.refused
    assert not row.failed


@pytest.mark.parametrize("problem", DISHONEST, ids=lambda p: p.name)
def test_what_moves_the_hypergradient_is_told(problem):
    row = sentinel_study.examine(problem, False, False)
    assert row.caught or (row.moved is not None and row.moved < 0.05)


def semi_gradient(model, x):
    return (model(x) - (2 * model(x)).detach()).square().mean()


def told(check):
    """The warnings of a loop with a semi-gradient whose hypergradient is taken twice."""
    model, x = torch.nn.Linear(3, 1), torch.ones(4, 3)
    lam = torch.tensor(0.1, requires_grad=True)
    h = lambda m, x: lam.exp() * semi_gradient(m, x)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with bilevel.inner(model, h, lambda m, x: m(x).mean(), solver="gd", lr=0.1, check=check) as loop:
            loop.run(2, x, outer=(x,))
            loop.hypergrad(lam)
            loop.hypergrad(lam)
    return [str(w.message) for w in found if w.category is bilevel.DerivativeWarning]


def test_first_always_and_never():
    """Once for a model with its losses, in every hypergradient, or never."""
    assert len(told("always")) == 2
    (message,) = told("first")
    for part in ("the second derivative of h", "step k = 2", "it differs by", ".detach()", "bilevel.gradcheck"):
        assert part in message
    assert told("first") == []  # another model of the same make, and the same losses
    assert told(False) == []
    with pytest.raises(ValueError, match="check= takes 'first', 'always' or False"):
        told("sometimes")


@pytest.mark.parametrize("engine", ["unroll", "forward"])
@pytest.mark.parametrize("noise", [1e-8, 1e-6, 1e-2, 1.0])
def test_random_numbers_do_not_hide_a_wrong_derivative(engine, noise):
    """Numbers of a generator of its own differ at each evaluation, and their differences agree with no derivative."""
    model, x = torch.nn.Linear(3, 1), torch.ones(4, 3)
    own, lam = torch.Generator().manual_seed(0), torch.tensor(0.1, requires_grad=True)

    def h(model, x):
        shaken = 1 + noise * torch.randn((), generator=own)
        return lam.exp() * shaken * semi_gradient(model, x)

    options = {"solver": "gd", "lr": 0.1, "engine": engine, "check": "always"}
    with bilevel.inner(model, h, lambda m, x: m(x).mean(), **options) as loop:
        loop.run(2, x, outer=(x,))
        with pytest.warns(bilevel.DerivativeWarning, match="a different value at each evaluation"):
            loop.hypergrad(lam)


@pytest.mark.parametrize("engine", ["unroll", "forward"])
def test_no_alarm_where_random_numbers_are_drawn_from_torch(engine):
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5)), torch.ones(4, 3)
    lam = torch.tensor(0.1, requires_grad=True)
    h = lambda m, x: lam.exp() * (m(x) + torch.randn(4, 8)).square().mean()
    options = {"solver": "gd", "lr": 0.1, "engine": engine, "check": "always"}
    with bilevel.inner(model, h, lambda m, x: m(x).abs().sum(), **options) as loop:
        loop.run(2, x, outer=(x,))
        assert loop.hypergrad(lam).isfinite()


# --- what it looks at, and when ---


def warnings_of(model, h, g, lam, steps=(2,), batch=(), outer=None, **options):
    """The DerivativeWarnings of one hypergradient."""
    options = {"solver": "gd", "lr": 0.1, "check": "always", **options}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with bilevel.inner(model, h, g, **options) as loop:
            loop.run(*steps, *batch, outer=batch if outer is None else outer)
            loop.hypergrad(lam)
    return [str(w.message) for w in found if w.category is bilevel.DerivativeWarning]


def setting(rows=12):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.randn(rows, 3), torch.tensor(0.3, requires_grad=True)


def slope(model, x):
    """The gradient of the model for points that are leaves of its own."""
    points = x.detach().clone().requires_grad_()
    return torch.autograd.grad(model(points).sum(), points, create_graph=True)[0]


def slope_at_made_points(model, x):
    points = torch.linspace(-1, 1, 3 * len(x)).view(-1, 3).requires_grad_()
    return torch.autograd.grad(model(points).sum(), points, create_graph=True)[0]


def slope_at_the_batch(model, x):
    x.requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


POINTS = torch.linspace(-1, 1, 12).view(-1, 3)


def slope_at_closed_over_points(model, x):
    POINTS.requires_grad_()
    return torch.autograd.grad(model(POINTS).sum(), POINTS, create_graph=True)[0]


SLOPES = [slope, slope_at_made_points, slope_at_the_batch, slope_at_closed_over_points]


@pytest.mark.parametrize("penalty", SLOPES, ids=lambda f: f.__name__)
def test_gradient_penalties_are_checked_and_right(penalty):
    """The points that a loss makes for a derivative of its own are no outer variables."""
    model, x, lam = setting()
    h = lambda m, x: m(x).square().mean() + lam.exp() * (penalty(m, x).norm(dim=1) - 1).square().mean()
    g = lambda m, x: (m(x) - 1).square().mean() + 0.1 * penalty(m, x).square().mean()
    assert warnings_of(model, h, g, lam, batch=(x,)) == []


@pytest.mark.parametrize("penalty", SLOPES, ids=lambda f: f.__name__)
def test_a_wrong_gradient_penalty_is_told(penalty):
    model, x, lam = setting()
    h = lambda m, x: m(x).square().mean() + lam.exp() * (penalty(m, x) * penalty(m, x).detach()).mean()
    (message,) = warnings_of(model, h, lambda m, x: (m(x) - 1).square().mean(), lam, batch=(x,))
    assert "the second derivative of h" in message


def test_a_wrong_part_does_not_drown_in_another():
    """∂²h/∂w∂λ is zero by a detach, while ∂²h/∂w² is a million times as large."""
    model, x, lam = setting()
    other = torch.tensor(0.5, requires_grad=True)

    def h(model, x):
        return 1e6 * model(x).square().mean() * other + (model(x) * (lam * lam.detach())).mean()

    (message,) = warnings_of(model, h, lambda m, x: m(x).mean(), [lam, other], batch=(x,), lr=1e-8)
    assert "along the outer variable of shape () it differs by" in message


def test_a_flag_in_an_object_makes_it_due():
    class Configured:
        detach = False

        def __call__(self, model, x):
            out = model(x)
            return lam.exp() * (out - (2 * (out.detach() if self.detach else out)) + 1).square().mean()

    h, (model, x, lam) = Configured(), setting()
    told = lambda: warnings_of(model, h, lambda m, x: m(x).mean(), lam, batch=(x,), check="first")
    assert told() == []
    h.detach = True
    assert len(told()) == 1
    assert told() == []


def test_a_coefficient_that_becomes_zero_or_not_makes_it_due():
    model, x, lam = setting()

    def told(s):
        h = lambda m, x: lam.exp() * (m(x) - s * m(x).detach()).square().mean()
        return warnings_of(model, h, lambda m, x: m(x).mean(), lam, batch=(x,), check="first")

    assert [len(told(s)) for s in (0.0, 0.0, 0.5, 0.7)] == [0, 0, 1, 0]


def test_modes_make_it_due():
    model, x, lam = setting()
    h = lambda m, x: lam.exp() * (semi_gradient(m, x) if m.training else m(x).square().mean())
    g = lambda m, x: m(x).mean()
    assert warnings_of(model.eval(), h, g, lam, batch=(x,), check="first") == []
    assert len(warnings_of(model.train(), h, g, lam, batch=(x,), check="first")) == 1


def by_item(d):
    norm = sum(x.square().sum() for x in d.values()).sqrt().item()
    return {n: x / norm for n, x in d.items()}


def by_detach(d):
    return {n: x / x.detach().norm() for n, x in d.items()}


def by_tensors(d):
    return {n: x / x.norm() for n, x in d.items()}


def rule(w, d, state, *, lr, count):
    return w - lr * d / (0.1 + d.norm()), state


def rule_with_detach(w, d, state, *, lr, count):
    return w - lr * d / (0.1 + d.detach().norm()), state


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"direction": by_tensors}, False), ({"direction": by_item}, True), ({"direction": by_detach}, True),
        ({"optimizer": rule}, False), ({"optimizer": rule_with_detach}, True), ({"clip": by_item}, True),
    ],
)  # fmt: skip
def test_functions_of_the_direction_and_rules_of_ones_own_are_checked(options, wrong):
    model, x, lam = setting()
    h = lambda m, x: lam.exp() * m(x).square().mean()
    found = warnings_of(model, h, lambda m, x: m(x).mean(), lam, batch=(x,), **options)
    assert any("the derivative of " in text for text in found) == wrong


def test_a_hook_with_item_is_told():
    model, x, lam = setting()
    handle = model[0].weight.register_hook(lambda d: d / d.norm().item())
    h = lambda m, x: lam.exp() * m(x).square().mean()
    found = warnings_of(model, h, lambda m, x: m(x).mean(), lam, batch=(x,))
    assert "hook" in found[0]
    handle.remove()


def test_an_outer_variable_of_a_direction_is_checked():
    model, x, lam = setting()
    scale = torch.tensor(0.5, requires_grad=True)
    h = lambda m, x: lam.exp() * m(x).square().mean()
    g = lambda m, x: m(x).mean()
    right = lambda d: {n: scale.square() * x for n, x in d.items()}
    wrong = lambda d: {n: scale * scale.detach() * x for n, x in d.items()}
    assert warnings_of(model, h, g, [lam, scale], batch=(x,), direction=right) == []
    (message,) = warnings_of(model, h, g, [lam, scale], batch=(x,), direction=wrong)
    assert "along the outer variable of shape ()" in message


def test_few_samples_are_looked_at():
    """At two, or four with BatchNorm; at all where the losses do not run on two, or nothing depends on those."""
    model, x, lam = setting()
    seen = []
    h = lambda m, x: seen.append(len(x)) or lam.exp() * m(x).square().mean()
    g = lambda m, x: m(x).mean()
    warnings_of(model, h, g, lam, batch=(x,))
    assert set(seen) == {12, 2}
    seen.clear()
    warnings_of(torch.nn.Sequential(model, torch.nn.BatchNorm1d(1)), h, g, lam, batch=(x,))
    assert set(seen) == {12, 3}
    seen.clear()
    target = torch.randn(12, 1)
    h = lambda m, x: seen.append(len(x)) or lam.exp() * (m(x) - target).square().mean()
    assert warnings_of(model, h, g, lam, batch=(x,)) == []
    assert seen.count(12) > 5
    seen.clear()
    h = lambda m, x: seen.append(len(x)) or lam.exp() * (m(x)[2:].square().sum() + 0 * m(x).sum())
    assert warnings_of(model, h, g, lam, batch=(x,)) == []
    assert seen.count(12) > 5


def test_outer_variables_with_an_entry_for_each_sample_are_cut_with_the_batch():
    model, x, _ = setting()
    weights, seen = torch.zeros(12, requires_grad=True), []
    h = lambda m, x: seen.append(len(x)) or (weights.exp() * m(x)[:, 0].square()).mean()
    assert warnings_of(model, h, lambda m, x: m(x).mean(), weights, batch=(x,)) == []
    assert seen.count(12) == 4  # two steps, and their replays
    h = lambda m, x: (weights * weights.detach() * m(x)[:, 0].square()).mean() + weights.mean() * m(x).mean()
    with torch.no_grad():
        weights.fill_(0.5)
    assert len(warnings_of(model, h, lambda m, x: m(x).mean(), weights, batch=(x,))) == 1


def test_a_copy_of_the_model_in_a_loss():
    import copy

    model, x, lam = setting()
    h = lambda m, x: lam.exp() * m(x).square().mean() + 0 * copy.deepcopy(m)(x).sum()
    assert warnings_of(model, h, lambda m, x: m(x).mean(), lam, batch=(x,)) == []


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
def test_an_outer_loss_that_takes_a_derivative(engine):
    model, x, lam = setting()
    h = lambda m, x: lam.exp() * m(x).square().mean()
    g = lambda m, x: slope(m, x).square().mean()
    with bilevel.inner(model, h, g, solver="gd", lr=0.1, engine=engine) as loop:
        loop.run(2, x, outer=(x,))
        value = loop.value
        assert value.isfinite()
        assert not value.requires_grad
        assert torch.equal(value, loop.value)
    model, x = model.double(), x.double()
    lam = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    report = bilevel.gradcheck(model, h, g, lam, x, outer=(x,), solver="gd", lr=0.1)
    assert report, report

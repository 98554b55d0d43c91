"""Every class of torch.optim in a block: the end point of the plain loop, and derivatives of it, by differences."""

import contextlib
import copy
import inspect
import math
from functools import cache, partial

import pytest
import torch
from optimizers import (
    ENGINES,
    OPTIONS,
    SAMPLES,
    SETTINGS,
    STEPS,
    Case,
    Problem,
    differences_along,
    distance,
    errors,
    exact_newton_schulz,
    float64_scalars,
    learnable,
    true_hypergradient,
)
from problems import Vector, differences, refused, relative
from torch.optim import lr_scheduler as schedulers

import bilevel_plugin as bilevel
from bilevel_plugin.update.registry import RULES

REPLAYING = [e for e in ENGINES if e != "forward"]  # forward mode has no derivative for the initial weights


EVERY = [Case(name, i) for name, sets in OPTIONS.items() for i in range(len(sets))]
EVERY += [Case(name, setting=setting) for name in OPTIONS for setting in SETTINGS]


def engines(case):
    """One is enough where an option chooses a kernel, and not a rule."""
    return ["reverse"] if "foreach" in case.options or "fused" in case.options else ENGINES


@pytest.mark.parametrize(("case", "engine"), [(c, e) for c in EVERY for e in engines(c)], ids=str)
def test_the_block_is_the_plain_loop(case, engine):
    """Newton-Schulz in bfloat16 is a staircase, which has no derivative: Muon's is judged with the same in float64."""
    if case.name == "Muon":
        assert Problem(case).end_error(engine) < 1e-12
    end, gradient = errors(case, engine, exact=case.name == "Muon")
    assert end < 1e-12
    assert gradient < 1e-6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("case", [case for case in EVERY if case.name == "Muon" and not case.setting], ids=str)
def test_newton_schulz_in_bfloat16(case, engine):
    """As it runs, with a path that is rounded to three digits in each step, it is near the one in float64."""
    assert errors(case, engine)[1] < 0.2


@pytest.mark.parametrize("case", [case for case in EVERY if not case.setting], ids=str)
def test_float32(case):
    case = Case(case.name, case.number, dtype=torch.float32)
    assert Problem(case).end_error("reverse") < 1e-6


@cache
def truth_for_initial_weights(name, setting):
    """Along two directions in the weights of the first layer and the last bias, at the start of the loop."""
    problem = Problem(Case(name, setting=setting))
    start = copy.deepcopy(problem.model)
    state = problem.optimizer(start).state_dict()

    def value():
        model = copy.deepcopy(start)
        optimizer = problem.empty_optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(state))
        for k in range(STEPS):
            problem.plain_step(model, optimizer, k)
        return float(problem.g(model).detach())

    parts = lambda v: [(start.first.weight, v[:30].view(5, 6)), (start.last.bias, v[30:])]
    return [sum(differences(value, w, u) for w, u in parts(v)) for v in problem.directions(31, 2)]


@pytest.mark.parametrize("engine", REPLAYING)
@pytest.mark.parametrize("setting", ["", "stepped before"])
@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "Muon"])
def test_the_initial_weights_as_outer_variable(name, setting, engine):
    """Where the weights are moved by signs, λ has no influence, but w_0 has. (A parameter as input stands for w_0.)"""
    problem = Problem(Case(name, setting=setting))
    with problem.block(engine) as (model, loop, _):
        got = torch.cat([v.flatten() for v in loop.hypergrad([model.first.weight, model.last.bias])])
    true = truth_for_initial_weights(name, setting)
    assert all(true)
    assert (problem.directions(31, 2) @ got).tolist() == pytest.approx(true, rel=1e-6)


def test_the_cases_reach_both_branches():
    """RAdam's ρ_t passes 5 within the steps, ASGD begins to average, Rprop turns round, and λ matters."""
    for beta in (0.9, 0.999):
        last = 2 / (1 - beta) - 1
        rho = [last - 2 * t * beta**t / (1 - beta**t) for t in range(4, 9)]
        assert min(rho) < 5 < max(rho)
    optimizer = Problem(Case("ASGD", 2)).plain()[1]
    assert all(s["mu"] < 1 for s in optimizer.state.values() if s)
    sizes = [s["step_size"] for s in Problem(Case("Rprop")).plain()[1].state.values()]
    assert min(float(s.min()) for s in sizes) < 0.02 < max(float(s.max()) for s in sizes)
    for case in EVERY:
        if case.name == "Rprop":
            assert not true_hypergradient(case).any(), case
        elif case.name != "Muon":
            assert true_hypergradient(case).norm() > 1e-4, case


WITH_A_ROOT = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("Adadelta", {}),
    ("Adagrad", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {"betas": (0.9, 0.99)}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.9}),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "options"), WITH_A_ROOT)
def test_the_root_of_zero(name, options, engine):
    """∇h = c_k·λ is 0 at λ = 0: w_K(λ) has the slope 1/ε there, and √(λ²) has none."""
    lam, slopes = torch.zeros((), dtype=torch.float64, requires_grad=True), (1.0, -2.0, 0.5, 1.0, 3.0, 1.0, 2.0)
    options = {"lr": 0.1, "eps": 0.1, **options}
    h, g = lambda model, c: c * lam * model.w.sum(), lambda model: model.w.sum()

    def make():
        model = Vector(torch.zeros(2, dtype=torch.float64))
        return model, getattr(torch.optim, name)(model.parameters(), **options)

    def value():
        model, optimizer = make()
        for c in slopes:
            optimizer.zero_grad()
            h(model, c).backward(inputs=[model.w])
            optimizer.step()
        return float(g(model).detach())

    true = differences(value, lam, torch.ones((), dtype=torch.float64), eps=1e-10)
    model, optimizer = make()
    with bilevel.inner(model, h, g, solver="gd", optimizer=optimizer, engine=ENGINES[engine], check=False) as loop:
        for c in slopes:
            loop.step(c)
        assert loop.hypergrad(lam).item() == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_sentinel_is_silent(name, dtype):
    """Warnings are errors here."""
    problem = Problem(Case(name, dtype=dtype))
    with problem.block(check="always") as (_, loop, _):
        assert loop.hypergrad(problem.lam).isfinite().all()


FLAGS = {"capturable": 1e-6, "differentiable": 1e-12}  # torch's capturable formulas compute scalars in float32


@pytest.mark.parametrize(
    ("name", "flag"),
    [(n, f) for n in OPTIONS for f in FLAGS if f in inspect.signature(getattr(torch.optim, n)).parameters],
)
def test_flags_that_a_plain_loop_on_a_cpu_refuses(name, flag):
    """torch refuses both flags in a plain loop here, so the plain loop has none."""
    problem = Problem(Case(name))
    assert problem.end_error("reverse", changed={flag: True}) < FLAGS[flag]


def exact(name):
    return exact_newton_schulz() if name == "Muon" else contextlib.nullcontext()


@cache
def truth_for_a_tensor_as_rate(name, dtype):
    problem = Problem(Case(name, setting="scheduler"))
    rate = lambda: {"lr": torch.tensor(problem.case.options["lr"], dtype=dtype)}
    with exact(name):
        end = problem.plain(**rate())[0].state_dict()
        return end, differences_along(lambda: problem.value(**rate()), problem.lam, problem.directions(SAMPLES))


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_rate_that_is_a_tensor_and_scheduled(name, dtype, engine):
    """torch's schedulers write into the tensor, so a step that is run again must not read it again."""
    problem = Problem(Case(name, setting="scheduler"))
    end, true = truth_for_a_tensor_as_rate(name, dtype)
    rate = torch.tensor(problem.case.options["lr"], dtype=dtype)
    with exact(name), problem.block(engine, changed={"lr": rate}) as (model, loop, _):
        assert distance(model.state_dict(), end) < 1e-12
        # Adafactor then rounds its steps, which depend on the weights, to float32, and differences see a staircase
        rounded = name == "Adafactor" and dtype is torch.float32
        along = problem.directions(SAMPLES) @ loop.hypergrad(problem.lam)
        assert relative(along, true) < (1e-2 if rounded else 1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop"])
def test_options_that_the_body_changes(kind, engine):
    """By hand, as in a warm-up of the momentum; what a plain loop leaves behind in the block does no harm."""
    problem = Problem(Case(kind))

    def change(optimizer, k):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group["weight_decay"] = 0.1 * k
            group.update({"betas": (0.5 + 0.1 * k, 0.9)} if "betas" in group else {"momentum": 0.2 * k})

    def plain():
        model = copy.deepcopy(problem.model)
        optimizer = problem.optimizer(model)
        for k in range(STEPS):
            problem.plain_step(model, optimizer, k)
            change(optimizer, k)
        return model

    model = copy.deepcopy(problem.model)
    optimizer = problem.optimizer(model)
    given = {"solver": "gd", "engine": ENGINES[engine], "check": False, "optimizer": optimizer}
    with bilevel.inner(model, problem.h, problem.g, **given) as loop:
        for k in range(STEPS):
            optimizer.zero_grad()
            loop.step(*problem.batch(k))
            change(optimizer, k)
        assert distance(model.state_dict(), plain().state_dict()) < 1e-12
        along = problem.directions(SAMPLES) @ loop.hypergrad(problem.lam)
    value = lambda: float(problem.g(plain()).detach())
    assert relative(along, differences_along(value, problem.lam, problem.directions(SAMPLES))) < 1e-6


def test_a_group_that_is_added_in_the_block_is_refused():
    problem = Problem(Case("SGD"))
    model = copy.deepcopy(problem.model)
    optimizer = torch.optim.SGD(model.first.parameters(), 0.1)
    with bilevel.inner(model, problem.h, problem.g, solver="gd", optimizer=optimizer, check=False) as loop:
        loop.step(*problem.batch(0))
        optimizer.add_param_group({"params": model.last.parameters()})
        with refused("param_groups", "add_param_group", "before the block"):
            loop.step(*problem.batch(1))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_direction_is_recovered_from_the_averages_of_adam(dtype, maximize):
    """Up to rounding, or not at all: with β₁ = 0.995 hundreds of units are lost."""
    rule = RULES[torch.optim.Adam]
    w, d, m = (torch.randn(50, dtype=dtype) for _ in range(3))
    options = {"lr": 0.1, "weight_decay": 0.2, "eps": 1e-8, "amsgrad": False, "maximize": maximize, "count": 3}
    state = {"exp_avg": m, "exp_avg_sq": m.square()}
    for betas in ((0.9, 0.99), (0.0, 0.9)):
        for before in (state, {}):
            _, after = rule.formula(w, d, before, betas=betas, **options)
            found = rule.direction(w, before, after, betas=betas, **options)
            torch.testing.assert_close(found, d, rtol=0, atol=300 * torch.finfo(dtype).eps)
    assert rule.direction(w, state, state, betas=(0.995, 0.99), **options) is None
    assert rule.direction(w.bfloat16(), state, state, betas=(0.9, 0.99), **options) is None


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_frozen_weight_that_the_optimizer_holds(name, engine):
    problem = Problem(Case(name))
    problem.model.first.weight.requires_grad_(False)

    def plain_step(model, optimizer, k):
        optimizer.zero_grad()
        problem.h(model, *problem.batch(k)).backward(inputs=[p for p in model.parameters() if p.requires_grad])
        optimizer.step()
        return torch.zeros(())

    problem.plain_step = plain_step
    assert problem.end_error(engine) < 1e-12


@pytest.mark.parametrize(("engine", "setting"), [("reverse", "stepped before"), ("unroll", "")])
@pytest.mark.parametrize("name", OPTIONS)
def test_tasks_are_loops_of_their_own(name, engine, setting):
    """A norm, as Muon has it, is taken for each task; the state that an optimizer has is where each begins."""
    problem = Problem(Case(name, setting=setting))
    lam = problem.lam
    batches = [torch.stack([problem.batch(k)[0], problem.batch(k + 3)[0]]) for k in range(STEPS)]
    h = lambda model, i: problem.h(model, i)
    given = {"solver": "gd", "engine": ENGINES[engine], "check": False}
    with exact(name):
        model = copy.deepcopy(problem.model)
        with bilevel.inner(model, h, problem.g, tasks=2, optimizer=problem.optimizer(model), **given) as loop:
            for batch in batches:
                loop.step(batch)
            together, ends = loop.hypergrad(lam), {n: w.detach().clone() for n, w in loop.weights.items()}
        apart = torch.zeros_like(lam)
        for task in range(2):
            model = copy.deepcopy(problem.model)
            with bilevel.inner(model, h, problem.g, optimizer=problem.optimizer(model), **given) as loop:
                for batch in batches:
                    loop.step(batch[task])
                apart += loop.hypergrad(lam)
                weights = loop.weights
                assert (
                    distance({n: ends[n][task] for n in weights}, {n: w.detach() for n, w in weights.items()}) < 1e-12
                )
    assert relative(together, apart) < 1e-10


# Options as outer variables


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
@pytest.mark.parametrize("setting", ["", "stepped before"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_rate_in_the_group(name, setting, engine):
    """The rate in a group is an outer variable. Rprop's is that of its first step; forward mode follows it, for a 0."""
    outcome, error = learnable(Case(name, setting=setting), "lr", None, engine)
    late = (name, setting) == ("Rprop", "stepped before") and engine != "forward"
    assert outcome == ("nothing" if late else "right"), error


NUMBERS = [(name, *option) for name in OPTIONS for option in Problem(Case(name)).numbers()]
MAY_BE_ZERO = ("weight_decay", "momentum", "dampening", "lr_decay", "lambd", "momentum_decay")


REFUSED = ("initial_accumulator_value", "ns_coefficients")  # by torch, and by the library
NOTHING = {  # what no weight depends on: averages that nothing reads, and RAdam before its variance is rectified
    ("ASGD", "t0", None, ""),
    ("ASGD", "t0", None, "stepped before"),
    ("RAdam", "betas", 1, ""),
    ("RAdam", "eps", None, ""),
}


@pytest.mark.parametrize("setting", ["", "stepped before"])
@pytest.mark.parametrize(("name", "option", "place"), NUMBERS)
def test_other_options(name, option, place, setting):
    """Right, but for those that are refused and those that no loss depends on."""
    outcome, error = learnable(Case(name, setting=setting), option, place, "reverse")
    nothing = (name, option, place, setting) in NOTHING
    assert outcome == ("refused" if option in REFUSED else "nothing" if nothing else "right"), error


@pytest.mark.parametrize(("name", "option"), [(n, o) for n, o, _ in NUMBERS if o in MAY_BE_ZERO])
def test_options_that_are_tensors_of_value_zero(name, option):
    """torch leaves out what has the factor 0, and with it the derivative. (SGD with dampening jumps at momentum 0.)"""
    outcome, error = learnable(Case(name, 3 if option == "momentum" else 0), option, None, "reverse", zero=True)
    assert outcome == "right", error


@pytest.mark.parametrize("engine", ["reverse", "unroll", "sqrt"])
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_a_rate_for_each_group(option, engine):
    problem = Problem(Case("SGD"))
    values = torch.tensor([0.05, 0.1], dtype=torch.float64, requires_grad=True)

    def make(model, values):
        held = [{"params": model.first.parameters(), option: values[0]}, {"params": model.last.parameters()}]
        return torch.optim.SGD(held, **{"lr": 0.1, "momentum": 0.5, option: values[1]})

    def value():
        model = copy.deepcopy(problem.model)
        optimizer = make(model, values.tolist())
        for k in range(STEPS):
            problem.plain_step(model, optimizer, k)
        return float(problem.g(model).detach())

    model = copy.deepcopy(problem.model)
    given = {"solver": "gd", "engine": ENGINES[engine], "check": False, "optimizer": make(model, values)}
    with bilevel.inner(model, problem.h, problem.g, **given) as loop:
        for k in range(STEPS):
            loop.step(*problem.batch(k))
        got = loop.hypergrad(values)
    assert relative(got, differences_along(value, values, torch.eye(2, dtype=torch.float64))) < 1e-6


@cache
def truth_for_a_factor(name, setting):
    problem, factor = Problem(Case(name, setting=setting)), torch.tensor(0.7, dtype=torch.float64)
    eps = 1e-6 if name == "Rprop" else 2e-4  # signs jump
    with exact(name), float64_scalars():
        end = problem.plain(factor=0.7)[0].state_dict()
        return end, differences(lambda: problem.value(factor=factor.item()), factor, torch.ones_like(factor), eps)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", ["", "groups", "stepped before", "scheduler"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_factor_on_the_rates(name, setting, engine):
    """lr= beside the optimizer, as a tensor that requires grad: the plain loop with all rates times it."""
    problem = Problem(Case(name, setting=setting))
    end, true = truth_for_a_factor(name, setting)
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    with exact(name), float64_scalars(), problem.block(engine, lr=factor) as (model, loop, _):
        assert distance(model.state_dict(), end) < 1e-12
        got = loop.hypergrad(factor, allow_unused=True)
    if name == "Rprop" and setting == "stepped before":  # its rate is that of its first step
        assert true == 0
        assert got == 0
    else:
        assert got.item() == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("how", ["tensor", "function"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_factor_that_is_not_learned(name, how):
    """A function is asked with k = 1, 2, …; torch keeps ASGD's rate in float32, and it is the product that is kept."""
    problem = Problem(Case(name))
    factor = (lambda k: 1 / k) if how == "function" else torch.tensor(0.7, dtype=torch.float64)
    plain = factor if how == "function" else factor.item()
    with problem.block(lr=factor) as (model, _, _):
        assert distance(model.state_dict(), problem.plain(factor=plain)[0].state_dict()) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
def test_learnable_factors_for_each_step(engine):
    problem = Problem(Case("Adam"))
    rates = torch.linspace(0.5, 1.5, STEPS, dtype=torch.float64).requires_grad_()
    value = lambda: problem.value(factor=lambda k: rates[k - 1].item())
    with problem.block(engine, lr=lambda k: rates[k - 1]) as (_, loop, _):
        got = loop.hypergrad(rates)
    assert relative(got, differences_along(value, rates, torch.eye(STEPS, dtype=torch.float64))) < 1e-6


# Schedulers

SCHEDULERS = {
    "StepLR": partial(schedulers.StepLR, step_size=2, gamma=0.5),
    "MultiStepLR": partial(schedulers.MultiStepLR, milestones=[1, 3], gamma=0.5),
    "ExponentialLR": partial(schedulers.ExponentialLR, gamma=0.8),
    "CosineAnnealingLR": partial(schedulers.CosineAnnealingLR, T_max=4),
    "CosineAnnealingWarmRestarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=2),
    "OneCycleLR": partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=8),
    "CyclicLR": partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2),
    "LinearLR": partial(schedulers.LinearLR, total_iters=3),
    "ConstantLR": partial(schedulers.ConstantLR, factor=0.5, total_iters=2),
    "PolynomialLR": partial(schedulers.PolynomialLR, total_iters=8, power=2.0),
    "LambdaLR": partial(schedulers.LambdaLR, lr_lambda=lambda k: 1 / (k + 1)),
    "MultiplicativeLR": partial(schedulers.MultiplicativeLR, lr_lambda=lambda k: 0.9),
    "ReduceLROnPlateau": partial(schedulers.ReduceLROnPlateau, patience=0, threshold=10.0, threshold_mode="abs"),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.8)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.8)], optimizer=o
    ),
}


def test_all_schedulers_of_torch_are_here():
    assert set(schedulers.__all__) - {"LRScheduler"} == set(SCHEDULERS)


@cache
def truth_for_a_scheduler(kind, name):
    problem, factor = Problem(Case(kind), schedule=SCHEDULERS[name]), torch.tensor(0.7, dtype=torch.float64)
    value = lambda: problem.value(factor=factor.item())
    rate = differences(value, factor, torch.ones_like(factor))
    return *problem.plain(factor=0.7), rate, differences_along(value, problem.lam, problem.directions(SAMPLES))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "name"), [("Adam", "OneCycleLR"), ("Adam", "CyclicLR"), *(("SGD", name) for name in SCHEDULERS)]
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # SequentialLR of torch 2.6 gives it itself
def test_schedulers(kind, name, engine):
    """Without a warning, with the rates (and momenta) of the plain loop, and a learnable factor beside them."""
    model_of_plain, optimizer_of_plain, for_factor, for_lam = truth_for_a_scheduler(kind, name)
    problem = Problem(Case(kind), schedule=SCHEDULERS[name])
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    with problem.block(engine, lr=factor) as (model, loop, optimizer):
        assert distance(model.state_dict(), model_of_plain.state_dict()) < 1e-12
        got = loop.hypergrad([factor, problem.lam])
    assert got[0].item() == pytest.approx(for_factor, rel=1e-6)
    assert relative(problem.directions(SAMPLES) @ got[1], for_lam) < 1e-6
    ours, theirs = optimizer.param_groups[0], optimizer_of_plain.param_groups[0]
    moved = [k for k in ("lr", "momentum", "betas") if k in ours]
    assert [ours[k] for k in moved] == [theirs[k] for k in moved]
    if name in ("OneCycleLR", "CyclicLR"):
        assert ours[moved[1]] != optimizer.defaults[moved[1]]


@pytest.mark.parametrize("name", ["ExponentialLR", "OneCycleLR", "LambdaLR", "CosineAnnealingLR"])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop"])
def test_a_rate_with_a_graph_that_a_scheduler_overwrote_is_refused(kind, name):
    problem = Problem(Case(kind), schedule=SCHEDULERS[name])
    log_rate = torch.tensor(math.log(0.05), dtype=torch.float64, requires_grad=True)
    with pytest.raises((ValueError, RuntimeError), match=r"^bilevel\..*lr") as caught:
        with problem.block(changed={"lr": log_rate.exp(), "foreach": False}) as (_, loop, _):
            loop.hypergrad(log_rate)
    assert "scheduler" in str(caught.value)


def test_a_scheduler_goes_on_after_the_block():
    """Its own count and the optimizer's rates are those of a plain loop that goes on."""
    problem = Problem(Case("SGD", setting="scheduler"))
    expected, _ = problem.plain(steps=STEPS + 3)
    model = copy.deepcopy(problem.model)
    optimizer = problem.optimizer(model)
    scheduler = problem.schedule(optimizer)
    with bilevel.inner(model, problem.h, problem.g, solver="gd", optimizer=optimizer, check=False) as loop:
        for k in range(STEPS):
            loop.step(*problem.batch(k))
            scheduler.step()
        loop.commit_(optimizer=True)
    for k in range(STEPS, STEPS + 3):
        problem.plain_step(model, optimizer, k)
        scheduler.step()
    assert distance(model.state_dict(), expected.state_dict()) < 1e-12

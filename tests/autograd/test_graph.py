"""What has no second derivative is named, and a graph that leads back to the weights is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from contract import ENGINES, OWN, SWAPPED
from plain_loop import (
    COMPILER,
    RATE,
    SAMPLES,
    STEPS,
    Found,
    attempt,
    data,
    everything,
    judge,
    losses,
    mlp,
    right_or_refused,
    start,
    tensors,
    unchanged,
)
from problems import (
    Once,
    OnceModule,
    Vector,
    refused,
    refused_if,
    weighted,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


# --- modules that hide a derivative ---


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


# --- once_differentiable ---


def test_once_differentiable_in_g_of_a_step(engine):
    """h comes first and is honest: each loss has to be looked at."""
    lam = start()
    h, _ = weighted(lam)
    g = lambda m, x, y: F.cross_entropy(Once.apply(m(x)), y)
    solver = bilevel.BiGSAM(0.1, alpha=0.5)
    with refused("once_differentiable"):
        attempt(mlp(), h, g, lam, data(), data(5), solver=solver, lr=None, engine=engine)


@pytest.mark.parametrize("which", ["h", "g"])
def test_once_differentiable_with_a_constant_incoming_gradient(which, engine):
    """What comes in has no graph, so that autograd puts no Error node behind what comes out."""
    model, lam = Vector(torch.tensor([0.3, 1.0])), torch.ones(2, requires_grad=True)
    honest = lambda m: (lam * (m.w - 1).square()).sum()
    marked = lambda m: honest(m) + Once.apply(m.w).sum()
    losses = (marked, honest) if which == "h" else (honest, marked)
    solver = bilevel.BiGSAM(0.1, alpha=0.5)
    with refused("once_differentiable"):
        attempt(model, *losses, lam, solver=solver, lr=None, engine=engine)


@pytest.mark.parametrize("where", ["g, which no step takes", "a function of λ alone"])
def test_once_differentiable_where_one_derivative_is_enough(where, engine):
    if where.startswith("g"):
        build = losses(mlp, lambda h, g: (h, lambda m, x, y: F.cross_entropy(Once.apply(m(x)), y)))
    else:
        build = lambda lam: losses(mlp)(Once.apply(lam))
    assert right_or_refused(build, engine, "once_differentiable") == where.startswith("g")


# --- torch.compile'd functions ---


@COMPILER
@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
@pytest.mark.parametrize("where", ["h", "a function inside h", "g of a step"])
def test_compiled_functions_in_a_loss(where, engine):
    """Their backward has no derivative; what is left of the gradient looks like one."""
    torch._dynamo.reset()  # after some recompilations it would run the function as it is
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    mine, outer_loss = weighted(lam)
    squashed = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")
    h, g = {
        "h": (torch.compile(mine, backend="aot_eager"), outer_loss),
        "a function inside h": ((lambda m, x, y: mine(m, x, y) + squashed(m(x)).square().mean()), outer_loss),
        "g of a step": (mine, lambda m, x, y: squashed(m(x)).square().mean()),
    }[where]
    with refused("compile"):
        attempt(model, h, g, lam, batch, outer, solver=bilevel.BiGSAM(0.1, alpha=0.5), lr=None, engine=engine)


# --- a graph back to the weights ---


EXTRAS = {
    "loop(x)": (lambda loop, m, x: loop(x), lambda m, x: m(x)),
    "model(x)": (lambda loop, m, x: m(x), lambda m, x: m(x)),
    "log-probabilities": (lambda loop, m, x: loop(x).log_softmax(-1)[:, 0], lambda m, x: m(x).log_softmax(-1)[:, 0]),
    "loop.weights": (lambda loop, m, x: loop.weights["2.weight"], lambda m, x: m[2].weight),
    "a parameter": (lambda loop, m, x: m[2].weight, lambda m, x: m[2].weight),
    "a view of one": (lambda loop, m, x: m[2].weight.view(-1), lambda m, x: m[2].weight.view(-1)),
}


@pytest.mark.parametrize(
    ("name", "carrier"),
    [
        *itertools.product(EXTRAS, ["batch", "closure"]),
        ("loop(x)", "dict"),
        ("loop(x)", "closure alone"),
        ("a parameter", "closure alone"),
    ],
)
def test_a_graph_back_to_the_weights(name, carrier, engine):
    """In the plain loop the gradient goes through it."""
    get, inside = EXTRAS[name]
    alone = carrier == "closure alone"
    term = lambda m, x, e: e.square().mean() * (1.0 if alone else m(x).square().mean())
    build = losses(mlp, lambda h, g: ((lambda m, x, y: h(m, x, y) + term(m, x, inside(m, x))), g))
    lam, box = start(), []
    torch.manual_seed(0)
    model, _, g, (x, y), outer = build(lam)
    weigh, _ = weighted(lam)
    h = {
        "batch": lambda m, x, y, e: weigh(m, x, y) + term(m, x, e),
        "dict": lambda m, x, y, e: weigh(m, x, y) + term(m, x, e["extra"][0]),
    }.get(carrier, lambda m, x, y: weigh(m, x, y) + term(m, x, box[-1]))
    before = everything(model)
    # what is not computed from the weights is where the loss finds it: parameters that hold w_k, or loop.weights
    leaf = {"a parameter": OWN, "loop.weights": SWAPPED}.get(name, {}) if "closure" in carrier else {}
    is_right = engine in leaf.values()
    with refused_if(not is_right, "inside (h|the loss)"):
        with bilevel.inner(model, h, g, solver="gd", lr=RATE, engine=engine, check=False) as loop:
            for _ in range(STEPS):
                box.append(get(loop, model, x))
                more = {"batch": (box[-1],), "dict": ({"extra": [box[-1]]},)}.get(carrier, ())
                loop.step(x, y, *more, outer=outer)
            found = Found(tensors(model), float(loop.value), loop.hypergrad(lam))
    if is_right:
        judge(found, build, lam, bits=False)
    unchanged(model, before)


def test_a_rollout_whose_loss_is_made_from_its_log_probabilities_alone(engine):
    """REINFORCE as it is often written: h does not call the model at all."""
    lam, rewards = start(), torch.randn(SAMPLES)
    build = losses(mlp, lambda h, g: ((lambda m, x, y: h_of(m(x).log_softmax(-1)[:, 0])), g))
    h_of = lambda logp: -(logp * rewards * scale.exp()).mean()
    torch.manual_seed(0)
    scale = torch.tensor(0.1, requires_grad=True)
    model, _, g, (x, _), outer = build(lam)
    with refused("inside (h|the loss)"):
        with bilevel.inner(model, lambda m, p: h_of(p), g, solver="gd", lr=RATE, engine=engine) as loop:
            for _ in range(3):
                loop.step(loop(x).log_softmax(-1)[:, 0], outer=outer)
            loop.hypergrad(scale)


@pytest.mark.parametrize("engine", [*OWN, "memory"])
@pytest.mark.parametrize("name", EXTRAS)
def test_a_graph_back_to_the_weights_in_the_batch_of_g(name, engine):
    get, _ = EXTRAS[name]
    model, lam, batch, outer = mlp(), start(), data(), data(5)
    h, g = weighted(lam)
    both = lambda m, x, y, e: g(m, x, y) + e.square().mean()
    with refused("inside (g|the loss|h)"):
        solver = bilevel.BiGSAM(0.1, alpha=0.5)
        with bilevel.inner(model, h, both, solver=solver, engine=ENGINES[engine], check=False) as loop:
            for _ in range(3):
                loop.step(*batch, outer=(*outer, get(loop, model, outer[0])))
            loop.hypergrad(lam)


# --- what torch has no second derivative of ---


def scored(score):
    """h and g of class scores that are made from the model in some way."""

    def wrap(h, g):
        mine = lambda m, x, y: h(lambda x: score(m, x), x, y)
        return mine, lambda m, x, y: g(lambda x: score(m, x), x, y)

    return wrap


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(2, 4, mode=mode), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.bag((x > 0).long()).tanh())


class Scaled(nn.Module):
    """An embedding by the function: as a module it is refused before any step (tests/test_kernels.py)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        return F.embedding((x > 0).long(), self.table, scale_grad_by_freq=True).mean(1).tanh()


class Flash(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.out = nn.Linear(1, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.lift(x[:, None, :, None])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return self.out(F.scaled_dot_product_attention(x, x, x)[:, 0, 0])


def ctc(model, x):
    """The loss of two alignments, as scores."""
    frames = model(x).unsqueeze(0).expand(3, -1, -1).log_softmax(-1)
    sizes = torch.full((len(x),), 3), torch.ones(len(x), dtype=torch.long)
    one = nn.CTCLoss(reduction="none")(frames, torch.ones(len(x), 1, dtype=torch.long), *sizes)
    return torch.stack([one, frames[0, :, 0]], 1)


CENTRES = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)


NO_SECOND = {
    "EmbeddingBag, mean": (losses(lambda: Bags("mean")), "EmbeddingBag"),
    "EmbeddingBag, max": (losses(lambda: Bags("max")), "EmbeddingBag"),
    "embedding": (losses(Scaled), "scale_grad_by_freq"),
    "CTCLoss": (losses(mlp, scored(ctc)), "CTC"),
    "cdist": (losses(mlp, scored(lambda m, x: -torch.cdist(m(x), CENTRES))), "cdist"),
    "cdist, p = 3": (losses(mlp, scored(lambda m, x: -torch.cdist(m(x), CENTRES, p=3))), "cdist"),
    "flash attention": (losses(Flash), "attention kernel, chosen by sdpa_kernel"),
    "pdist": (losses(mlp, scored(lambda m, x: m(x) + F.pdist(m(x)).mean())), "pdist"),
    "multi_margin_loss": (
        losses(mlp, lambda h, g: ((lambda m, x, y: h(m, x, y) + F.multi_margin_loss(m(x).sin(), y)), g)),
        "multi_?margin",
    ),
    "segment_reduce": (
        losses(mlp, scored(lambda m, x: m(x) + torch.segment_reduce(m(x), "sum", lengths=torch.tensor([len(x)])))),
        "segment_reduce",
    ),
}


@pytest.mark.parametrize("name", NO_SECOND)
def test_what_has_no_second_derivative_is_named(name, engine):
    """Not by torch's bare "derivative for aten::_ctc_loss_backward is not implemented"."""
    build, word = NO_SECOND[name]
    assert not right_or_refused(build, engine, word)


# --- torch.jit ---


@pytest.mark.parametrize("how", ["trace", "script"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit's own
def test_torch_jit(how, engine):
    make = lambda: torch.jit.trace(mlp(), torch.randn(2, 3)) if how == "trace" else torch.jit.script(mlp())
    assert not right_or_refused(losses(make), engine, "TorchScript module .torch.jit.")

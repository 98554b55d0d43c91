"""micro=: the batch in parts, one graph at a time. The same numbers as the plain step, in the memory of a part."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import relative
from torch import nn
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel
from benchmarks.measure import live

N, M = 12, 5  # parts of 3, 3, 2, 2 and 2 samples


class Data:
    """Data cleaning with a small network in float64: λ has a weight for each sample, and a scale."""

    def __init__(self, seed=0, n=N):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.x, self.y = torch.randn(n, 4).double(), torch.randint(3, (n,))
        self.xv, self.yv = torch.randn(7, 4).double(), torch.randint(3, (7,))
        self.rows = torch.randperm(20)[:n]
        self.lam = torch.randn(20).double().requires_grad_()
        self.scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def h(self, model, x, y, rows):
        losses = F.cross_entropy(model(x), y, reduction="none")
        decay = sum(p.square().sum() for p in model.parameters())
        return (self.lam[rows].sigmoid() * losses).mean() + 0.05 * self.scale.exp() * decay

    def g(self, model, x, y):
        return F.cross_entropy(model(x) * (1 + self.scale.sin()), y)

    @property
    def inputs(self):
        return [self.lam, self.scale]

    def run(self, micro, steps=3, inputs=None, **options):
        """The losses of the steps, the hypergradients, and the weights."""
        torch.manual_seed(1)
        options = {"lr": 0.2, **options}
        with bilevel.inner(self.model, self.h, self.g, check=False, **options) as loop:
            for _ in range(steps):
                losses = loop.step(self.x, self.y, self.rows, outer=(self.xv, self.yv), micro=micro)
            grads = loop.hypergrad(self.inputs if inputs is None else inputs)
            return [*(x for x in losses[:2] if x is not None), *grads, *(w.detach() for w in loop.weights.values())]


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
    data = Data()
    whole, parts = (
        data.run(micro, steps=4, engine=ENGINES[engine], **made(OPTIONS[options], data.model)) for micro in (None, M)
    )
    same(parts, whole)


@pytest.mark.parametrize("engine", ["cg", "neumann"])
def test_implicit_engines(engine):
    data = Data()
    rule = bilevel.BiGSAM(0.5, alpha=bilevel.constant(0.6))
    data.h = lambda model, x, y, rows: (
        Data.h(data, model, x, y, rows) + sum(p.square().sum() for p in model.parameters())
    )
    whole, parts = (data.run(m, steps=200, engine=engine, solver=rule, lr=None) for m in (None, M))
    same(parts, whole, 1e-8)  # the linear systems are solved to within 1e-6, by the same iterations


@pytest.mark.parametrize("micro", [1, 2, 7, N, 3 * N])
@pytest.mark.parametrize("options", ["sgd", "adam"])
def test_any_number_of_parts(micro, options):
    """Also more than there are samples, and other ones for h than for g."""
    data = Data()
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
    data = Data(seed, n)
    if reduction == "sum":
        data.h = lambda model, x, y, rows: (
            (data.lam[rows].exp() * F.cross_entropy(model(x), y, reduction="none")).sum() * (0.2 + data.scale)
        )
    engine = bilevel.Reverse(checkpoint=checkpoint)
    whole, parts = (data.run(m, engine=engine, **made(OPTIONS[options], data.model)) for m in (None, micro))
    same(parts, whole, 1e-11)


def test_the_derivative_against_differences_of_the_plain_loop():
    data = Data()
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
    data = Data()

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
    data = Data()
    encoder = nn.Linear(4, 4).double()

    def run(micro):
        x, xv = encoder(data.x), encoder(data.xv)
        with bilevel.inner(data.model, data.h, data.g, lr=0.2, engine=engine, check=False) as loop:
            loop.run(3, x, data.y, data.rows, outer=(xv, data.yv), micro=micro)
            return list(loop.hypergrad(encoder).values())

    same(run(M), run(None))


def test_batches_by_name_in_trees_with_lists_numbers_and_arrays():
    data = Data()
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
    data = Data()
    x, y = torch.randn(3, 10, 4).double(), torch.randint(3, (3, 10))
    h = lambda model, x, y: F.cross_entropy(model(x) * data.scale.exp(), y)

    def run(micro):
        with bilevel.inner(data.model, h, h, lr=0.2, tasks=3, engine=engine, check=False) as loop:
            loop.run(3, x, y, outer=(x, y), micro=micro)
            return [loop.hypergrad(data.scale), *(w.detach() for w in loop.weights.values())]

    same(run(4), run(None))


def test_dropout_draws_the_same_numbers_again():
    """In parts it draws others than for the whole batch: against unroll, which runs nothing again."""
    data = Data()
    data.model.insert(2, nn.Dropout(0.3))
    for options in ("momentum", "adam"):
        runs = [data.run(M, engine=e, **made(OPTIONS[options], data.model)) for e in ("reverse", "unroll")]
        runs += [data.run(M, engine=bilevel.Reverse(checkpoint=2), **made(OPTIONS[options], data.model))]
        same(runs[0], runs[1], 1e-10)
        same(runs[2], runs[1], 1e-10)


def test_running_statistics_of_other_steps_are_followed():
    """Steps in training mode move them, and a step in parts reads them, in eval mode."""
    data = Data()
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
    data = Data()
    data.h = lambda model, x, y, rows: LOSSES[name](model, x, y) * (1 + data.lam[rows].sum() * 0 + data.scale)
    whole, parts = (data.run(m, inputs=[data.scale], **made(OPTIONS[options], data.model)) for m in (None, M))
    same(parts, whole)


def test_a_part_of_the_weights():
    data = Data()

    def run(micro):
        with bilevel.inner(data.model, data.h, data.g, lr=0.2, check=False) as loop:
            for part in (data.model[0], data.model[2], data.model[0]):
                loop.step(data.x, data.y, data.rows, outer=(data.xv, data.yv), only=part, micro=micro)
            return loop.hypergrad(data.inputs)

    same(run(M), run(None))


def test_under_autocast():
    data = Data()
    data.model.float()
    data.x, data.xv = data.x.float(), data.xv.float()

    def run(micro, engine):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return data.run(micro, engine=engine)[2]

    assert relative(run(M, "reverse"), run(M, "unroll")) < 0.02
    assert relative(run(M, "reverse"), run(None, "reverse")) < 0.05


def test_losses_are_those_of_the_whole_batch_and_aux_is_a_list():
    data = Data()
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
    data = Data()
    g = lambda model: sum((p - data.scale).square().sum() for p in model.parameters())

    def run(micro):
        with bilevel.inner(data.model, data.h, g, lr=0.1, check=False) as loop:
            loop.run(3, data.x, data.y, data.rows, micro=micro)
            return loop.hypergrad(data.inputs)

    same(run(4), run(None))


def test_the_sentinel_looks_at_a_part():
    data = Data()
    wrong = lambda model, x, y: F.cross_entropy(model(x), y) * (1 + model(x).detach().square().mean())
    with bilevel.inner(data.model, wrong, data.g, lr=0.2, check="always") as loop:
        loop.run(2, data.x, data.y, outer=(data.xv, data.yv), micro=3, reduction="mean")
        with pytest.warns(bilevel.DerivativeWarning, match="second derivative"):
            loop.hypergrad(data.scale)
    with bilevel.inner(data.model, data.h, data.g, lr=0.2, check="always") as loop:
        loop.run(2, data.x, data.y, data.rows, outer=(data.xv, data.yv), micro=3)
        loop.hypergrad(data.inputs)


def test_compiled_loops_run_steps_in_parts_eagerly_and_say_so(compiler):
    data = Data()
    with pytest.warns(UserWarning, match="does not apply to steps with micro="):
        parts = data.run(M, engine=bilevel.Reverse(compile=True))
    same(parts, data.run(None))


# --- mean or sum ---


def step(data, h, *batch, **options):
    with bilevel.inner(data.model, h, data.g, solver="gd", lr=0.1, check=False) as loop:
        return loop.step(*(batch or (data.x, data.y)), micro=4, **options)


def contrastive(model, x, y):
    f = F.normalize(model(x), dim=1)
    return F.cross_entropy(f @ f.T, torch.arange(len(x)))


REFUSED = {
    "contrastive": contrastive,
    "class weights": lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 5.0]).double()),
    "padding": lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=0),
    "a regularised sum": lambda m, x, y: (
        F.cross_entropy(m(x), y, reduction="sum") + 1e-8 * sum(p.square().sum() for p in m.parameters())
    ),
    "standardised": lambda m, x, y: ((m(x) - m(x).mean(0)) / (1 + m(x).std(0))).square().sum(1).sqrt().mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_refused(name):
    data = Data()
    with pytest.raises(ValueError, match="neither the mean nor the sum"):
        step(data, REFUSED[name])
    step(data, REFUSED[name], reduction="mean")  # it was said


def test_dropout_is_compared_in_eval_mode():
    data = Data()
    data.model.insert(2, nn.Dropout(0.5))
    torch.manual_seed(0)
    mean = step(data, lambda m, x, y: F.cross_entropy(m(x), y))
    torch.manual_seed(0)
    total = step(data, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"))
    assert relative(total.h, mean.h * N) < 1e-12
    assert data.model.training
    torch.manual_seed(0)
    forced = lambda m, x, y: F.cross_entropy(F.dropout(m(x)), y)
    with pytest.raises(ValueError, match="draws random numbers in eval mode"):
        step(data, forced)
    step(data, forced, reduction="mean")
    with pytest.raises(ValueError, match="neither"):
        step(data, contrastive)


def test_the_comparison_draws_no_random_numbers_from_the_loop():
    data = Data()
    data.model.insert(2, nn.Dropout(0.5))
    torch.manual_seed(0)
    one = step(data, lambda m, x, y: F.cross_entropy(m(x), y))
    torch.manual_seed(0)
    other = step(data, lambda m, x, y: F.cross_entropy(m(x), y), reduction="mean")
    assert torch.equal(one.h, other.h)


def test_a_loss_that_is_not_finite_on_some_samples_is_refused():
    """All of a part may be padding: 0 / 0 there, and finite on the batch."""
    data = Data()
    data.y[:] = torch.tensor([0] * (N - 2) + [1, 2])
    with pytest.raises(ValueError, match=r"neither the mean nor the sum.* is nan and"):
        step(data, REFUSED["padding"])


def test_a_loss_of_zero_has_to_be_said():
    data = Data()
    with pytest.raises(ValueError, match="h is 0 on these samples"):
        step(data, lambda m, x, y: m(x).sum() * 0)


@pytest.mark.parametrize("labels", [True, False])
def test_a_loss_that_closes_over_the_batch_is_refused(labels):
    data = Data()
    weights = torch.rand(N).double()
    over_labels = lambda m, x, y: F.cross_entropy(m(x), data.y)
    over_weights = lambda m, x, y: (weights * F.cross_entropy(m(x), y, reduction="none")).mean()
    with pytest.raises(ValueError, match="closes over a tensor with an entry for each sample"):
        step(data, over_labels if labels else over_weights)


def test_a_loss_with_a_gradient_inside_has_to_be_said():
    data = Data()

    def penalised(model, x, y):
        (d,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), model[0].weight, create_graph=True)
        return F.cross_entropy(model(x), y) + d.square().sum()

    with pytest.raises(ValueError, match="takes a derivative itself"):
        step(data, penalised)


def test_a_loss_that_is_not_finite_is_told_of_by_the_step():
    data = Data()
    with pytest.raises(FloatingPointError, match="h is nan"):
        step(data, lambda m, x, y: m(x).mean() * float("nan"))


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_in_training_mode_is_refused(reduction, tracks):
    data = Data()
    data.model.insert(1, nn.BatchNorm1d(6, track_running_stats=tracks).double())
    h = lambda m, x, y: F.cross_entropy(m(x), y)
    with pytest.raises(ValueError, match="BatchNorm1d in training mode"):
        step(data, h, reduction=reduction)
    data.model.eval()
    if tracks:
        step(data, h, reduction=reduction)


def test_a_loss_that_changes_a_buffer_is_refused():
    data = Data()
    data.model.register_buffer("calls", torch.zeros(()))

    def h(model, x, y):
        model.calls += 1
        return F.cross_entropy(model(x), y)

    with pytest.raises(ValueError, match="changes the buffer 'calls'"):
        step(data, h)
    data.model.insert(1, nn.InstanceNorm1d(1, track_running_stats=True).double())


# --- what can't be split ---


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (lambda d: (d.x, d.y, slice(None)), TypeError, "can't split a slice"),
        (lambda d: (d.x, d.y, torch.ones(3)), ValueError, r"shapes \(12, 4\) and \(3,\)"),
        (lambda d: (d.x.to_sparse(), d.y), TypeError, "not dense"),
        (lambda d: (), TypeError, "no tensor with samples"),
        (lambda d: (torch.tensor(1.0), 3), TypeError, "no tensor with samples"),
        (lambda d: (d.x, {0, 1}), TypeError, "how to split a set"),
    ],
)
def test_batches_that_are_refused(batch, error, match):
    data = Data()
    with (
        pytest.raises(error, match=match),
        bilevel.inner(data.model, lambda m, *_: m(data.x).square().mean(), data.g, check=False) as loop,
    ):
        loop.step(*batch(data), outer=(data.xv, data.yv), micro=2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"micro": 0}, "at least 1, got 0"),
        ({"micro": True}, "at least 1, got True"),
        ({"micro": 2.0}, "at least 1, got 2.0"),
        ({"micro": 2, "reduction": "none"}, "takes 'mean' or 'sum'"),
        ({"reduction": "mean"}, "micro= was not given"),
    ],
)
def test_arguments_that_are_refused(options, match):
    data = Data()
    with bilevel.inner(data.model, data.h, data.g) as loop, pytest.raises(ValueError, match=match):
        loop.step(data.x, data.y, data.rows, outer=(data.xv, data.yv), **options)


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

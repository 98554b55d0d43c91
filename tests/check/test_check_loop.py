"""check_loop: right loops pass, wrong ones do not, and the cause that it names is the one that was put in."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel_plugin as bilevel

STEPS, RATE = 5, 0.3
GD = {"solver": "gd", "lr": RATE}


class Setting:
    """A small classification problem, in float32 as users have it; `lam` weighs the samples."""

    def __init__(self, dropout: float = 0.0, norm: bool = False):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Dropout(dropout)]
        self.model = nn.Sequential(*layers, nn.Linear(6, 3))
        self.x, self.y = torch.randn(24, 4), torch.randint(3, (24,))
        self.x_val, self.y_val = torch.randn(10, 4), torch.randint(3, (10,))
        self.lam = torch.zeros(24, requires_grad=True)

    def h(self, model, x, y, i):
        return (torch.sigmoid(self.lam[i]) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(self, model, x, y):
        return F.cross_entropy(model(x), y)

    def batches(self, steps=STEPS):
        for k in range(steps):
            i = torch.arange(8 * k, 8 * k + 8) % 24
            yield self.x[i], self.y[i], i

    @property
    def outer(self):
        return self.x_val, self.y_val


def quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bilevel.check_loop(*args, **kwargs)


# --- right ones ---


def plain_steps():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam


def dropout_and_norm():
    s = Setting(0.3, norm=True)

    def train():
        sgd = torch.optim.SGD(s.model.parameters(), RATE, momentum=0.9, weight_decay=0.01)
        with bilevel.inner(s.model, s.h, s.g, solver="gd", optimizer=sgd, clip=0.5) as loop:
            for batch in s.batches():
                loop.step(*batch)
            loop.backward(outer=s.outer)

    return train, s.lam


def model_made_inside():
    s = Setting()

    def train(lam):
        model = nn.Linear(4, 3)
        with bilevel.inner(model, s.h, s.g, solver="gd", optimizer=torch.optim.Adam(model.parameters(), 0.1)) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad({"weights": lam})

    return train, s.lam


def outer_network():
    s = Setting()
    net = nn.Linear(1, 1)

    def h(model, x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        return (torch.sigmoid(net(bilevel.stop_gradient(each)[:, None])[:, 0]) * each).mean()

    def train():
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):  # the outer loop: the first hypergradient is the one that is checked
            with bilevel.inner(s.model, h, s.g, engine="unroll", **GD) as loop:
                for x, y, _ in s.batches():
                    loop.step(x, y, outer=s.outer)
                loop.backward()
            optimizer.step()

    return train, net


def several_outer_losses():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
                loop.add_outer_loss(weight=0.5)
            return loop.hypergrad([s.lam])

    return train, [s.lam]


def own_outer_loss():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch)
            return loop.hypergrad(s.lam, loss=loop(s.x_val).square().mean())

    return train, s.lam


def a_batch_with_a_graph():
    s = Setting()

    def train():
        with bilevel.inner(s.model, lambda m, x, y: F.cross_entropy(m(x), y), s.g, **GD) as loop:
            for x, y, i in s.batches():
                loop.step(x + s.lam[i, None], y, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam


def accumulated():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            for k, batch in enumerate(s.batches()):
                loop.accumulate(*batch)
                if k % 2:
                    loop.step()
            return loop.hypergrad(s.lam, outer=s.outer)

    return train, s.lam


def a_decorator_and_run():
    s = Setting()

    @bilevel.inner(s.model, s.h, s.g, solver="bigsam", lr=RATE)
    def train(loop):
        loop.run(STEPS, s.x, s.y, torch.arange(24), outer=s.outer)
        return loop.hypergrad(s.lam)

    return lambda: train(), s.lam


def a_float32_type_test():
    """A loss that insists on float32 is checked as it is."""
    s = Setting()

    def h(model, x, y, i):
        if x.dtype != torch.float32:
            raise TypeError("float32, please")
        return s.h(model, x, y, i)

    def train():
        with bilevel.inner(s.model, h, s.g, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam


RIGHT = [
    plain_steps, dropout_and_norm, model_made_inside, outer_network, several_outer_losses, own_outer_loss,
    a_batch_with_a_graph, accumulated, a_decorator_and_run, a_float32_type_test,
]  # fmt: skip


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_a_right_loop_passes(make):
    train, lam = make()
    report = bilevel.check_loop(train, lam)
    assert report.ok, report
    assert report
    assert report.causes == []
    assert "all holds" in str(report)


@pytest.mark.parametrize("seed", range(10))
def test_random_right_loops_pass(seed):
    """Of random models, updates, engines and lengths."""
    draw = random.Random(seed).choice
    s = Setting(draw((0.0, 0.2)), norm=draw((False, True)))
    engine, clip, steps = draw(("reverse", "unroll", "forward")), draw((None, 0.3)), draw((1, 4, 7))
    kind = draw((torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop))

    def train():
        options = {"eps": 1e-2} if kind is not torch.optim.SGD else {"momentum": 0.5}
        optimizer = kind(s.model.parameters(), 0.05, **options)
        with bilevel.inner(s.model, s.h, s.g, solver="gd", optimizer=optimizer, clip=clip, engine=engine) as loop:
            for batch in s.batches(steps):
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    report = bilevel.check_loop(train, s.lam)
    assert report.ok, report
    assert report.precision == "cast to float64"


def test_everything_is_left_as_it_was():
    train, lam = dropout_and_norm()
    lam.grad = torch.ones(24)
    state, held = torch.get_rng_state(), lam.detach().clone()
    bilevel.check_loop(train, lam)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(lam, held)
    assert lam.dtype == torch.float32
    assert torch.equal(lam.grad, torch.ones(24))
    assert torch.get_default_dtype() == torch.float32


# --- wrong ones: each with words of the cause that has to be named ---


def between(compute, h=None, g=None, cause="loop.compute", **options):
    """A loop that computes something between its steps: compute(s, model, batch) → the batch of h."""

    def make():
        s = Setting()

        def train():
            loss = (lambda *a: h(s, *a)) if h else s.h
            with bilevel.inner(s.model, loss, g or s.g, **{**GD, **options}) as loop:
                for batch in s.batches():
                    loop.step(*compute(s, s.model, batch), outer=s.outer)
                return loop.hypergrad(s.lam)

        return train, s.lam, cause

    return make


@torch.no_grad()
def hard_samples(s, model, batch):
    x, y, i = batch
    return x, y, i, F.cross_entropy(model(x), y, reduction="none").softmax(0)


def weighted_by(s, model, x, y, i, weight):
    return (torch.sigmoid(s.lam[i]) * weight * F.cross_entropy(model(x), y, reduction="none")).sum()


@torch.no_grad()
def pseudo_labels(s, model, batch):
    x, _, i = batch
    return x, (3 * model(x)).softmax(-1), i


def soft(s, model, x, y, i):
    return (torch.sigmoid(s.lam[i]) * -(y * model(x).log_softmax(-1)).sum(-1)).mean()


def loss_as_a_number(s, model, batch):
    x, y, i = batch
    return x, y, i, s.g(model, *s.outer).item()


@torch.no_grad()
def shifted_by_the_model(s, model, batch):
    x, y, i = batch
    return x + 0.3 * model(x).mean(), y, i


def target_network(copies):
    """A target that follows the model: softly, or copied every other step."""

    def make():
        s = Setting()

        def train():
            target = copy.deepcopy(s.model)

            def h(model, x, y, i):
                with torch.no_grad():
                    aim = target(x)
                return (torch.sigmoid(s.lam[i])[:, None] * (model(x) - 0.9 * aim).square()).mean() + s.h(model, x, y, i)

            with bilevel.inner(s.model, h, s.g, **GD) as loop:
                for k, batch in enumerate(s.batches()):
                    loop.step(*batch, outer=s.outer)
                    with torch.no_grad():
                        for p, q in zip(target.parameters(), s.model.parameters(), strict=True):
                            if not copies:
                                p.lerp_(q, 0.3)
                            elif k % 2:
                                p.copy_(q)
                return loop.hypergrad(s.lam)

        return train, s.lam, "companions="

    return make


def queue_of_features():
    s = Setting()

    def train():
        queue = torch.zeros(16, 3)

        def h(model, x, y, i):
            return s.h(model, x, y, i) + (model(x) @ queue.T).logsumexp(1).mean()

        with bilevel.inner(s.model, h, s.g, engine="unroll", check=False, **GD) as loop:
            for batch in s.batches():
                with torch.no_grad():
                    queue = torch.cat([queue[8:], s.model(batch[0])])
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "`queue (read by h)` of step k = 2"


def rate_from_losses():
    s = Setting()

    def train():
        sgd = torch.optim.SGD(s.model.parameters(), RATE)
        with bilevel.inner(s.model, s.h, s.g, solver="gd", optimizer=sgd) as loop:
            for batch in s.batches():
                found = loop.step(*batch, outer=s.outer)
                sgd.param_groups[0]["lr"] = RATE * found.h.item()
            return loop.hypergrad(s.lam)

    return train, s.lam, "the option 'lr' of optimizer 0"


def early_stopping():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            for batch in s.batches(20):
                found = loop.step(*batch, outer=s.outer)
                if int(1e9 * found.h.item()) % 5 == 0:
                    break
            return loop.hypergrad(s.lam)

    return train, s.lam, "the number of steps"


def detached_outer_variable():
    s = Setting()

    def h(model, x, y, i):
        return (torch.sigmoid(s.lam[i].detach()) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def train():
        with bilevel.inner(s.model, h, s.g, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam, allow_unused=True)

    return train, s.lam, "has no gradient at all"


def half_detached():
    s = Setting()

    def h(model, x, y, i):
        weight = torch.sigmoid(s.lam[i])
        return (weight / weight.sum().detach() * F.cross_entropy(model(x), y, reduction="none")).sum()

    def train():
        with bilevel.inner(s.model, h, s.g, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "the block has warned"


def semi_gradient():
    s = Setting()

    def h(model, x, y, i):
        out = model(x)
        return s.h(model, x, y, i) + (out - 0.9 * out.detach().roll(1, 0)).square().mean()

    def train():
        with bilevel.inner(s.model, h, s.g, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "the second derivative of h is not the derivative of the loss"


def committed_before():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            loop.step(*next(s.batches()), outer=s.outer)
            loop.commit_()
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "the weights at the start of the block change"


def initialised_from_the_outer_variable():
    s = Setting()

    def train():
        model = copy.deepcopy(s.model)
        with torch.no_grad():
            model[0].bias.copy_(s.lam[:6])
        with bilevel.inner(model, s.h, s.g, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "initialised from λ"


def direction_that_reads_the_weights():
    s = Setting()

    def train():
        decayed = lambda d: {n: x + 0.3 * dict(s.model.named_parameters())[n].detach() for n, x in d.items()}
        with bilevel.inner(s.model, s.h, s.g, direction=decayed, check=False, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "direction= is a function of your own"


def direction_with_item():
    s = Setting()

    def train():
        def unit(d):
            norm = sum(x.square().sum() for x in d.values()).sqrt().item()
            return {n: x / norm for n, x in d.items()}

        with bilevel.inner(s.model, s.h, s.g, direction=unit, **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "the derivative of direction="


def truncated():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, s.g, engine=bilevel.Reverse(truncate=2), **GD) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "truncate="


def implicit_far_from_a_fixed_point():
    s = Setting()

    def h(model, x, y):
        decay = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(x), y) + torch.sigmoid(s.lam).mean() * decay

    def train():
        with bilevel.inner(s.model, h, s.g, engine="neumann", **GD) as loop:
            loop.run(3, s.x, s.y, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "fixed point"


def outer_batch_from_the_weights():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, lambda m, x, y: (m(x) - y).square().mean(), **GD) as loop:
            for batch in s.batches():
                loop.step(*batch)
            with torch.no_grad():
                aim = s.model(s.x_val).roll(1, 0)
            return loop.hypergrad(s.lam, outer=(s.x_val, aim))

    return train, s.lam, "changes with λ"


def own_generator():
    s = Setting()
    generator = torch.Generator().manual_seed(0)

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            for x, y, i in s.batches():
                loop.step(x + torch.randn(8, 4, generator=generator), y, i, outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "two runs at the same λ differ, first in `the batch[0]` of step k = 1"


def iterator_that_goes_on():
    s = Setting()
    stream = iter(list(s.batches(200)))

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            for _ in range(4):
                loop.step(*next(stream), outer=s.outer)
            return loop.hypergrad(s.lam)

    return train, s.lam, "an iterator that is used up"


def draws_by_the_weights():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            for x, y, i in s.batches():
                loop.step(x + 0.1 * torch.randn(8, 4), y, i, outer=s.outer)
                torch.rand(1 + int(1e9 * s.model[0].weight.detach().abs().sum().item()) % 97)
            return loop.hypergrad(s.lam)

    return train, s.lam, "the random state of step k = "


WRONG = {
    "loss-based weights of samples": between(hard_samples, weighted_by),
    "pseudo-labels": between(pseudo_labels, soft),
    "a loss as a number": between(loss_as_a_number, lambda s, m, x, y, i, c: c * s.h(m, x, y, i)),
    "inputs that the model has changed": between(shifted_by_the_model),
    "a target network, soft": target_network(copies=False),
    "a target network, hard": target_network(copies=True),
    "a queue": queue_of_features,
    "a rate from losses": rate_from_losses,
    "early stopping": early_stopping,
    "λ detached": detached_outer_variable,
    "λ half detached": half_detached,
    "a semi-gradient": semi_gradient,
    "an earlier block that was committed": committed_before,
    "w_0 from λ": initialised_from_the_outer_variable,
    "direction= that reads the weights": direction_that_reads_the_weights,
    "direction= with .item()": direction_with_item,
    "truncate=": truncated,
    "an implicit engine after few steps": implicit_far_from_a_fixed_point,
    "an outer batch from the weights": outer_batch_from_the_weights,
    "a generator of its own": own_generator,
    "an iterator that goes on": iterator_that_goes_on,
    "draws that depend on the weights": draws_by_the_weights,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_does_not_pass_and_its_cause_is_named(name):
    train, lam, cause = WRONG[name]()
    report = quietly(train, lam)
    assert not report.ok, report
    assert any(cause in text for text in report.causes), report
    assert "what may be the cause:" in str(report)


# --- the end of the training, against the plain loop ---


class Both:
    """A loop in a block and the plain loop that it came from, with options for what sets them apart."""

    def __init__(self, part: bool = False, unused: bool = False, **setting):
        self.s = Setting(**setting)
        self.part = part  # whether the optimizer holds the last layer alone
        self.unused = unused  # whether the head of the model is used in the first step alone
        if unused:
            self.s.model.append(nn.Linear(3, 3))
        self.options = {}

    def optimizer(self, model):
        weights = model[-1].parameters() if self.part else model.parameters()
        return torch.optim.SGD(weights, RATE, momentum=0.9)

    def h(self, model, x, y, i):
        out = model(x) if not self.unused or i[0] == 0 else model[:-1](x)
        return (torch.sigmoid(self.s.lam[i]) * F.cross_entropy(out, y, reduction="none")).mean()

    def train(self):
        s = self.s
        optimizer = self.optimizer(s.model)
        options = {"solver": "gd", "optimizer": optimizer, **self.options}
        if "clip" in options:
            options["clip"] = bilevel.clip_norm(options["clip"], over=optimizer)
        with bilevel.inner(s.model, self.h, s.g, **options) as loop:
            for batch in s.batches():
                loop.step(*batch, outer=s.outer)
            return loop.hypergrad(s.lam)

    def plain(self, clip=None, to_none=True, order=1, twice=False):
        s, model = self.s, copy.deepcopy(self.s.model)
        sgd = self.optimizer(model)
        for batch in list(s.batches())[::order]:
            sgd.zero_grad(to_none)
            if twice:
                model(batch[0])
            self.h(model, *batch).backward(inputs=list(model.parameters()))
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            sgd.step()
        return model


def test_the_end_of_the_plain_loop_is_compared_tensor_by_tensor():
    both = Both(norm=True, dropout=0.3)
    report = bilevel.check_loop(both.train, both.s.lam, plain=both.plain)
    assert report.ok, report
    assert {f.what for f in report.end} == set(both.s.model.state_dict())
    as_dict = lambda: both.plain().state_dict()
    assert bilevel.check_loop(both.train, both.s.lam, plain=as_dict).ok


ENDS = {
    "the scope of clip=": (
        Both(part=True),
        {"clip": 0.1},
        {"clip": 0.1},
        "clip= is over the weights that the optimizer",
    ),
    "gradients of zeros": (Both(unused=True), {}, {"to_none": False}, "zero_grad(set_to_none=False)"),
    "another order": (Both(), {}, {"order": -1}, "another order of batches"),
    "another solver": (Both(), {"solver": "bigsam"}, {}, "the solver is BiGSAM, which follows g"),
    "clipping that is missing": (Both(), {}, {"clip": 0.1}, "does not know: clipping"),
    "running statistics": (Both(norm=True), {}, {"twice": True}, "running statistics differ"),
    "random numbers": (Both(dropout=0.3), {}, {"twice": True}, "has drawn other random numbers"),
    "a rule of one's own": (
        Both(),
        {"direction": lambda d: {n: 0.9 * x for n, x in d.items()}},
        {},
        "a rule or direction=",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_another_end_is_told_with_its_cause(name):
    both, options, plain, cause = ENDS[name]
    both.options = options
    with pytest.warns(bilevel.DerivativeWarning, match="something is WRONG"):
        report = bilevel.check_loop(both.train, both.s.lam, plain=lambda: both.plain(**plain))
    assert all(f.verdict == "ok" for f in report.hypergradient), report
    assert any(f.verdict == "WRONG" for f in report.end), report
    assert any(cause in text for text in report.causes), report


# --- what can't be checked ---


def test_what_is_no_loop_is_refused():
    s = Setting()
    with pytest.raises(ValueError, match="opened no block"):
        bilevel.check_loop(lambda: None, s.lam)
    with pytest.raises(TypeError, match="train must be a function"):
        bilevel.check_loop(s.model.state_dict(), s.lam)
    with pytest.raises(ValueError, match="is not a leaf"):
        bilevel.check_loop(lambda: None, 2 * s.lam)

    def no_hypergradient():
        with bilevel.inner(s.model, s.h, s.g, **GD) as loop:
            loop.step(*next(s.batches()))

    with pytest.raises(ValueError, match="took no hypergradient"):
        bilevel.check_loop(no_hypergradient, s.lam)
    train, lam = plain_steps()
    with pytest.raises(TypeError, match="must return the trained model"):
        bilevel.check_loop(train, lam, plain=lambda: 3)
    with pytest.raises(ValueError, match="returned tensors named"):
        bilevel.check_loop(train, lam, plain=lambda: {"other": torch.ones(2)})


def test_the_error_of_a_loop_is_its_own():
    s = Setting()

    def train():
        with bilevel.inner(s.model, s.h, s.g, **GD):
            raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        bilevel.check_loop(train, s.lam)

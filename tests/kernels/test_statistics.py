"""Running statistics: those of the model are part of the loop, those of another module are torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain_loop import Case, block, data, exact, losses, mlp, plain, right_or_refused, start, train_and_eval
from problems import refused, relative, weighted
from torch import Tensor, nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


def outside(encoder: nn.Module, own: bool = True, g_in_eval: bool = False, only_in_h: bool = False):
    """A head with (or without) statistics of its own, behind an encoder that h and g close over."""

    def build(lam: Tensor) -> Case:
        model = nn.Sequential(*([nn.BatchNorm1d(3)] if own else []), nn.Linear(3, 2))
        h, g = weighted(lam)
        encode = lambda x, on=True: encoder.train(on)(x)
        outer = (lambda m, x, y: g(m, x, y)) if only_in_h else (lambda m, x, y: g(m, encode(x, not g_in_eval), y))
        return Case(model, lambda m, x, y: h(m, encode(x), y), outer, data(), data(5))

    return build


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())


@pytest.mark.parametrize("own", [True, False], ids=["with statistics", "without"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda n: nn.InstanceNorm1d(n, track_running_stats=True)])
def test_an_encoder_outside_of_the_model(norm, own, engine):
    """Its statistics move once a step, as in the plain loop, have no graph, and a second outer step is taken."""
    layer, lam = norm(3), start()
    rows = nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Upsample(scale_factor=2), layer, nn.Flatten(1), nn.Linear(6, 3))
    one = nn.Sequential(nn.Linear(3, 3), layer, nn.Tanh()) if isinstance(layer, nn.BatchNorm1d) else rows
    before = {n: b.clone() for n, b in layer.named_buffers()}
    build = outside(one, own, only_in_h=True)
    plain(build, lam.detach())
    moved = {n: b.clone() for n, b in layer.named_buffers()}
    layer.load_state_dict({**layer.state_dict(), **before})
    first = block(build, lam, engine)
    for n, b in layer.named_buffers():
        assert not b.requires_grad
        torch.testing.assert_close(b, moved[n])
    assert not relative(moved["running_mean"], before["running_mean"]) < 1e-6
    again = block(build, lam, engine)
    assert relative(first.grad, again.grad) < 1e-12
    exact(build, engine, bits=False)


def test_what_reads_statistics_outside_of_the_model_in_eval_mode_is_warned_of(engine):
    with pytest.warns(bilevel.DerivativeWarning, match=r"outside of the model \(3 features\).*reads them in eval mode"):
        block(outside(encoder(), g_in_eval=True), start(), engine, check="first")


def test_a_step_that_reads_statistics_outside_of_the_model_is_refused(engine):
    one, lam = encoder(), start()

    def build(lam: Tensor) -> Case:
        h, g = weighted(lam)
        return Case(nn.Linear(3, 2), lambda m, x, y: h(m, one.train()(x) + one.eval()(x), y), g, data(), data(5))

    with refused("outside of the model", r"3 features", "eval mode", "part of the model"):
        block(build, lam, engine)


class Own(nn.BatchNorm1d):
    """A subclass that updates its statistics itself, as several libraries have one."""

    assigns = stops = False

    def forward(self, x):
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        mean, var = x.mean(0), x.var(0, correction=0)
        if self.stops:
            self.running_mean = bilevel.stop_gradient(0.9 * self.running_mean + 0.1 * mean)
            self.running_var = bilevel.stop_gradient(0.9 * self.running_var + 0.1 * var)
        elif self.assigns:
            self.running_mean = 0.9 * self.running_mean + 0.1 * mean.detach()
            self.running_var = 0.9 * self.running_var + 0.1 * var.detach()
        else:
            with torch.no_grad():
                self.running_mean.mul_(0.9).add_(0.1 * mean)
                self.running_var.mul_(0.9).add_(0.1 * var)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class Assigned(Own):
    assigns = True


class Stopped(Own):
    stops = True


@pytest.mark.parametrize("kind", [Own, Assigned])
def test_a_subclass_that_updates_its_statistics_itself(kind, engine):
    assert not right_or_refused(losses(lambda: mlp(kind(4)), train_and_eval), engine, "'1.running_mean'", "stop_grad")
    if engine != "forward":  # which follows every derivative of the state
        exact(losses(lambda: mlp(kind(4))), engine, bits=False)  # nothing reads them


def test_a_subclass_that_leaves_its_statistics_stopped(engine):
    """What the refusal advises."""
    exact(losses(lambda: mlp(Stopped(4)), train_and_eval), engine, bits=False)


class ByHand(nn.BatchNorm1d):
    """A subclass that calls torch's function below that of F."""

    def forward(self, x):
        tensors = self.weight, self.bias, self.running_mean, self.running_var
        return torch.batch_norm(x, *tensors, self.training, 0.1, self.eps, False)


def test_a_subclass_that_calls_the_function_below(engine):
    exact(losses(lambda: mlp(ByHand(4)), train_and_eval), engine, bits=False)


def test_statistics_that_move_under_no_grad(engine):
    """They depend on the weights by the batch, which has no graph there."""

    def wrap(h, g):
        def moving(m, *b):
            with torch.no_grad():
                m.train()(b[0])
            return h(m.eval(), *b)

        return moving, lambda m, *b: g(m.eval(), *b)

    build = losses(lambda: mlp(nn.BatchNorm1d(4)), wrap)
    assert not right_or_refused(build, engine, "under torch.no_grad", "out of torch.no_grad")


@pytest.mark.usefixtures("blocks")
def test_statistics_that_move_under_no_grad_in_a_block():
    class Block(nn.Sequential):
        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    super().forward(x)
            return nn.Sequential.forward(self.eval(), x)

    make = lambda: nn.Sequential(
        *(Block(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(2)), nn.Linear(3, 2)
    )
    with pytest.warns(UserWarning, match="blocks= is off.*under torch.no_grad"), refused("under torch.no_grad"):
        block(losses(make, lambda h, g: ((lambda m, *b: h(m.train(), *b)), g)), start(), bilevel.Reverse(blocks=Block))

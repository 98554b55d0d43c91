"""A step that can't be run again: the error names what has changed, and not everything that might have."""

import random

import numpy as np
import pytest
import torch
from promise import Loop, each, error, indexed, keeps_the_promise, mlp, rows, squares, verdict, weighted
from torch import nn

REPLAYS = "reverse sqrt blocks tasks"


class Config:
    temperature, names = 1.0, None


def refilled(lam):
    m, (x, y, i) = mlp(), indexed()
    seen = x.clone()

    def before(k):
        seen.numpy()[:] = (1 + k) * x.numpy()

    def h(m, y, i):
        return (torch.sigmoid(lam[i]) * squares(m, seen, y)).mean()

    return Loop(m, h, error, (y, i), rows(5), before=before)


def written_in_place(lam):
    m, scale = mlp(), torch.ones(3, dtype=torch.float64)
    h = lambda m, x, y, i: weighted(lam)(m, x * scale, y, i)
    return Loop(m, h, error, indexed(), rows(5), before=lambda k: scale.fill_(1 + 0.2 * k))


def number(lam):
    m, config = mlp(), Config()

    def before(k):
        config.temperature = 1 / (1 + k)

    h = lambda m, x, y, i: config.temperature * weighted(lam)(m, x, y, i)
    return Loop(m, h, error, indexed(), rows(5), before=before)


def variable(lam):
    """A variable of the loop's own function, by closure."""
    m, temperature = mlp(), 1.0

    def before(k):
        nonlocal temperature
        temperature = 1 / (1 + k)

    h = lambda m, x, y, i: temperature * weighted(lam)(m, x, y, i)
    return Loop(m, h, error, indexed(), rows(5), before=before)


def entry(lam):
    m, options = mlp(), {"temperature": 1.0}

    def before(k):
        options["temperature"] = 1 / (1 + k)

    h = lambda m, x, y, i: options["temperature"] * weighted(lam)(m, x, y, i)
    return Loop(m, h, error, indexed(), rows(5), before=before)


EPOCH = 0


def global_variable(lam):
    def before(k):
        global EPOCH
        EPOCH = k

    h = lambda m, x, y, i: weighted(lam)(m, x, y, i) / (1 + EPOCH)
    return Loop(mlp(), h, error, indexed(), rows(5), before=before)


def numpy_draws(lam):
    np.random.seed(0)  # noqa: NPY002 (the global generator is what is tried)
    h = lambda m, x, y, i: weighted(lam)(m, x + 0.3 * float(np.random.rand()), y, i)  # noqa: NPY002
    return Loop(mlp(), h, error, indexed(), rows(5))


def numpy_generator(lam):
    generator = np.random.default_rng(0)
    h = lambda m, x, y, i: weighted(lam)(m, x + 0.3 * float(generator.random()), y, i)
    return Loop(mlp(), h, error, indexed(), rows(5))


def python_draws(lam):
    random.seed(0)
    h = lambda m, x, y, i: weighted(lam)(m, x + 0.3 * random.random(), y, i)
    return Loop(mlp(), h, error, indexed(), rows(5))


def torch_generator(lam):
    generator = torch.Generator().manual_seed(0)
    h = lambda m, x, y, i: weighted(lam)(m, x + torch.randn(x.shape, generator=generator, dtype=x.dtype), y, i)
    return Loop(mlp(), h, error, indexed(), rows(5))


def counter(lam):
    """A counter that h itself moves."""
    count = [0]

    def h(m, x, y, i):
        count[0] += 1
        return weighted(lam)(m, x, y, i) / count[0]

    return Loop(mlp(), h, error, indexed(), rows(5))


class Anneals(nn.Module):
    """A counter in the model, moved by its forward."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = mlp(), 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) / self.calls


def counter_in_the_model(lam):
    return Loop(Anneals(), weighted(lam), error, indexed(), rows(5))


class Flagged(nn.Module):
    """A flag of a module, which the loop changes."""

    def __init__(self):
        super().__init__()
        self.body, self.wide = mlp(), False

    def forward(self, x):
        return self.body(x) * (2 if self.wide else 1)


def flag(lam):
    m = Flagged()

    def before(k):
        m.wide = k >= 2

    return Loop(m, weighted(lam), error, indexed(), rows(5), before=before)


def generator_of_batches(lam):
    """h draws its own batches from an iterator."""
    m, batches = mlp(), iter([rows() for _ in range(50)])

    def h(m, i):
        return weighted(lam)(m, *next(batches), i)

    return Loop(m, h, error, (torch.arange(6),), rows(5))


def clock(lam):
    """The time: what can't be found in anything that is closed over."""
    ticks = iter(range(1, 100))
    import types

    clock = types.SimpleNamespace(now=lambda: next(ticks))
    h = lambda m, x, y, i: weighted(lam)(m, x, y, i) / clock.now()
    return Loop(mlp(), h, error, indexed(), rows(5))


CAUSES = {
    "a tensor by NumPy": (refilled, r"tensor.*\((1, )?6, 3\)|\bseen\b"),
    "a tensor in place": (written_in_place, r"tensor.*\(3,\)|\bscale\b"),
    "a number in an object": (number, r"\btemperature\b"),
    "a variable": (variable, r"\btemperature\b"),
    "an entry of a dict": (entry, r"\btemperature\b|\boptions\b"),
    "a global variable": (global_variable, r"\bEPOCH\b"),
    "numpy's random numbers": (numpy_draws, r"NumPy|numpy"),
    "a generator of numpy": (numpy_generator, r"NumPy|numpy|\bgenerator\b"),
    "python's random numbers": (python_draws, r"Python's random|random module|\brandom\b"),
    "a generator of torch": (torch_generator, r"\bgenerator\b"),
    "a counter": (counter, r"\bcount\b"),
    "a counter in the model": (counter_in_the_model, r"\bcalls\b"),
    "a flag of a module": (flag, r"\bwide\b"),
    "an iterator": (generator_of_batches, r"\bbatches\b|iterator"),
    "an iterator in an object": (clock, r"\bclock\b|another value each time|each time"),
}


@each(REPLAYS)
@pytest.mark.parametrize("cause", CAUSES)
def test_the_error_names_what_has_changed(cause, variant):
    """Right (the block has what it takes), or refused by the name of the cause; a list of all causes names none."""
    build, name = CAUSES[cause]
    keeps_the_promise(build, variant, name)


@pytest.mark.parametrize("cause", ["a tensor by NumPy", "a tensor in place"])
def test_no_engine_is_advised_that_is_wrong_in_silence(cause):
    """Where the error advises another engine, that engine is right about this very loop."""
    build, _ = CAUSES[cause]
    found = verdict(build, "reverse")
    if "unroll" in found.text:
        other = verdict(build, "unroll")
        assert other.kind in ("right", "refused", "warned"), f"advised: {found.text}\nbut: {other}"


def test_a_change_that_no_loss_reads_is_no_change():
    """A counter for the log."""

    def build(lam):
        seen = []

        def h(m, x, y, i):
            seen.append(len(seen))
            np.random.rand()  # noqa: NPY002
            return weighted(lam)(m, x, y, i)

        return Loop(mlp(), h, error, indexed(), rows(5))

    assert verdict(build).kind == "right"

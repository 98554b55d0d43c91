"""The causes follow from what was seen."""

import torch
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.check.causes import Evidence, causes
from bilevel_plugin.check.readings import RANDOM


def block(**options):
    options = {"solver": "gd", "lr": 0.1, **options}
    return bilevel.inner(nn.Linear(2, 1), lambda m: m.weight.sum(), lambda m: m.bias.sum(), **options)


def evidence(block_=None, **seen):
    found = Evidence(block_ or block(), set())
    for name, value in seen.items():
        setattr(found, name, value)
    return found


def test_nothing_is_said_of_a_right_loop():
    assert causes(evidence(moved={"target.weight (read by h)": 2}, other_length=True)) == []


def test_readings_of_one_module_are_one_cause():
    moved = {"target.weight (read by h)": 2, "target.bias (read by h)": 2, "the batch[1]": 3, RANDOM: 4}
    random, companion, value = causes(evidence(wrong=True, moved=moved))
    assert companion.startswith(
        "`target.weight (read by h)` of step k = 2, and 1 more like it, changes with λ: a module"
    )
    assert "loop.compute" in value
    assert "`the batch[1]` of step k = 3" in value
    assert "the random state of step k = 4" in random


def test_options_that_are_approximations():
    for engine, word in ((bilevel.Reverse(truncate=2), "truncate="), (bilevel.Neumann(), "fixed point")):
        assert any(word in text for text in causes(evidence(block(engine=engine), wrong=True)))


def test_if_nothing_shows_it_says_so():
    (text,) = causes(evidence(wrong=True))
    assert "none of the known causes shows" in text


def test_runs_are_compared_by_their_readings():
    seen = evidence(wrong=True)
    seen.compare([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 3}, {"a": 4}], other_start=True)
    assert seen.moved == {"a": 2}
    assert seen.other_length
    assert seen.other_start
    assert torch.is_grad_enabled()

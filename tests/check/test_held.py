"""What a function holds is found, whatever the way, and its switches are a key of the path that it takes."""

import functools
from dataclasses import dataclass, field

import torch
from torch import nn

from bilevel_plugin.check.held import held, switches

GLOBAL = torch.ones(3)


@dataclass
class Config:
    flag: bool = False
    strength: float = 0.0
    parts: list = field(default_factory=list)


class Callable:
    def __init__(self, x):
        self.x = x

    def __call__(self, model):
        return self.x

    def method(self, model):
        return self.x


def found(function):
    return {id(x) for _, x in held(function)}


def test_tensors_are_found_by_every_way():
    x = torch.zeros(2)
    by_default = lambda model, y=x: y
    nested = lambda model: by_default(model)
    deep = {"a": [x]}
    ways = [
        lambda model: x, by_default, nested, lambda model: deep["a"], functools.partial(lambda y, model: y, x),
        Callable(x), Callable(x).method,
    ]  # fmt: skip
    assert all(id(x) in found(way) for way in ways)
    assert id(GLOBAL) in found(lambda model: GLOBAL)


def test_names_say_where():
    net = nn.Sequential(nn.Linear(2, 2))
    names = {name for name, _ in held(lambda model: net(GLOBAL))}
    assert {"net", "net.0.weight", "GLOBAL"} <= names


def test_a_circle_ends():
    circle = Config()
    circle.parts.append(circle)
    assert len(list(held(lambda model: circle))) < 20


def test_switches_differ_where_another_path_is_taken():
    config, net = Config(), nn.Dropout()
    key = lambda: switches(lambda model: (config, net))
    before = key()
    assert key() == before
    config.strength = 0.5
    strong = key()
    assert strong != before
    config.strength = 0.7
    assert key() == strong
    config.flag = True
    assert key() != strong
    flagged = key()
    net.eval()
    assert key() != flagged
    hash(key())


def test_values_of_tensors_are_no_switches():
    x = torch.zeros(3)
    function = lambda model: x
    before = switches(function)
    x.add_(1)
    assert switches(function) == before
    x.requires_grad_()
    assert switches(function) != before

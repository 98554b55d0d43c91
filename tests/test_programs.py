"""All of the handle at random: programs of steps and gathered steps, against the plain loop and its differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import PLANS
from handle import HALVES, SAMPLES, Case, agree, agree_on_tasks, bent, clip_norm, clip_value, halved, samples
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


class Mixed(nn.Module):
    """Two parts, BatchNorm or LayerNorm, and a moving average that the loss keeps in a buffer and reads again."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Tanh()), nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))

    def __getitem__(self, i: int) -> nn.Module:
        return (self.first, self.second)[i]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


LOSSES = ("whole", "stopped", "buffer", "second alone", "beside")


PARTS = (None, "first", "second", "weights", "optimizer")


@dataclass
class Program:
    """What a body does, one call after another: (call, samples, only, loss)."""

    calls: list[tuple[str, int, Any, str]]
    tasks: bool = False

    def __call__(self, loop: Any, model: Any, made: Any, batch: Any = None) -> None:
        x, i, outer = batch or (samples()[0], torch.arange(SAMPLES), samples()[2])
        dim = i.dim() - 1
        for call, part, only, loss in self.calls:
            chosen = self.part(only, model, made)
            if call == "step()":
                loop.step(outer=(outer,), only=chosen)
                continue
            half = HALVES[part]
            args = (x.index_select(dim, half),) if part else ()
            named = {} if part else {"x": x.index_select(dim, half)}
            take = loop.step if call == "step" else loop.accumulate
            more = {"outer": (outer,)} if call == "step" else {}
            how = {} if loss == "whole" else {"h": self.losses[loss]}
            take(*args, i=i.index_select(dim, half), only=chosen, **named, **more, **how)

    def part(self, only: Any, model: Any, made: Any) -> Any:
        if only is None or (only == "optimizer" and made is None):
            return None
        if only == "optimizer":
            return made[-1] if isinstance(made, list) else made
        if only == "weights":
            return [p for n, p in model.named_parameters() if n.endswith("weight")]
        return model.first if only == "first" else model.second


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, Any, str]]:
    """Steps and gathered steps. Under only= the loss must reach what moves."""
    calls = []

    def one(call: str) -> tuple[str, int, Any, str]:
        loss = draw(st.sampled_from(LOSSES))
        parts = [None, "second", "weights"] if loss in ("stopped", "second alone") else PARTS
        return call, draw(st.integers(0, 1)), draw(st.sampled_from(parts)), loss

    for _ in range(draw(st.integers(1, 4))):
        gathered = draw(st.integers(0, 3))
        calls += [one("accumulate") for _ in range(gathered)] if gathered else [one("step")]
        if gathered:
            calls.append(("step()", 0, None, ""))
    if draw(st.integers(0, 4)) == 4:
        calls.append(one("accumulate"))  # which no step takes
    return calls


def random_case(draw: st.DrawFn | Any) -> tuple[Case, Any]:
    lam = torch.tensor([0.3, -2.0, 0.2, 0.5], requires_grad=True)
    weigh = torch.linspace(-1, 1, SAMPLES).requires_grad_()
    y = samples()[1]
    torch.manual_seed(draw(st.integers(0, 99)))
    model = Mixed(draw(st.sampled_from([nn.BatchNorm1d, nn.LayerNorm])))
    stops: list[Callable[[Tensor], Tensor]] = [bilevel.stop_gradient]

    def whole(model: Mixed, x: Tensor, i: Tensor) -> Tensor:
        model.train()
        loss = F.cross_entropy(model(x), y[i], reduction="none")
        return (weigh[i].sigmoid() * loss).mean() + lam[1].exp() * sum(p.square().sum() for p in model.parameters())

    def stopped(model: Mixed, x: Tensor, i: Tensor) -> Tensor:
        return (lam[0] * model.second(stops[-1](model.first(x)))).square().mean()

    def buffer(model: Mixed, x: Tensor, i: Tensor) -> Tensor:
        model.train()
        features = model.first(x)
        before = model.average
        model.average = stops[-1](before.lerp(features.mean(0), 0.5))
        return (model.second(features) - before.sum() - lam[2]).square().mean()

    def second_alone(model: Mixed, x: Tensor, i: Tensor) -> Tensor:
        return (model.second.weight.sum(0) - lam[3]).square().sum() + model.second.bias.exp().sum()

    def beside(model: Mixed, x: Tensor, i: Tensor) -> Any:
        model.eval()
        out = model(x)
        return (out.tanh() * weigh[i, None]).mean(), {"out": out}

    def g(model: Mixed, x: Tensor) -> Tensor:
        model.eval()
        return (model(x).logsumexp(1) + lam[2]).square().mean() + (model.average * lam[3]).sum()

    losses = {"whole": whole, "stopped": stopped, "buffer": buffer, "second alone": second_alone, "beside": beside}
    program = Program(draw(programs()))
    program.losses = losses
    optimizer = draw(st.sampled_from([None, None, RANDOM_SGD, RANDOM_ADAMW, RANDOM_BOTH]))
    case = Case(model, whole, g, {"lam": lam, "weigh": weigh}, program, optimizer)
    transform = draw(st.sampled_from(["", "", "bent", "learned", "in place"]))
    if transform == "learned":
        case.outer["rate"] = rate = torch.tensor(0.6, requires_grad=True)
        case.options["direction"] = lambda d: {n: rate * x for n, x in d.items()}
    elif transform:
        case.options["direction"] = bent if transform == "bent" else halved
    clip = draw(st.sampled_from(["", "", "norm", "learned", "value"]))
    if clip == "norm":
        case.options |= clip_norm(0.1)["options"]
        case.by_hand |= clip_norm(0.1)["by_hand"]
    elif clip == "value":
        case.options |= clip_value(0.05)["options"]
        case.by_hand |= clip_value(0.05)["by_hand"]
    elif clip == "learned":
        case.outer["most"] = most = torch.tensor(0.1, requires_grad=True)
        case.options["clip"] = bilevel.clip_norm(most)
        case.by_hand["clip"] = lambda w: nn.utils.clip_grad_norm_(w, float(most.detach()))
    factor = draw(st.sampled_from(["", "", "learned", "of k"]))
    if factor == "learned":
        case.outer["factor"] = case.options["lr"] = torch.tensor(0.5, requires_grad=True)
    elif factor:
        case.options["lr"] = lambda k: 0.5 / k
    if draw(st.integers(0, 3)) == 3:
        case.options["solver"] = "bigsam"
    elif draw(st.integers(0, 3)) == 3:
        made = case.optimizer

        def hooked(model: Mixed) -> Any:
            model.second.weight.register_hook(lambda d: (3 * d).tanh())
            return made(model) if made else None

        case.optimizer = hooked
    alone = case.alone

    def by_detaching() -> tuple[dict[str, Tensor], float]:
        stops.append(lambda x: x.detach())
        try:
            return alone()
        finally:
            stops.pop()

    case.alone = by_detaching
    engine = draw(st.sampled_from([*PLANS.values(), bilevel.Reverse(compile=False)]))
    what = (transform, clip, factor, case.options.get("solver"), optimizer, engine)
    note(f"{what}, {program.calls}")
    return case, engine


def RANDOM_SGD(model: Mixed) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.8, weight_decay=0.1)


def RANDOM_ADAMW(model: Mixed) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.1, eps=0.1)


def RANDOM_BOTH(model: Mixed) -> list[torch.optim.Optimizer]:
    first = torch.optim.SGD(model.first.parameters(), 0.2, momentum=0.8)
    return [first, torch.optim.AdamW(model.second.parameters(), 0.1, eps=0.1)]


@given(st.data())
def test_programs_at_random(at_random):
    case, engine = random_case(at_random.draw)
    agree(case, engine, unused=True)


@given(st.data())
def test_programs_of_tasks_at_random(at_random):
    """The same for two tasks at once: two plain loops, one after the other."""
    case, engine = random_case(at_random.draw)
    engine = bilevel.Reverse(memory="48kB") if engine is PLANS["little memory"] else engine
    x, _, held_out, _ = samples()
    batch = torch.stack([x, x.flip(0).sin()]), torch.stack([torch.arange(SAMPLES)] * 2), held_out.expand(2, -1, -1)
    agree_on_tasks(case, case.body, engine, batch)

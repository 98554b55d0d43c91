"""The initial weights as an outer variable, where a loss holds them: a proximal term, a distance to the start."""

import re

import pytest
import torch
from promise import indexed, mlp, start, weighted

import bilevel_plugin as bilevel

ENGINES = {"reverse": "reverse", "sqrt": bilevel.Reverse("sqrt"), "memory": bilevel.Reverse(memory="1GiB"),
           "unroll": "unroll"}  # fmt: skip


def distance(weights, start):
    return sum((x - start[n]).square().sum() * (i + 1) for i, (n, x) in enumerate(weights.items()))


def hand(move):
    """d(distance of w_3 to w_0)/dw_0 by differences of the plain loop, along every entry of one weight."""
    torch.manual_seed(0)
    template, batch, lam = mlp(), indexed(), start()
    slopes = []
    for j in range(4):
        values = []
        for eps in (1e-4, -1e-4):
            model = mlp()
            model.load_state_dict(template.state_dict())
            with torch.no_grad():
                model[0].bias[j] += eps
            first = {n: p.detach().clone() for n, p in model.named_parameters()}
            optimizer = torch.optim.SGD(model.parameters(), 0.3)
            for _ in range(3):
                optimizer.zero_grad()
                loss = weighted(lam)(model, *batch)
                if move == "h":
                    loss = loss + 0.1 * distance(dict(model.named_parameters()), first)
                loss.backward()
                optimizer.step()
            values.append(float(distance(dict(model.named_parameters()), first).detach()))
        slopes.append((values[0] - values[1]) / 2e-4)
    return template, batch, lam, torch.tensor(slopes, dtype=torch.float64)


def held(loop, model, how):
    """The start, as a loop keeps it."""
    if how == "weights":
        return dict(loop.weights)
    if how == "parameters":
        return dict(model.named_parameters())
    if how == "clones":
        return {n: x.clone() for n, x in loop.weights.items()}
    return {n: x.detach().clone() for n, x in loop.weights.items()}


def check(run, expected):
    """Right, or refused by a text that names the initial weights."""
    try:
        found = run()
    except Exception as why:
        if not re.match(r"bilevel\.\w+: .*(initial|w_0|earlier step|before)", str(why), re.DOTALL):
            pytest.fail(f"{type(why).__name__}: {why}")
        return
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", ["weights", "clones"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_holds_the_initial_weights(engine, how):
    model, batch, lam, expected = hand("loss")

    def run():
        with bilevel.inner(model, weighted(lam), solver="gd", lr=0.3, engine=ENGINES[engine], check=False) as loop:
            first = held(loop, model, how)
            for _ in range(3):
                loop.step(*batch)
            return loop.hypergrad(model, loss=distance(loop.weights, first))["0.bias"]

    check(run, expected)


@pytest.mark.parametrize("how", ["weights", "clones"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_outer_loss_that_closes_over_the_initial_weights(engine, how):
    model, batch, lam, expected = hand("loss")
    first = {}

    def g(m):
        return distance(dict(m.named_parameters()), first)

    def run():
        with bilevel.inner(model, weighted(lam), g, solver="gd", lr=0.3, engine=ENGINES[engine], check=False) as loop:
            first.update(held(loop, model, how))
            for _ in range(3):
                loop.step(*batch)
            return loop.hypergrad(model)["0.bias"]

    check(run, expected)


@pytest.mark.parametrize("how", ["weights", "clones"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_proximal_term_of_h(engine, how):
    """iMAML, FedProx: h itself holds the start."""
    model, batch, lam, expected = hand("h")
    first = {}

    def h(m, *batch):
        return weighted(lam)(m, *batch) + 0.1 * distance(dict(m.named_parameters()), first)

    def g(m):
        return distance(dict(m.named_parameters()), first)

    def run():
        with bilevel.inner(model, h, g, solver="gd", lr=0.3, engine=ENGINES[engine], check=False) as loop:
            first.update(held(loop, model, how))
            for _ in range(3):
                loop.step(*batch)
            return loop.hypergrad(model)["0.bias"]

    check(run, expected)

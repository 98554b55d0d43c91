"""All weights adapted from a learnt start: against MAML written out, resumed, and as a command; on digits."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bilevel_recipes.few_shot import Episodes, Images
from bilevel_recipes.few_shot.__main__ import main
from bilevel_recipes.few_shot.maml import Learner, along, evaluate_all, meta_train_all, pull
from bilevel_recipes.few_shot.sources import load

STEPS = 3


def digits(part: str = "train") -> Images:
    return Images(load("digits").part(part))


def learner(rates: str = "fixed", seed: int = 0) -> Learner:
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Tanh())
    made = Learner(encoder, (1, 8, 8), 3, STEPS, 0.3, rates)
    nn.init.normal_(made.body[2].weight)  # zero makes the first gradient of the encoder zero
    return made


def batch(seed: int = 0) -> Any:
    return next(Episodes(digits(), 2, 3, 2, 4, seed))


def by_hand(learner: Learner, data: Any, weights: Sequence[float], first_order: bool) -> list[Tensor]:
    """MAML by torch.autograd alone."""
    names = [n for n, _ in learner.body.named_parameters()]
    start, rates = list(learner.body.parameters()), learner.rates
    total = torch.zeros(())
    for x, y, x_query, y_query in zip(*data[0], *data[1], strict=True):
        w = start
        for k, c in enumerate(weights):
            value = F.cross_entropy(functional_call(learner.body, dict(zip(names, w, strict=True)), (x,)), y)
            grads = torch.autograd.grad(value, w, create_graph=not first_order)
            row = rates[k].expand(len(names))
            w = [p - t * d for p, t, d in zip(w, row, grads, strict=True)]
            value = F.cross_entropy(
                functional_call(learner.body, dict(zip(names, w, strict=True)), (x_query,)), y_query
            )
            total = total + c * value
    wanted = [p for p in learner.parameters() if p.requires_grad]
    return list(torch.autograd.grad(total, wanted))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("weights", [[0.0, 0.0, 1.0], [0.2, 0.3, 0.5]], ids=["last", "along"])
@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("rates", ["fixed", "step", "tensor"])
def test_the_gradient_is_that_of_maml_written_out(rates: str, first_order: bool, weights: list[float]) -> None:
    start = learner(rates)
    (x, y), (x_query, y_query) = batch()
    data = (x.double(), y), (x_query.double(), y_query)
    before = copy.deepcopy(start.state_dict())
    pull(start, data, weights, first_order=first_order)
    expected = by_hand(start, data, weights, first_order)
    wanted = [p for p in start.parameters() if p.requires_grad]
    assert len(wanted) == 6 + (rates != "fixed")
    for p, grad in zip(wanted, expected, strict=True):
        assert p.grad is not None
        assert float((p.grad - grad).norm()) <= 1e-10 * max(1e-3, float(grad.norm()))
    assert all(torch.equal(v, before[k]) for k, v in start.state_dict().items())


def test_losses_along_go_over_to_the_last_one() -> None:
    assert along(0, 4, 100) == [0.25] * 4
    assert along(50, 4, 100) == [0.125] * 3 + [0.625]
    assert along(100, 4, 100) == along(5, 4, 0) == [0.0] * 3 + [1.0]
    assert all(sum(along(step, 5, 30)) == pytest.approx(1) for step in range(40))


def test_batchnorm_has_the_statistics_of_the_batch_and_no_others() -> None:
    start = learner()
    assert not list(start.buffers())
    x = torch.randn(6, 1, 8, 8)
    assert torch.equal(start.body.train()(x), start.body.eval()(x))
    assert not torch.allclose(start.body(x)[:3], start.body(x[:3]))


@pytest.mark.parametrize("options", [{}, {"first_order": True}, {"losses_along": 3, "solver": "bigsam-paper"}], ids=str)
def test_going_on_from_any_step_gives_the_same_bits(options: dict[str, Any]) -> None:
    options |= {"steps": STEPS, "lr": 0.3, "outer_steps": 4}
    states: list[dict[str, Any]] = []
    episodes = lambda: Episodes(digits(), 2, 3, 1, 4)
    keep = lambda now: states.append(copy.deepcopy(now.state()))
    whole = meta_train_all(learner("tensor"), episodes(), on_step=keep, **options).encoder.state_dict()
    for state in states[:-1]:
        rest = meta_train_all(learner("tensor", seed=5), episodes(), state=state, **options).encoder.state_dict()
        assert all(torch.equal(v, rest[k]) for k, v in whole.items())
    assert not torch.equal(whole["rates"], learner("tensor").rates)  # they are learnt


def test_it_is_judged_on_the_support_set_alone_and_left_as_it_was() -> None:
    start = learner("step")
    with torch.no_grad():
        start.rates[-1] = 0.0  # so that the last step and all beyond it change nothing
    before = copy.deepcopy(start.state_dict())
    found = evaluate_all(start, digits("test"), 3, 2, 5, steps=(1, 2, STEPS, STEPS + 4), episodes=8)
    assert list(found) == ["1", "2", "3", "7"]
    assert found["2"] == found["3"] == found["7"]
    assert found["1"].mean > 1 / 3
    assert all(torch.equal(v, before[k]) for k, v in start.state_dict().items())


def test_training_makes_new_classes_easier() -> None:
    train, test = digits(), digits("test")
    start = learner("tensor")
    nn.init.constant_(start.rates, 0.02)
    result = meta_train_all(start, Episodes(train, 4, 3, 1, 5), steps=STEPS, outer_steps=25, eta=1e-2, losses_along=25)
    before, after = (evaluate_all(one, test, 3, 1, 5, steps=(3,), episodes=60)["3"] for one in (start, result.encoder))
    assert after.mean - after.interval > before.mean + before.interval + 0.05


SMALL = ["--tasks", "2", "--outer-steps", "4", "--queries", "4", "--steps", "2", "--test-episodes", "4", "--ways", "3"]
SMALL += ["--curve-points", "2", "--curve-episodes", "2", "--test-steps", "1", "--quiet", "--threads", "1"]
ALL = [*SMALL, "--adapt", "all", "--solvers", "gd"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rates", "step", "--losses-along", "2", "--first-order", "--also", "3x2", "--out", str(tmp_path)]
    assert main([*ALL, *flags]) == 0
    label = "gd (K=2, t=0.4), all weights, first order, a rate for each step, losses along for 2"
    assert label in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text())
    run = next(r for r in found["runs"] if r["method"] == "gd")
    assert run["label"] == label
    assert set(run["scores"]) == set(run["also"]["3x2"]) == {"1", "2"}
    assert len(run["rates"]) == 2
    assert run["rates"] != [[0.4], [0.4]]
    assert "3-way 1-shot" in (tmp_path / "report.html").read_text()
    before = found["runs"]
    assert main([*ALL, *flags, "--resume"]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == before
    assert main([*ALL, *flags[2:], "--resume"]) == 2
    assert "losses_along" not in (error := capsys.readouterr().err)
    assert "rates: 'step' then, 'fixed' now" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*SMALL, "--first-order"], "--first-order is for --adapt all; leave it out"),
        ([*SMALL, "--rates", "step"], "--rates is for --adapt all"),
        ([*SMALL, "--losses-along", "3"], "--losses-along is for --adapt all"),
        ([*ALL, "--features", "raw"], "--features is for --adapt head"),
        ([*ALL, "--batchnorm", "task"], "--batchnorm is for --adapt head"),
        ([*ALL, "--chunk", "5"], "--chunk is for --adapt head"),
        ([*ALL, "--also", "4x1"], "--also 4x1 and --ways 3: with --adapt all the head is a part of the start"),
        ([*ALL, "--precision", "bf16"], "--adapt all runs in float32"),
        ([*ALL, "--solvers", "bigsam-split"], "bigsam-split is for --adapt head"),
        ([*ALL, "--steps", "1", "--losses-along", "3"], "with --steps 1 there is one loss"),
    ],
)
def test_flags_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*flags, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()

"""One run of a function: it ends at the first hypergradient, and shows the readings and the end."""

import pytest
import torch
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.check.runs import NotDouble, Run, Stop
from bilevel_plugin.check.watching import watching


def loop_of(model, lam, after):
    h = lambda m, x: lam * m(x).square().mean()
    with bilevel.inner(model, h, lambda m, x: m(x).mean(), solver="gd", lr=0.1) as loop:
        loop.run(3, torch.ones(2, 2), outer=(torch.ones(2, 2),))
        loop.hypergrad(lam)
        after.append("went on")


@pytest.mark.parametrize("differentiate", [True, False])
def test_a_run_ends_at_its_first_hypergradient(differentiate):
    model, lam, after = nn.Linear(2, 1), torch.tensor(1.0, requires_grad=True), []
    before = model.weight.detach().clone()
    run = Run([lam], differentiate, False)
    with watching(run), pytest.raises(Stop):
        loop_of(model, lam, after)
    assert after == []
    assert len(run.readings) == 4  # three steps, and the outer batch
    assert run.end.keys() == model.state_dict().keys()
    assert not torch.equal(run.end["weight"], before)
    assert torch.equal(model.weight, before)
    assert len(run.grads) == differentiate
    assert run.value is not None
    assert run.unused == set()


def test_a_model_in_float32_is_told():
    lam = torch.tensor(1.0, requires_grad=True)
    with watching(Run([lam], True, True)), pytest.raises(NotDouble, match="the model Linear"):
        loop_of(nn.Linear(2, 1), lam, [])

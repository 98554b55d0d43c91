"""The whole path on the meta device, where mixing host and device, or reading a value, raises."""

import pytest
import torch
from problems import weighted
from torch import nn

import bilevel_plugin as bilevel


@pytest.mark.parametrize("tasks", [None, 3])
@pytest.mark.parametrize("optimizer", [None, "SGD", "Adam"])
@pytest.mark.parametrize(
    "engine",
    [
        "reverse",
        bilevel.Reverse("sqrt"),
        bilevel.Reverse(truncate=2),
        bilevel.Reverse(memory="1GiB"),
        "unroll",
        "forward",
    ],
)
def test_no_step_reads_the_device(engine, optimizer, tasks):
    lead = () if tasks is None else (tasks,)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2))
        x, y = torch.randn(*lead, 5, 3), torch.zeros(*lead, 5, dtype=torch.long)
        lam = torch.zeros(5, requires_grad=True)
        t = torch.tensor(0.1, requires_grad=True)

    h, g = weighted(lam)
    options = {"solver": bilevel.BiGSAM(t)}
    if optimizer:
        options["optimizer"] = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    with bilevel.inner(model, h, g, hypergrad=engine, tasks=tasks, **options) as loop:
        loop.run(3, x, y, outer=(x, y))
        grads = loop.hypergrad([lam, t])
        loop.backward()
        assert loop.value.device.type == "meta"
        if tasks is None:
            loop.commit_()
    assert [g.shape for g in grads] == [(5,), ()]
    assert all(g.device.type == "meta" for g in (*grads, lam.grad, t.grad))

"""The whole path on the meta device, where mixing host and device, or reading a value, raises."""

import pytest
import torch
from one_device import OneDevice
from problems import weighted
from real_models import Attend, Sequence
from torch import nn

import bilevel_plugin as bilevel


def test_the_watch_sees_an_index_of_the_host():
    with OneDevice(), pytest.raises(AssertionError, match="mixes meta"):
        torch.zeros(3, device="meta")[torch.arange(2)]


@pytest.mark.parametrize("tasks", [None, 3])
@pytest.mark.parametrize("optimizer", [None, "SGD", "Adam"])
@pytest.mark.parametrize(
    "engine",
    [
        "reverse",
        bilevel.Reverse("sqrt"),
        bilevel.Reverse(truncate=2),
        bilevel.Reverse(store="host"),
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
    with OneDevice(), bilevel.inner(model, h, g, engine=engine, tasks=tasks, **options) as loop:
        loop.run(3, x, y, outer=(x, y))
        grads = loop.hypergrad([lam, t])
        loop.backward()
        assert loop.value.device.type == "meta"
        if tasks is None:
            loop.commit_()
    assert [g.shape for g in grads] == [(5,), ()]
    assert all(g.device.type == "meta" for g in (*grads, lam.grad, t.grad))


@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward"])
@pytest.mark.parametrize(
    "layers",
    [
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)),
        lambda: Sequence(nn.LSTM(8, 8, batch_first=True)),
        lambda: Sequence(Attend()),
    ],
    ids=["convolution", "LSTM", "attention"],
)
def test_no_layer_reads_the_device(layers, engine):
    with torch.device("meta"):
        model, lam = layers(), torch.zeros(4, requires_grad=True)
        x = torch.zeros(4, 3, dtype=torch.long) if isinstance(model, Sequence) else torch.zeros(4, 1, 5, 5)
        y = torch.zeros(4, dtype=torch.long)
    h, g = weighted(lam)
    with OneDevice(), bilevel.inner(model, h, g, engine=engine) as loop:
        loop.run(2, x, y, outer=(x, y))
        assert loop.hypergrad(lam).shape == (4,)

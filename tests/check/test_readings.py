"""What a step reads: every tensor and number that could carry the weights, and nothing with a graph."""

import torch
from torch import nn

from bilevel_plugin.check.readings import RANDOM, Reader, changed


def test_what_is_read():
    lam, target, table = torch.ones(2, requires_grad=True), nn.Linear(2, 1), torch.zeros(3)
    h = lambda model, x: (model(x) * lam * table.sum() * factor - target(x)).sum()
    factor = 2.0
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    reader = Reader({"h": h}, [optimizer], {id(lam)})
    first = reader.read((torch.ones(2), {"weight": 3.0}))
    again = reader.read((torch.ones(2), {"weight": 3.0}))
    assert changed([first], [again]) == {}
    expected = {
        RANDOM, "the batch[0]", "the batch[1]['weight']", "table (read by h)", "factor (read by h)",
        "target.weight (read by h)", "target.bias (read by h)", "the option 'lr' of optimizer 0, group 0",
    }  # fmt: skip
    assert expected <= first.keys()
    assert not any("lam" in name for name in first)
    table[0], optimizer.param_groups[0]["lr"] = 1e-9, 0.2
    with torch.no_grad():
        target.weight.add_(1e-7)
    torch.rand(1)
    now = reader.read((2 * torch.ones(2) * lam, {"weight": 4.0}))
    assert changed([first, first], [first, now]) == dict.fromkeys(
        [RANDOM, "the option 'lr' of optimizer 0, group 0", "the batch[1]['weight']", "table (read by h)",
         "target.weight (read by h)"], 2)  # fmt: skip


def test_permutations_and_swapped_rows_differ():
    reader = Reader({}, [], set())
    x = torch.arange(12.0).view(4, 3)
    for y in (x.flip(0), x.flip(1), x[[1, 0, 2, 3]]):
        assert "the batch[0]" in changed([reader.read((x,))], [reader.read((y,))])

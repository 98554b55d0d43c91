"""Where iterates are kept: their size and their layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bilevel_plugin as bilevel
from bilevel_plugin.engine import reverse
from bilevel_plugin.engine.store import Store


@pytest.mark.parametrize("checkpoint", [1, "sqrt"])
def test_stored_iterates_take_their_own_size(checkpoint, monkeypatch):
    """Rows of a few buffers, used again when an iterate is dropped: at most 1.25 times the bytes of the iterates."""
    stores, kept = [], []

    class Watched(Store):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            stores.append(self)

        def keep(self, z):
            kept.append(super().keep(z))
            return kept[-1]

    monkeypatch.setattr(reverse, "Store", Watched)
    model = nn.ParameterDict({"w": torch.zeros(100_003)})
    h = lambda m: m["w"].square().sum()
    with bilevel.inner(model, h, h, solver="gd", lr=0.1, engine=bilevel.Reverse(checkpoint)) as loop:
        loop.run(100)
        (store,), saved = stores, loop.plan.states
        assert store.in_memory == saved - 1  # w_0 is not copied
        assert store.rows <= 1.25 * max(saved, 17)  # 17: held at most, before the checkpoints were widened
        assert all(x.untyped_storage().nbytes() <= 32 * 2**20 for z in kept for x in z.values())


def test_stored_iterates_keep_their_layout():
    """channels_last stays so, since other strides would choose other kernels in the replay."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    z = {"a": x, "b": torch.randn(3).expand(2, 3), "c": torch.randn(4, 3).T, "d": torch.zeros(0), "e": torch.ones(())}
    store = Store()
    kept = store.keep(z)
    for n, original in z.items():
        assert torch.equal(kept[n], original)
        assert not kept[n].requires_grad
    assert kept["a"].stride() == x.stride()
    assert kept["c"].stride() == z["c"].stride()
    store.drop(kept)
    again = store.keep(z)
    assert again["a"].data_ptr() == kept["a"].data_ptr()


def test_a_state_may_be_replaced_by_its_own_tensors_in_another_order():
    """As in an update that hands a moment on: each is read before it is written over."""
    store, one, other = Store(), torch.randn(3), torch.randn(3)
    kept = store.keep({"a": one, "b": other})
    swapped = store.replace(kept, {"a": kept["b"], "b": kept["a"]})
    assert torch.equal(swapped["a"], other)
    assert torch.equal(swapped["b"], one)
    more = store.replace(swapped, {"a": one, "c": swapped["a"]})  # other names: another row
    assert torch.equal(more["c"], other)
    assert store.in_memory == 1

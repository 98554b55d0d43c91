"""The code of differences, and the log that keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilevel_plugin.engine.residuals import Log, decode, encode
from bilevel_plugin.engine.store import Store


@given(
    seed=st.integers(0, 1000),
    count=st.integers(0, 5000),
    spread=st.sampled_from([0.1, 0.5, 1.0, 5.0, 100.0, 1e9]),
    dtype=st.sampled_from([torch.int16, torch.int32, torch.int64]),
    extremes=st.booleans(),
)
def test_any_integers_come_out_of_their_code(
    seed: int, count: int, spread: float, dtype: torch.dtype, extremes: bool
) -> None:
    torch.manual_seed(seed)
    info = torch.iinfo(dtype)
    x = (torch.randn(count, dtype=torch.float64) * spread).clamp(info.min / 2, info.max / 2).to(dtype)
    for i, value in enumerate((info.min, info.max, -128, 127, 126, -127, 128, -8, 7, 8, -2, 1, 2)):
        if extremes and i < count:
            x[i] = value
    assert torch.equal(decode(encode(x), count, dtype), x)


def test_the_code_is_as_short_as_the_entropy() -> None:
    torch.manual_seed(0)
    for spread in (0.5, 1.0, 3.0):
        x = (torch.randn(200_000) * spread).round().to(torch.int32)
        share = torch.bincount((x - x.min()).long()).double() / len(x)
        entropy = float(-(share[share > 0] * share[share > 0].log2()).sum())
        assert 8 * len(encode(x)) / len(x) < 1.05 * entropy


@pytest.mark.parametrize("folder", [False, True])
def test_the_log_is_read_from_any_place(folder: bool, tmp_path: Path) -> None:
    """Also across chunks, and after its beginning was dropped."""
    torch.manual_seed(0)
    log = Log(Store(place=tmp_path if folder else "device"))
    data = [bytes(torch.randint(256, (n,), dtype=torch.uint8).tolist()) for n in (10, 70_000, 0, 200_000, 3)]
    places = [log.size, *(log.size for part in data if log.append(part) + 1)]
    for part, begin in zip(data, places, strict=False):
        assert log.read(begin, begin + len(part)) == part
    before = log.nbytes
    log.forget_before(places[3])
    assert log.nbytes == before - places[3]
    assert log.read(places[3], places[4]) == data[3]

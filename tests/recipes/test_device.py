"""Both recipes on the meta device, where reading a value raises, and in bf16 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from one_device import OneDevice
from torch import Tensor
from torch.utils._pytree import tree_leaves

import bilevel_plugin as bilevel
from bilevel_recipes import device, runs
from bilevel_recipes.data_cleaning import clean
from bilevel_recipes.few_shot import Episodes, Images, meta_train
from bilevel_recipes.few_shot.sources import Part
from bilevel_recipes.models import build, build_encoder

META = torch.device("meta")


def images(n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n)
    y = torch.arange(n) % 3
    return torch.randn(n, 1, 8, 8, generator=draw) + y[:, None, None, None], y


@pytest.mark.parametrize(
    "options",
    [{}, {"solver": "gd"}, {"batch_size": 4, "engine": bilevel.Reverse("sqrt", store="host")}],
    ids=str,
)  # fmt: skip
def test_cleaning_reads_nothing_off_the_device(options: dict[str, Any]) -> None:
    train, validation = (tuple(t.to(META) for t in images(n)) for n in (13, 11))
    model = build("cnn", (1, 8, 8), 3, 0).to(META, memory_format=torch.channels_last)
    saved: list[dict[str, Any]] = []
    how = {"steps": 3, "outer_steps": 2, "engine": bilevel.Reverse(memory="1GiB"), **options}
    with OneDevice():
        result = clean(model, train, validation, on_step=lambda now: saved.append(copy.deepcopy(now)), **how)
        clean(model, train, validation, state=saved[0], **how)  # and going on with it
    assert result.lam.shape == (13,)
    assert {t.device for t in (result.lam, saved[-1]["lam"])} == {META}


def episodes(where: str) -> Episodes:
    y = np.repeat(np.arange(4), 6)
    x = np.random.default_rng(0).integers(0, 256, (24, 16, 16), np.uint8)
    return Episodes(Images(Part(x, y), device=where), tasks=2, ways=3, shots=1, queries=2)


@pytest.mark.parametrize("solver", ["gd", "bigsam", "bigsam-split"])
@pytest.mark.parametrize("engine", ["unroll", bilevel.Reverse(store="host")], ids=["unroll", "reverse"])
@pytest.mark.parametrize("batchnorm", ["running", "task"])
def test_meta_training_reads_nothing_off_the_device(solver: str, engine: Any, batchnorm: str) -> None:
    encoder = build_encoder("conv4", (1, 16, 16), 0).to(META)
    with OneDevice():
        result = meta_train(
            encoder, episodes("meta"), ways=3, solver=solver, engine=engine, batchnorm=batchnorm, outer_steps=2,
        )  # fmt: skip
    assert {p.device for p in result.encoder.parameters()} == {META}


def float32(*states: Any) -> bool:
    return {x.dtype for x in tree_leaves(states) if isinstance(x, Tensor) and x.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_cleaning_in_bf16_is_near_float32_and_keeps_float32_masters(layout: Any) -> None:
    train, validation = images(30), images(20)
    model = build("cnn", (1, 8, 8), 3, 0).to(memory_format=layout)
    saved: list[dict[str, Any]] = []
    how: dict[str, Any] = {"steps": 4, "outer_steps": 2, "lr": 0.1}
    exact = clean(model, train, validation, **how)
    rough = clean(model, train, validation, bf16=True, on_step=saved.append, **how)
    assert float32(saved[-1])
    assert not torch.equal(exact.lam, rough.lam)  # it was on
    assert abs(exact.history[-1]["g"] - rough.history[-1]["g"]) < 0.02 * exact.history[-1]["g"]
    assert (exact.weights - rough.weights).abs().mean() < 0.05


def test_meta_training_in_bf16_is_near_float32_and_keeps_float32_masters() -> None:
    encoder = build_encoder("conv4", (1, 16, 16), 0)
    saved: list[Any] = []
    results = [
        meta_train(
            encoder, episodes("cpu"), ways=3, outer_steps=3, bf16=bf16, on_step=lambda m: saved.append(m.state())
        )
        for bf16 in (False, True)
    ]
    assert float32(saved[-1])
    start, exact, rough = (torch.cat([p.flatten() for p in e.parameters()]) for e in (
        encoder, results[0].encoder, results[1].encoder))  # fmt: skip
    assert rough.isfinite().all()
    assert not torch.equal(exact, rough)
    assert torch.cosine_similarity(exact - start, rough - start, 0) > 0.8  # Adam's steps are near their signs


def test_copies_to_a_gpu_are_pinned_and_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: calls.append("pinned") or x)
    monkeypatch.setattr(Tensor, "to", lambda x, where, **how: calls.append((where, how)) or x)
    device.place(torch.zeros(2), torch.device("cuda"))
    assert calls == ["pinned", (torch.device("cuda"), {"non_blocking": True})]


def test_tf32_is_off_for_products_and_convolutions_unless_asked_for() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for on in (True, False):
            runs.set_up("cpu", None, on)
            assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (on, on)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]

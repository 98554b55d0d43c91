"""Episodes, meta_train() and evaluate(), on digits or on images made here."""

from __future__ import annotations

import copy
import math
import platform
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import bilevel_plugin as bilevel
from bilevel_recipes import malloc
from bilevel_recipes.few_shot import Episodes, Images, evaluate, meta_train
from bilevel_recipes.few_shot.evaluate import Views, encoded, nearest_mean, score
from bilevel_recipes.few_shot.sources import Part, load
from bilevel_recipes.few_shot.train import SOLVERS, annealed, encode_task, halves
from bilevel_recipes.models import ENCODERS, build_encoder


def numbered(counts: list[int], size: int = 3) -> Images:
    """Images that say who they are: the corner pixel is the class, the next one the drawing, the rest is 0."""
    y = np.repeat(np.arange(len(counts)), counts)
    x = np.zeros((len(y), size, size), np.uint8)
    x[:, 0, 0], x[:, 0, 1] = y + 1, 1 + np.concatenate([np.arange(n) for n in counts])
    mixed = np.random.default_rng(0).permutation(len(y))
    return Images(Part(x[mixed], y[mixed]), scale=(torch.zeros(1), torch.ones(1)))


def who(image: Tensor) -> tuple[int, int, int]:
    """Turn, class and drawing of one of those images."""
    for turn in range(4):
        back = image[0].rot90(-turn, (0, 1))
        if back[0, 0] > 0 and back[0, 1] > 0:
            return turn, int(back[0, 0]), int(back[0, 1])
    raise AssertionError("an image that is none of the set")


@given(
    st.lists(st.integers(4, 9), min_size=2, max_size=5), st.integers(2, 6), st.integers(1, 2), st.integers(1, 2),
    st.integers(0, 2**31),
)  # fmt: skip
def test_a_task_has_different_classes_and_never_an_image_twice(
    counts: list[int], ways: int, shots: int, queries: int, seed: int
) -> None:
    images = numbered(counts)
    episodes = Episodes(images, 3, ways, shots, queries, seed)
    (x, y), (x_query, y_query) = next(episodes)
    assert x.shape == (3, shots * ways, 1, 3, 3)
    assert x_query.shape == (3, queries * ways, 1, 3, 3)
    for task in range(3):
        support = [(int(c), who(i)) for i, c in zip(x[task], y[task], strict=True)]
        query = [(int(c), who(i)) for i, c in zip(x_query[task], y_query[task], strict=True)]
        kinds = {c: {found[:2] for label, found in support + query if label == c} for c in range(ways)}
        assert all(len(kind) == 1 for kind in kinds.values())  # a label is one class, turned one way
        assert len(set.union(*kinds.values())) == ways  # and no two labels are the same
        assert len({found for _, found in support + query}) == ways * (shots + queries)  # support and query differ
    again = Episodes(images, 3, ways, shots, queries, seed)
    assert torch.equal(next(again)[0][0], x)
    state = again.state_dict()
    later = next(again)
    again.load_state_dict(state)
    assert torch.equal(next(again)[1][0], later[1][0])


def test_every_class_turn_and_image_is_drawn() -> None:
    images = numbered([3, 5, 4])
    items = images.draw(400, 2, 2, torch.Generator().manual_seed(0))
    counts = torch.bincount(items.flatten(), minlength=images.items)
    assert images.items == 12 * 4
    assert images.classes == 12
    assert (counts > 0).all()
    per_class = counts.reshape(4, 12).split([3, 5, 4], 1)
    means = torch.stack([part.float().sum(1) for part in per_class])
    assert (means.std() / means.mean()) < 0.2  # classes alike, whatever their size


def test_turns_are_those_of_rot90() -> None:
    x = np.random.default_rng(0).integers(0, 255, (2, 5, 5, 3)).astype(np.uint8)
    images = Images(Part(x, np.array([0, 1])))
    plain = images[torch.tensor([0, 1])]
    assert torch.equal(images[torch.arange(8)], torch.cat([plain.rot90(r, (2, 3)) for r in range(4)]))
    assert torch.allclose(plain.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(plain.std((0, 2, 3)), torch.ones(3), atol=1e-2)
    oblong = Part(x[:, :4], np.array([0, 1]))
    with pytest.raises(ValueError, match="turns=1"):
        Images(oblong)
    assert Images(oblong, turns=1).shape == (3, 4, 5)
    black = Images(Part(np.zeros((2, 3, 3), np.uint8), np.array([0, 1])))
    assert torch.equal(black[torch.arange(2)], torch.zeros(2, 1, 3, 3))  # of no deviation


def test_impossible_tasks_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"9 ways.*8 classes"):
        Episodes(numbered([5, 5]), 1, 9, 1, 1)
    with pytest.raises(ValueError, match="smallest of 4 images"):
        Episodes(numbered([5, 4]), 1, 2, 1, 4)


# --- training --------------------------------------------------------------------------------------------------


def smooth(features: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, features), nn.Tanh()).double()


def tiny(tasks: int = 3, ways: int = 3, shots: int = 2, queries: int = 4) -> Episodes:
    part = load("digits").part("train")
    mean, deviation = Images(part).scale
    return Episodes(Images(part, scale=(mean.double(), deviation.double())), tasks, ways, shots, queries)


def by_hand(encoder: nn.Module, batch: Any, solver: str, steps: int, t: float, s: float, features: str) -> Tensor:
    """Σ over tasks of g(w_K), with a Python loop over tasks and plain autograd: what the recipe must equal."""
    (x, y), (x_query, y_query) = batch
    total = torch.zeros(())
    for task in range(len(x)):
        f, q = encoder(x[task]), encoder(x_query[task])
        mean = f.mean(0) if features != "raw" else 0
        f, q = f - mean, q - mean
        if features == "sphere":
            f, q = (5 * part / part.norm(dim=1, keepdim=True) for part in (f, q))
        labels = y_query[task]
        first = torch.arange(len(labels))
        second = first
        if SOLVERS[solver].split:
            order = labels.argsort(stable=True)
            first, second = order[::2], order[1::2]
        w, b = torch.zeros(3, 6, dtype=f.dtype), torch.zeros(3, dtype=f.dtype)
        for k in range(1, steps + 1):
            w, b = (p if p.requires_grad else p.requires_grad_() for p in (w, b))
            a = 1.0 if solver == "gd" else k**-0.25 if "paper" in solver else 1 - (k + 1) ** -0.5
            h = F.cross_entropy(f @ w.T + b, y[task])
            g = F.cross_entropy(q[first] @ w.T + b, labels[first])
            dw, db = torch.autograd.grad(t * a * h + s * (1 - a) * g, (w, b), create_graph=True)
            w, b = w - dw, b - db
        total = total + F.cross_entropy(q[second] @ w.T + b, labels[second])
    return total


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("engine", "features"), [("unroll", "sphere"), ("reverse", "raw"), ("unroll", "centred")])
def test_one_outer_step_is_that_of_a_loop_over_tasks(solver: str, engine: str, features: str) -> None:
    """Against a plain loop: the gradient is read off Adam's first moment, (1 − β₁)·∇."""
    encoder, states = smooth(), list[dict[str, Any]]()
    options: dict[str, Any] = {
        "steps": 4,
        "lr": 0.7,
        "s": 0.4,
        "outer_steps": 1,
        "engine": engine,
        "chunk": 7,
        "features": features,
    }
    result = meta_train(
        encoder, tiny(), ways=3, solver=solver, on_step=lambda now: states.append(now.state()), **options
    )
    by_hand(encoder, next(tiny()), solver, 4, 0.7, 0.4, features).backward()
    for i, p in enumerate(encoder.parameters()):
        assert p.grad is not None
        assert torch.allclose(states[0]["adam"]["state"][i]["exp_avg"], 0.1 * p.grad, rtol=1e-6, atol=1e-9)
    assert all(p.requires_grad for p in result.encoder.parameters())


def test_steps_on_g_change_the_gradient_and_every_thins_them_out() -> None:
    def moved(**options: Any) -> Tensor:
        how = {"steps": 4, "lr": 0.5, "outer_steps": 1, **options}
        return next(meta_train(smooth(), tiny(), ways=3, **how).encoder.parameters()).detach()

    with_g, rarely, never = (
        moved(solver="bigsam-paper"),
        moved(solver="bigsam-paper", every=3),
        moved(solver="bigsam", every=9),
    )
    assert not torch.equal(with_g, rarely)
    assert torch.equal(never, moved(solver="gd"))
    assert torch.equal(moved(solver=bilevel.BiGSAM(0.5)), with_g)


def test_annealing_goes_from_the_schedule_to_plain_descent() -> None:
    paper = bilevel.power(0.25)
    assert [annealed(0, paper, 80)(k) for k in (1, 2, 16)] == pytest.approx([1, 2**-0.25, 0.5])
    assert annealed(40, paper, 80)(16) == pytest.approx(0.75)
    assert annealed(80, paper, 80)(16) == annealed(900, paper)(16) == 1
    assert [annealed(0)(k) for k in (3, 8)] == pytest.approx([1 - 4**-0.5, 1 - 9**-0.5])


def test_halves_share_no_query_and_every_class() -> None:
    y = torch.tensor([[2, 0, 1, 0, 2, 1, 1, 1, 0, 0, 2, 2]]).expand(2, -1)
    f = torch.arange(24.0).reshape(2, 12, 1)
    (f1, y1), (f2, y2) = halves(f, y)
    assert sorted([*f1[1, :, 0].tolist(), *f2[1, :, 0].tolist()]) == f[1, :, 0].tolist()
    assert y1[0].bincount().tolist() == y2[0].bincount().tolist() == [2, 2, 2]
    assert all(y[0, int(i)] == c for i, c in zip(f1[0, :, 0], y1[0], strict=True))


@pytest.mark.parametrize("batchnorm", ["running", "task"])
def test_going_on_from_any_step_gives_the_same_bits(batchnorm: str) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
    options: dict[str, Any] = {"ways": 3, "solver": "bigsam", "outer_steps": 4, "batchnorm": batchnorm, "chunk": 20}

    def episodes() -> Episodes:
        return Episodes(Images(load("digits").part("train")), 3, 3, 1, 4)

    states: list[dict[str, Any]] = []
    whole = meta_train(encoder, episodes(), on_step=lambda now: states.append(copy.deepcopy(now.state())), **options)
    before = torch.get_rng_state()
    for state in states[:-1]:
        rest = meta_train(encoder, episodes(), state=state, **options).encoder.state_dict()
        assert all(torch.equal(v, rest[k]) for k, v in whole.encoder.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


def test_chunks_change_nothing_without_batchnorm_and_are_batchnorms_batch() -> None:
    x, query = torch.randn(4, 3, 1, 8, 8), torch.randn(4, 6, 1, 8, 8)
    plain = smooth().float()
    whole, parts = (encode_task(plain, x, query, chunk=n) for n in (1000, 5))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, parts, strict=True))
    norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, affine=False)).train()
    f = torch.cat(encode_task(norm, x, query, "task"), 1)
    assert torch.allclose(f.mean(1), torch.zeros(4, 64), atol=1e-5)  # of each task
    with pytest.raises(ValueError, match="'running' or 'task'"):
        encode_task(norm, x, query, "batch")


def test_an_unknown_solver_lists_the_known() -> None:
    with pytest.raises(ValueError, match="gd, bigsam"):
        meta_train(smooth(), tiny(), ways=3, solver="adam")


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    first = build_encoder(name, (3, 16, 16), 0)
    torch.manual_seed(6)
    second = build_encoder(name, (3, 16, 16), 0)
    assert first(torch.randn(2, 3, 16, 16)).ndim == 2
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert build_encoder("conv4", (1, 28, 28), 0)(torch.randn(2, 1, 28, 28)).shape == (2, 256)


def test_encoders_name_what_they_need() -> None:
    with pytest.raises(ValueError, match="use conv4"):
        build_encoder("conv4-pool", (1, 8, 8), 0)
    with pytest.raises(ValueError, match="conv4, conv4-pool, resnet18"):
        build_encoder("vit", (1, 8, 8), 0)
    assert build_encoder("resnet18", (1, 32, 32), 0)(torch.randn(2, 1, 32, 32)).shape == (2, 512)


# --- evaluation ------------------------------------------------------------------------------------------------


def test_training_makes_new_classes_easier() -> None:
    train = Images(load("digits").part("train"))
    test = Images(load("digits").part("test"), scale=train.scale)
    encoder = build_encoder("conv4", train.shape, 0)
    result = meta_train(encoder, Episodes(train, 8, 5, 1, 5), ways=5, solver="bigsam", outer_steps=12)
    how: dict[str, Any] = {"lr": 0.1, "steps": (1, 5), "episodes": 150, "leaky": 5}
    before, after = (evaluate(e, test, 5, 1, 5, **how) for e in (encoder, result.encoder))
    assert after["5"].mean > before["5"].mean + 0.05
    assert after["5"].mean > 0.55
    assert after["leaky"].mean > after["5"].mean
    assert after["nearest mean"].mean > 0.5
    assert 0.005 < after["5"].interval < 0.05


def test_classes_that_are_far_apart_are_told_apart_and_noise_is_not() -> None:
    y = np.repeat(np.arange(8), 10)
    bars = np.zeros((80, 8, 8), np.uint8)
    bars[np.arange(80), 0, y] = 200
    images = Images(Part(bars, y), turns=1)
    found = evaluate(nn.Flatten(), images, 5, 2, 3, lr=1.0, steps=(3,), episodes=50)
    assert found["3"].mean == found["nearest mean"].mean == 1
    noise = Images(Part(np.random.default_rng(0).integers(0, 255, (80, 8, 8)).astype(np.uint8), y), turns=1)
    found = evaluate(nn.Flatten(), noise, 5, 2, 3, lr=0.1, steps=(3,), leaky=3, episodes=300)
    assert abs(found["3"].mean - 0.2) < 0.03
    assert found["leaky"].mean > 0.33  # which is why it is not the figure to look at


def test_an_image_is_judged_alone_unless_the_statistics_are_the_tasks() -> None:
    images = Images(load("digits").part("test"))
    encoder = build_encoder("conv4", images.shape, 0)
    items = images.draw(2, 5, 3, torch.Generator().manual_seed(0))
    before = copy.deepcopy(encoder.state_dict())
    other = items.clone()
    other[:, 2] = other[:, 2].flip(-1)
    same, moved = (
        torch.equal(encoded(encoder, images, items, how, 7)[:, :2], encoded(encoder, images, other, how, 7)[:, :2])
        for how in ("running", "task")
    )
    assert same
    assert not moved
    other[:, 2] = images.draw(2, 5, 1, torch.Generator().manual_seed(9))[:, 0]
    a, b = (encoded(encoder, images, i, "task", 7)[:, :2] for i in (items, other))
    assert not torch.allclose(a, b)
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())
    assert encoder.training


def test_the_interval_is_that_of_the_mean() -> None:
    found = score(torch.tensor([0.0, 1.0] * 50))
    assert found.mean == 0.5
    assert found.interval == pytest.approx(1.96 * 0.5025 / 10, rel=1e-3)
    assert math.isnan(score(torch.tensor([0.5])).interval)  # one task has none
    assert nearest_mean(torch.tensor([[[0.0], [3.0]]]), torch.tensor([[[1.0], [2.0]]])).tolist() == [[0, 1]]


def test_malloc_keeps_memory_where_it_is_glibcs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert malloc.keep_memory() is (platform.libc_ver()[0] == "glibc")
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())  # a C library without mallopt
    assert malloc.keep_memory() is False
    monkeypatch.setattr(malloc.sys, "platform", "darwin")
    assert malloc.keep_memory() is False


def test_views_are_the_mean_of_mirrored_and_moved_images() -> None:
    encoder = smooth().eval()
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(Views(encoder, ())(x), encoder(x))
        assert torch.allclose(Views(encoder, ("mirror",))(x), (encoder(x) + encoder(x.flip(-1))) / 2)
        moved = [x]
        moved += [torch.cat([x[..., 1:], x[..., -1:]], -1), torch.cat([x[..., :1], x[..., :-1]], -1)]
        moved += [torch.cat([x[..., 1:, :], x[..., -1:, :]], -2), torch.cat([x[..., :1, :], x[..., :-1, :]], -2)]
        assert torch.allclose(Views(encoder, ("shift",))(x), sum(map(encoder, moved)) / 5)
        both = [*moved, *(part.flip(-1) for part in moved)]
        assert torch.allclose(Views(encoder, ("shift", "mirror"))(x), sum(map(encoder, both)) / 10)
    ramp = torch.arange(60.0).expand(1, 1, 84, 60)  # moved by 60/28, two pixels; the border is repeated
    found = Views(nn.Flatten(), ("shift",))(ramp).view(84, 60)
    middle, left = ramp[0, 0], torch.tensor([0.0, 1.0])
    assert torch.allclose(found[:, 2:-2], middle[:, 2:-2])
    assert torch.allclose(found[:, :2], (3 * left + (left + 2) + 0) / 5)

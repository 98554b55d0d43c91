"""Task sets of others feed the few-shot recipe: those of learn2learn, where it is installed, and any function."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.runners import importable, quietly
from bilevel_recipes.few_shot import Episodes, Images, collect_tasks, evaluate, evaluate_tasks, meta_train
from bilevel_recipes.few_shot.sources import load
from bilevel_recipes.models import build_encoder

WAYS, SHOTS, QUERIES, PER_CLASS = 5, 1, 5, 20


def task_set(classes: int, first: int, ways: int = WAYS) -> Any:
    """learn2learn's, on samples in memory: a class is a point in 4 of 30 dimensions, and noise is in all of them.

    The last column numbers the samples. Labels begin at `first`, so that those of a task have to be counted anew.
    """
    if (why := importable("learn2learn")) is not True:
        pytest.skip(f"learn2learn is not installed: {why}")
    l2l = quietly("learn2learn")
    y = torch.arange(classes).repeat_interleave(PER_CLASS)
    x = torch.randn(len(y), 31)
    x[:, :4] += 3 * torch.randn(classes, 4)[y]
    x[:, 30] = torch.arange(len(y))
    data = l2l.data.MetaDataset(TensorDataset(x, y + first))
    steps = l2l.data.transforms
    return l2l.data.TaskDataset(data, [
        steps.NWays(data, ways), steps.KShots(data, SHOTS + QUERIES), steps.LoadData(data), steps.RemapLabels(data),
        steps.ConsecutiveLabels(data),
    ])  # fmt: skip


class Encoder(nn.Module):
    """Linear, and blind to the number of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, :30])


@pytest.fixture(autouse=True)
def _its_draws() -> None:
    random.seed(0)  # learn2learn draws with Python's own generator


@pytest.mark.filterwarnings("ignore")  # learn2learn's own
def test_tasks_of_learn2learn() -> None:
    """Five classes of one label each, and no sample in both sets."""
    tasks = task_set(classes=12, first=7)
    for (x, y), (x_query, y_query) in islice(collect_tasks(tasks.sample, tasks=3, ways=WAYS, shots=SHOTS), 10):
        assert x.shape == (3, SHOTS * WAYS, 31)
        assert x_query.shape == (3, QUERIES * WAYS, 31)
        for task in range(3):
            assert torch.bincount(y[task]).tolist() == [SHOTS] * WAYS
            assert torch.bincount(y_query[task]).tolist() == [QUERIES] * WAYS
            rows, labels = torch.cat([x[task], x_query[task]])[:, 30].long(), torch.cat([y[task], y_query[task]])
            assert len(rows.unique()) == len(rows)
            assert len({(int(c), int(r) // PER_CLASS) for c, r in zip(labels, rows, strict=True)}) == WAYS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("solver", ["gd", "bigsam"])
def test_an_encoder_learns_from_tasks_of_learn2learn(solver: str) -> None:
    """What it learns on some classes (which 4 dimensions count) tells others apart."""
    train, test = task_set(classes=40, first=0), task_set(classes=20, first=100)
    batches = collect_tasks(train.sample, tasks=8, ways=WAYS, shots=SHOTS)
    encoder = Encoder()
    result = meta_train(encoder, batches, ways=WAYS, solver=solver, outer_steps=60, eta=1e-2)

    def accuracy(encoder: nn.Module) -> float:
        batches = collect_tasks(test.sample, tasks=50, ways=WAYS, shots=SHOTS)
        return evaluate_tasks(encoder, batches, WAYS, lr=0.4, episodes=200)["5"].mean

    before, after = accuracy(encoder), accuracy(result.encoder)
    assert after > 1 / WAYS + 0.3
    assert after > before + 0.1


@pytest.mark.filterwarnings("ignore")
def test_labels_that_were_not_counted_anew() -> None:
    tasks = task_set(classes=12, first=7)
    del tasks.task_transforms[3]  # RemapLabels
    with pytest.raises(ValueError, match="RemapLabels"):
        next(collect_tasks(tasks.sample, tasks=1, ways=WAYS, shots=SHOTS))


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, 0, 1, 1, 3, 3], "labels 0, …, 2"), ([0, 0, 0, 1, 1, 2], "as many of each"), ([0, 1, 2], "queries are left")],
)
def test_tasks_that_do_not_fit(labels: list[int], message: str) -> None:
    y = torch.tensor(labels)
    with pytest.raises(ValueError, match=message):
        next(collect_tasks(lambda: (torch.randn(len(y), 4), y), tasks=2, ways=3, shots=1))


def test_tasks_that_end_too_early_say_so() -> None:
    """In training and in a test; tasks that do not fill a batch are no batch."""
    y = torch.arange(3).repeat(2)

    def batches() -> Any:
        left = iter(range(7))
        return collect_tasks(lambda: (torch.randn(len(y) + 0 * next(left), 30), y), tasks=2, ways=3, shots=1)

    assert len(list(batches())) == 3
    with pytest.raises(ValueError, match="ended after 3 batches, and 4 are needed"):
        meta_train(Encoder(), batches(), ways=3, outer_steps=4)
    with pytest.raises(ValueError, match="ended after 6, and 600 are needed; give more, or episodes=6"):
        evaluate_tasks(Encoder(), batches(), 3, lr=0.4)
    assert set(evaluate_tasks(Encoder(), batches(), 3, lr=0.4, episodes=6)) == {"5", "nearest mean"}
    with pytest.raises(ValueError, match="ended after 0, and 5"):
        evaluate_tasks(Encoder(), [], 3, lr=0.4, episodes=5)


def test_order_within_a_task_does_not_matter() -> None:
    """The first `shots` of each class are the support set, in whatever order classes come."""
    x, y = torch.arange(8.0).unsqueeze(1), torch.tensor([1, 0, 1, 0, 0, 1, 1, 0])
    (support, labels), (query, query_labels) = next(collect_tasks(lambda: (x, y), tasks=1, ways=2, shots=2))
    assert support.flatten().tolist() == [1, 0, 3, 2]
    assert labels.flatten().tolist() == [0, 1, 0, 1]
    assert query.flatten().tolist() == [4, 5, 7, 6]
    assert query_labels.flatten().tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("batchnorm", ["running", "task"])
def test_the_same_accuracy_by_both_ways(batchnorm: str) -> None:
    """`evaluate_tasks` on the batches of Episodes, whose tasks `evaluate` draws as well."""
    test = Images(load("digits").part("test"))
    encoder = build_encoder("conv4", test.shape, seed=0)
    before = [x.clone() for x in encoder.state_dict().values()]
    options: dict[str, Any] = {"lr": 0.4, "steps": (1, 5), "episodes": 60, "batchnorm": batchnorm}
    ours = evaluate_tasks(encoder, Episodes(test, 60, 5, 2, 3), 5, **options)
    theirs = evaluate(encoder, test, 5, 2, 3, **options)
    assert set(ours) == set(theirs)
    for name, score in theirs.items():
        assert ours[name].mean == pytest.approx(score.mean, abs=2e-3)  # a tie or two, broken by rounding
    assert encoder.training
    assert all(torch.equal(a, b) for a, b in zip(before, encoder.state_dict().values(), strict=True))

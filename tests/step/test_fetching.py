"""fetch=: the batch of a step is fetched again where it is replayed, the same bit for bit, and never kept."""

import contextlib
import gc
import random
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, Dataset, RandomSampler, TensorDataset

import bilevel_plugin as bilevel

K, SIZE = 5, 6
NUMPY = np.random  # the global generator, which augmentation of old draws from


class Augmented(Dataset):
    """Images that are flipped, scaled and shifted at random, from all three generators."""

    def __init__(self, n=40, width=8):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 1, width, width, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (n,), generator=generator)
        self.calls = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.calls += 1
        x = self.x[i].flip(-1) if torch.rand(()) < 0.5 else self.x[i]
        return x * random.uniform(0.8, 1.2) + 0.1 * NUMPY.rand() + 0.1 * torch.randn(1, 1, 1), self.y[i], i


class Problem:
    def __init__(self):
        torch.manual_seed(0)
        self.data = Augmented()
        self.model = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(3 * 36, 3)
        ).double()
        self.lam = torch.zeros(40, dtype=torch.float64, requires_grad=True)
        self.x_val, self.y_val = torch.randn(9, 1, 8, 8).double(), torch.randint(3, (9,))

    def h(self, model, x, y, i):
        return (self.lam[i].sigmoid() * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(self, model, x, y):
        return F.cross_entropy(model(x), y)

    def run(self, fetch, engine="reverse", steps=K, micro=None, **options):
        """The hypergradient, losses, weights, and what the three generators give after it."""
        torch.manual_seed(1), random.seed(1), NUMPY.seed(1)
        found = []
        options = {"lr": 0.1, "check": False, **options}
        if "optimizer" in options:
            del options["lr"]
            options["optimizer"] = options["optimizer"](self.model.parameters())
        with bilevel.inner(self.model, self.h, self.g, engine=engine, **options) as loop:
            for rows in list(BatchSampler(RandomSampler(self.data), SIZE, True))[:steps]:
                batch = bilevel.fetched(self.data, rows)
                losses = loop.step(fetch=batch, outer=(self.x_val, self.y_val), micro=micro) if fetch else (
                    loop.step(*batch(), outer=(self.x_val, self.y_val), micro=micro)
                )  # fmt: skip
                found.append(losses.h)
            found.append(loop.hypergrad(self.lam))
            found += [w.detach().clone() for w in loop.weights.values()]
        return [*found, torch.rand(1), torch.tensor(random.random()), torch.tensor(NUMPY.rand())]


def same_bits(one, other):
    assert len(one) == len(other)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


ENGINES = {
    "reverse": "reverse",
    "checkpoint": bilevel.Reverse(checkpoint=2),
    "sqrt": bilevel.Reverse(checkpoint="sqrt"),
    "truncate": bilevel.Reverse(truncate=3),
    "memory": bilevel.Reverse(memory="1GiB"),
    "little memory": bilevel.Reverse(memory="400kB"),
    "unroll": "unroll",
    "forward": "forward",
}


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_bits_as_the_batch_itself(engine, micro):
    """With augmentation and dropout: batches, losses, hypergradient, and what is drawn afterwards."""
    problem = Problem()
    same_bits(*(problem.run(fetch, ENGINES[engine], micro=micro) for fetch in (True, False)))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("checkpoint", [1, 2])
def test_under_optimizers(optimizer, checkpoint):
    problem = Problem()
    engine = bilevel.Reverse(checkpoint=checkpoint)
    for micro in (None, 3):
        same_bits(*(problem.run(fetch, engine, micro=micro, optimizer=optimizer) for fetch in (True, False)))


def test_implicit_engines_fetch_the_last_batch_again():
    data = TensorDataset(torch.linspace(-1, 1, 8).double()[:, None])
    model = nn.Linear(1, 1).double()
    lam = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    h = lambda m, x: (m(x) - lam * x).square().mean() + 0.1 * sum(p.square().sum() for p in m.parameters())
    g = lambda m: m.weight.square().sum()

    def run(engine, **given):
        with bilevel.inner(model, h, g, solver="gd", lr=0.5, engine=engine, check=False) as loop:
            loop.run(200, *given.pop("batch", ()), **given)
            return loop.hypergrad(lam)

    for engine in ("cg", "neumann"):
        fetch = bilevel.fetched(data, range(8))
        assert torch.equal(run(engine, fetch=fetch), run(engine, batch=tuple(fetch())))


def test_accumulate_and_names():
    problem = Problem()
    x, y = problem.data.x, problem.data.y

    def run(fetch):
        torch.manual_seed(0)
        with bilevel.inner(problem.model, problem.h, problem.g, lr=0.1, check=False) as loop:
            for k in range(3):
                for rows in (torch.arange(k, k + 5), torch.arange(20, 25 + k)):
                    batch = {"y": y[rows], "i": rows, "x": x[rows]}
                    if fetch:
                        made = iter([batch, *[dict(reversed(batch.items()))] * 9])  # in another order afterwards
                        loop.accumulate(fetch=lambda made=made: next(made))
                    else:
                        loop.accumulate(**batch)
                loop.step(outer=(problem.x_val, problem.y_val))
            return [loop.hypergrad(problem.lam)]

    same_bits(run(True), run(False))


def test_run_fetches_another_batch_for_each_step():
    problem = Problem()

    def draw():
        rows = torch.randint(40, (SIZE,))
        return problem.data.x[rows] + torch.randn(SIZE, 1, 1, 1), problem.data.y[rows], rows

    def run(engine):
        torch.manual_seed(2)
        with bilevel.inner(problem.model, problem.h, problem.g, lr=0.1, engine=engine, check=False) as loop:
            loop.run(4, fetch=draw, outer=(problem.x_val, problem.y_val))
            return loop.hypergrad(problem.lam)

    torch.testing.assert_close(run("reverse"), run("unroll"), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("micro", [None, 3])
def test_the_sentinel_is_given_the_batch(micro):
    problem = Problem()
    expected = problem.run(True, micro=micro)
    same_bits(problem.run(True, micro=micro, check="always"), expected)
    problem.h = lambda model, x, y, i: (
        problem.lam[i].exp() * model(x).detach().square().mean() * model(x).square().sum(1)
    ).mean()
    with pytest.warns(bilevel.DerivativeWarning, match="second derivative"):
        problem.run(True, check="always")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler has some of its own
def test_compiled_steps_fetch_as_well(compiler):
    torch.manual_seed(0)
    data, model = TensorDataset(torch.randn(20, 3), torch.randn(20, 1)), nn.Linear(3, 1)
    lam = torch.tensor(0.3, requires_grad=True)
    h = lambda m, x, y: (m(x) * lam.exp() - y).square().mean()

    def run(engine):
        with bilevel.inner(model, h, lambda m: m.weight.square().sum(), engine=engine, lr=0.1, check=False) as loop:
            for k in range(3):
                loop.step(fetch=bilevel.fetched(data, range(k, k + 6)))
            return loop.hypergrad(lam)

    torch.testing.assert_close(run(bilevel.Reverse(compile=True)), run("unroll"), rtol=1e-5, atol=1e-6)


def test_how_often_a_batch_is_fetched():
    problem = Problem()
    for engine, times in (("unroll", 1), ("reverse", 2), (bilevel.Reverse(checkpoint=K), 3 - 1 / K)):
        problem.data.calls = 0
        problem.run(True, engine)
        assert problem.data.calls == round(times * K) * SIZE


# --- memory ---


def held(problem, steps, fetch):
    """Bytes of tensors that a loop of so many distinct batches holds at its end."""
    torch.manual_seed(0)

    def count():
        gc.collect()
        found = {}
        for x in gc.get_objects():
            if type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided:
                with contextlib.suppress(NotImplementedError):  # a tensor of vmap, left by another test: no memory
                    storage = x.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    with bilevel.inner(
        problem.model, problem.h, problem.g, solver="gd", lr=0.1, engine=bilevel.Reverse(checkpoint=1000), check=False
    ) as loop:
        before = count()
        for k in range(steps):
            rows = [(k + j) % 40 for j in range(SIZE)]
            batch = bilevel.fetched(problem.data, rows)
            loop.step(fetch=batch) if fetch else loop.step(*batch())
            del batch
        return count() - before


def test_live_bytes_are_flat_in_the_number_of_batches():
    """Of the batch nothing stays: 2.5 kB of random state do, where random numbers are drawn, and nothing else."""
    problem = Problem()
    batch = SIZE * (64 + 1 + 1) * 8
    few, many = (held(problem, steps, True) for steps in (20, 200))
    assert many - few <= 180 * 2560
    kept = [held(problem, steps, False) for steps in (20, 200)]
    assert kept[1] - kept[0] >= 180 * batch
    problem.model.eval()
    plain = TensorDataset(problem.data.x, problem.data.y, torch.arange(40))
    problem.data = plain
    few, many = (held(problem, steps, True) for steps in (20, 200))
    assert many == few


def test_fetched_holds_indices_in_eight_bytes_each():
    rows = torch.arange(100_000)
    tracemalloc.start()
    try:
        made = bilevel.fetched(range(len(rows)), rows, collate_fn=len)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8.1 * len(rows)
    assert made() == len(rows)
    assert bilevel.fetched({"a": 1.0, "b": 2.0}, ["b", "a"])().tolist() == [2.0, 1.0]


def test_fetched_takes_samples_at_once_where_the_data_set_can():
    class Table:
        def __getitems__(self, rows):
            return [torch.tensor(float(i)) for i in rows]

    assert bilevel.fetched(Table(), [2, 5])().tolist() == [2.0, 5.0]
    assert bilevel.fetched([1, 2, 3], [2, 0], collate_fn=tuple)() == (3, 1)


# --- refused ---


def loop_with(problem, fetch, steps=2):
    with bilevel.inner(problem.model, problem.h, problem.g, lr=0.1, solver="gd", check=False) as loop:
        for _ in range(steps):
            loop.step(fetch=fetch)
        return loop.hypergrad(problem.lam, outer=(problem.x_val, problem.y_val))


def batches(problem, change):
    """A fetch that gives another batch from the third call on."""
    rows, calls = torch.arange(SIZE), []

    def fetch():
        calls.append(None)
        batch = problem.data.x[rows], problem.data.y[rows], rows
        return batch if len(calls) <= 2 else change(*batch)

    return fetch


def nudged(x, y, i):
    x = x.clone()
    x[3, 0, 2, 1] = torch.nextafter(x[3, 0, 2, 1], torch.tensor(9.0).double())
    return x, y, i


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (nudged, "its values differ"),
        (lambda x, y, i: (x, y.flip(0), i), "its values differ"),
        (lambda x, y, i: (x[:4], y[:4], i[:4]), r"shapes \(4, 1, 8, 8\), \(4,\), \(4,\) in place of \(6, 1, 8, 8\)"),
        (lambda x, y, i: (x.float(), y, i), "shapes"),
        (lambda x, y, i: {"x": x, "y": y, "i": i}, "its keywords differ"),
    ],
)
def test_another_batch_is_an_error(change, match):
    problem = Problem()
    with pytest.raises(RuntimeError, match="fetch= returned a different batch.*" + match):
        loop_with(problem, batches(problem, change))


def test_an_iterator_is_an_error():
    problem = Problem()
    loader = iter(torch.utils.data.DataLoader(problem.data, batch_size=SIZE))
    with pytest.raises(RuntimeError, match="fetch= returned a different batch"):
        loop_with(problem, lambda: next(loader))


@pytest.mark.parametrize("batches_left", [0, 2, 3])
def test_an_iterator_that_is_used_up_is_an_error(batches_left):
    """In a step, or when it is run again; a StopIteration would be one of ours."""
    problem = Problem()
    rows = torch.arange(SIZE)
    left = iter([(problem.data.x[rows], problem.data.y[rows], rows)] * batches_left)
    with pytest.raises(RuntimeError, match=r"fetch= raised StopIteration: an iterator .* bilevel\.fetched"):
        loop_with(problem, lambda: next(left))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("fetch", "error", "match"),
    [
        (3, TypeError, "takes a function without arguments"),
        (lambda: None, TypeError, "must return the batch as a tuple.*got NoneType"),
        (lambda: iter(()), TypeError, "got tuple_iterator"),
        (lambda: {1: torch.ones(2)}, TypeError, "a dict with the keys"),
        (lambda: (torch.ones(2, requires_grad=True),), ValueError, "requires grad"),
        (lambda: (object(),), TypeError, "returned a object in its batch"),
        (lambda: (torch.eye(3).to_sparse_csr(),), TypeError, "neither dense nor sparse_coo"),
    ],
)
def test_what_is_no_batch_is_refused(fetch, error, match):
    with pytest.raises(error, match=match):
        loop_with(Problem(), fetch)


def test_a_batch_and_fetch_are_one_too_many():
    problem = Problem()
    with bilevel.inner(problem.model, problem.h, problem.g) as loop:
        with pytest.raises(TypeError, match="and fetch= to get one"):
            loop.step(problem.data.x, fetch=lambda: ())
        loop.accumulate(problem.data.x, problem.data.y, torch.arange(40))
        with pytest.raises(TypeError, match=r"after loop\.accumulate"):
            loop.step(fetch=lambda: (problem.data.x, problem.data.y, torch.arange(40)))


def test_sparse_tensors_strings_and_arrays_are_compared():
    from bilevel_plugin.step.fetching import checksum

    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    trees = [
        (x,), (x.T,), (x.double(),), (x.to_sparse(),), ((2 * x).to_sparse(),), (x.flip(1).to_sparse(),), ([x],),
        {"a": x}, {"b": x},
        (x, "a"), (x, "b"), (x, 1), (x, 2.0), (x, None),
        (x.numpy(),), (x.numpy() + 1,), (x[:0],), (x.flatten(),), (x.bool(),),
    ]  # fmt: skip
    assert len({checksum(t) for t in trees}) == len(trees)
    assert checksum((x.T,)) == checksum((x.T.contiguous(),))

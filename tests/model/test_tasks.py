"""N inner problems at once."""

import pytest
import torch
import torch.nn.functional as F
from problems import relative
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel

PLANNED = bilevel.Reverse(memory="1GiB")


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


def batch(tasks=3, n=6):
    return torch.randn(tasks, n, 4), torch.randint(2, (tasks, n))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward", bilevel.Reverse("sqrt"), PLANNED, "neumann"])
def test_against_a_loop(engine):
    model, (x, y), (xv, yv) = nn.Linear(4, 2), batch(), batch()
    decay = torch.zeros((), requires_grad=True)

    def h(model, x, y):
        return loss(model, x, y) + decay.exp() * sum(p.square().sum() for p in model.parameters())

    options = {"solver": bilevel.BiGSAM(0.2, alpha=0.5), "engine": engine}
    steps = 200 if engine == "neumann" else 4
    with bilevel.inner(model, h, loss, tasks=3, **options) as loop:
        loop.run(steps, x, y, outer=(xv, yv))
        together, scores, value = loop.hypergrad(decay), loop(xv), loop.value
        assert loop.weights["weight"].shape == (3, 2, 4)
    apart = []
    for i in range(3):
        with bilevel.inner(model, h, loss, **options) as loop:
            loop.run(steps, x[i], y[i], outer=(xv[i], yv[i]))
            apart.append((loop.hypergrad(decay), loop.value))
            torch.testing.assert_close(scores[i], loop(xv[i]))
    assert relative(together, sum(g for g, _ in apart)) < (1e-5 if engine == "neumann" else 1e-10)
    torch.testing.assert_close(value, sum(v for _, v in apart))


@pytest.mark.usefixtures("double")
def test_hyper_representation():
    """Features of all tasks once through the encoder, heads per task, one trip back: as a loop that re-encodes."""
    encoder, head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 2)
    (x, y), (xv, yv) = batch(), batch()
    features, queries = encoder(x), encoder(xv)
    with bilevel.inner(head, loss, loss, tasks=3, lr=0.3) as loop:
        loop.run(5, features, y, outer=(queries, yv))
        loop.backward()
    together = [p.grad.clone() for p in encoder.parameters()]
    encoder.zero_grad()
    encoded = lambda m, x, y: loss(m, encoder(x), y)
    for i in range(3):
        with bilevel.inner(head, encoded, encoded, lr=0.3, engine="unroll") as loop:
            loop.run(5, x[i], y[i], outer=(xv[i], yv[i]))
            loop.backward()
    for a, p in zip(together, encoder.parameters(), strict=True):
        assert relative(a, p.grad) < 1e-10


@pytest.mark.usefixtures("double")
def test_batchnorm_and_dropout_have_statistics_and_masks_of_their_own():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    (x, y), lam = batch(), torch.zeros((), requires_grad=True)
    x[1] += 3
    grads = []
    for engine in ("reverse", "unroll"):
        torch.manual_seed(0)
        with bilevel.inner(model, lambda *a: lam.exp() * loss(*a), loss, tasks=3, lr=0.1, engine=engine) as loop:
            loop.run(4, x, y, outer=(x, y))
            grads.append(loop.hypergrad(lam))
            mean = loop._run.z["1.running_mean"]
            assert mean.shape == (3, 3)
            assert not torch.allclose(mean[0], mean[1])
            assert loop._run.buffers["1.num_batches_tracked"].tolist() == [7, 7, 7]
            model.eval()
            same = x[:1].expand(3, -1, -1)
            assert not torch.allclose(loop(same)[0], loop(same)[1])
            model.train()
    assert relative(*grads) < 1e-10
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_attention_is_vmapped():
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    model = nn.Sequential(attention, nn.Flatten(), nn.Linear(8, 2))
    x, y = torch.randn(3, 5, 2, 4), torch.randint(2, (3, 5))
    lam = torch.zeros((), requires_grad=True)
    with bilevel.inner(model, lambda *a: lam.exp() * loss(*a), loss, tasks=3, lr=0.1) as loop:
        loop.run(2, x, y, outer=(x, y))
        together = loop.hypergrad(lam)
    apart = 0
    for i in range(3):
        with bilevel.inner(model, lambda *a: lam.exp() * loss(*a), loss, lr=0.1) as loop:
            loop.run(2, x[i], y[i], outer=(x[i], y[i]))
            apart += loop.hypergrad(lam)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-6)


class Last(nn.Module):
    """The output of a recurrent layer after its last input."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(1, 2))[0][:, -1]


def convolutions(*norm):
    return [nn.Conv2d(1, 3, 3), *norm, nn.Tanh(), nn.Dropout(0.0), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2)]


LAYERS = {
    "convolutions": lambda: convolutions(nn.BatchNorm2d(3)),
    "parametrized": lambda: [nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 3, 5)), nn.Flatten(), nn.Linear(12, 2)],
    "mean statistics": lambda: [nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)],
    "LSTM": lambda: [Last(nn.LSTM(6, 4, batch_first=True)), nn.Linear(4, 2)],
    "GRU": lambda: [Last(nn.GRU(6, 4, batch_first=True)), nn.Linear(4, 2)],
}


def pictures(tasks=3, n=5):
    return torch.randn(tasks, n, 1, 6, 6), torch.randint(2, (tasks, n))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("engine", ["reverse", "unroll", "forward", bilevel.Reverse("sqrt"), PLANNED])
@pytest.mark.parametrize("layers", LAYERS)
def test_one_task_after_the_other(layers, engine):
    """What is slow under vmap, or has none: each task as in a block of its own, with its own statistics."""
    model, (x, y), (xv, yv) = nn.Sequential(*LAYERS[layers]()), pictures(), pictures()
    x[1] += 2
    lam = torch.zeros((), requires_grad=True)
    h, g = lambda m, *batch: lam.exp() * loss(m.train(), *batch), lambda m, *batch: loss(m.eval(), *batch)
    options = {"solver": bilevel.BiGSAM(0.2, alpha=0.5), "engine": engine}
    with bilevel.inner(model, h, g, tasks=3, **options) as loop:
        assert not loop._run.model.tasks.vmaps
        loop.run(4, x, y, outer=(xv, yv))
        together, scores, value = loop.hypergrad(lam), loop(xv), loop.value
    apart = []
    for i in range(3):
        with bilevel.inner(model, h, g, **options) as loop:
            loop.run(4, x[i], y[i], outer=(xv[i], yv[i]))
            apart.append((loop.hypergrad(lam), loop.value))
            torch.testing.assert_close(scores[i], loop(xv[i]), rtol=1e-12, atol=1e-12)
    assert relative(together, sum(g for g, _ in apart)) < 1e-10
    torch.testing.assert_close(value, sum(v for _, v in apart))


class Groups(TorchDispatchMode):
    """Notes the groups of every convolution, and of its derivatives."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in func.overloadpacket.__name__:
            self.found.add(args[-2] if func.overloadpacket.__name__ == "convolution_backward" else args[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_convolutions_are_not_grouped(engine):
    """The convolution of several weights at once is a grouped one, for which the CPU has slow kernels."""
    model, (x, y) = nn.Sequential(*convolutions()), pictures()
    with Groups() as groups, bilevel.inner(model, loss, loss, tasks=3, lr=0.1, engine=engine, check=False) as loop:
        loop.run(2, x, y, outer=(x, y))
        loop.hypergrad(model)
    assert groups.found == {1}


def test_a_convolution_that_is_the_same_for_all_tasks_is_vmapped():
    model, (x, y) = nn.Sequential(*convolutions()), pictures()
    head = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    with bilevel.inner(model, loss, loss, tasks=3, optimizer=head) as loop:
        assert loop._run.model.tasks.vmaps
        loop.run(2, x, y, outer=(x, y))
        together = loop.hypergrad(model[0])
    apart = 0
    for i in range(3):
        with bilevel.inner(model, loss, loss, optimizer=head) as loop:
            loop.run(2, x[i], y[i], outer=(x[i], y[i]))
            apart += loop.hypergrad(model[0])["weight"]
    torch.testing.assert_close(together["weight"], apart, rtol=1e-4, atol=1e-6)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.readout = nn.Conv1d(2, 1, 1), nn.Linear(4, 1)
        self.register_buffer("hidden", torch.zeros(3, 1, 4))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("engine", ["reverse", "unroll"])
def test_a_buffer_that_each_task_leaves(engine):
    model, x, lam = Recurrent(), torch.randn(2, 3, 1, 4), torch.zeros((), requires_grad=True)

    def h(model, x):
        hidden = model.cell(torch.cat([x, model.hidden], 1)).tanh()
        model.hidden = bilevel.stop_gradient(hidden)
        return lam.exp() * (model.readout(hidden) - 1).square().mean()

    g = lambda model: model.readout(model.hidden).square().mean()
    with bilevel.inner(model, h, g, tasks=2, lr=0.2, engine=engine) as loop:
        loop.run(4, x)
        together = loop.hypergrad(lam)
    apart = 0
    for one in x:
        with bilevel.inner(model, h, g, lr=0.2, engine=engine) as loop:
            loop.run(4, one)
            apart += loop.hypergrad(lam)
    assert relative(together, apart) < 1e-10


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layer", [lambda: nn.Conv2d(1, 3, 3), lambda: nn.LayerNorm((1, 6, 6))])
def test_activation_checkpointing_would_run_with_the_weights_of_all_tasks(layer, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer(), nn.LazyLinear(2)
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x):
            x = self.factor * x  # if no input requires grad, torch warns that the reentrant mode does nothing
            return self.head(checkpoint(self.layer, x, use_reentrant=reentrant).flatten(1))

    model, (x, y) = Checkpointed(), pictures()
    model(x[0])
    with bilevel.inner(model, loss, loss, tasks=3, lr=0.1) as loop:
        with pytest.raises(RuntimeError, match=r"activation checkpointing.*without memory= and tasks="):
            loop.step(x, y, outer=(x, y))


def test_what_a_loss_returns_beside_its_value():
    model, (x, y) = nn.Sequential(*convolutions()), pictures()

    def scored(model, x, y):
        scores = model(x)
        return F.cross_entropy(scores, y), {"scores": scores, "kind": "few-shot", "samples": len(x)}

    with bilevel.inner(model, scored, loss, tasks=3, lr=0.1) as loop:
        aux = loop.step(x, y, outer=(x, y)).aux
        assert aux["scores"].shape == (3, 5, 2)
        assert (aux["kind"], aux["samples"]) == ("few-shot", 5)
    number = lambda model, x, y: (loss(model, x, y), float(x.sum()))
    with bilevel.inner(model, number, loss, tasks=3, lr=0.1) as loop:
        with pytest.raises(ValueError, match=r"differs from task to task. Return it as a tensor"):
            loop.step(x, y, outer=(x, y))


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.Sequential(nn.Conv1d(4, 2, 1))], ids=["vmap", "loop"])
def test_calls_with_another_number_of_tasks(model):
    with bilevel.inner(model, loss, loss, tasks=3, lr=0.1) as loop:
        with pytest.raises(ValueError, match=r"tasks=3.*the model was given one of shape \(4, 4, 4\)"):
            loop(torch.randn(4, 4, 4))


def test_wrong_task_dimensions():
    model, (x, y), _ = nn.Linear(4, 2), batch(), None
    with pytest.raises(ValueError, match=r"tasks must be a whole number, at least 1, got 0"):
        bilevel.inner(model, loss, loss, tasks=0)
    with bilevel.inner(model, loss, loss, tasks=3, lr=0.1) as loop:
        with pytest.raises(ValueError, match=r"with tasks=3 every tensor.*h was given one of shape \(6, 4\).*expand"):
            loop.step(x[0], y, outer=(x, y))
        with pytest.raises(ValueError, match=r"h was given one of shape \(\)"):
            loop.step(x, torch.tensor(1), outer=(x, y))
        loop.step(x, y, outer=(x, y))
        with pytest.raises(ValueError, match=r"g was given one of shape \(2, 6, 4\)"):
            loop.backward(outer=(x[:2], y[:2]))
        with pytest.raises(RuntimeError, match=r"commit_\(\) has 3 sets of weights for one model"):
            loop.commit_()
    bad = lambda model, x, y: model(x)
    with bilevel.inner(model, bad, loss, tasks=3, lr=0.1) as loop:
        with pytest.raises(ValueError, match=r"h must return a scalar, got a tensor of shape \(6, 2\)"):
            loop.step(x, y)
    with bilevel.inner(model, lambda m, x, y: 1.0, loss, tasks=3, lr=0.1) as loop:
        with pytest.raises(TypeError, match=r"h must return a scalar tensor, got float"):
            loop.step(x, y)


def test_a_sparse_buffer_is_refused():
    model = nn.Linear(4, 2)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    with pytest.raises(ValueError, match=r"the buffer 'adjacency' is sparse.*close over it"):
        bilevel.inner(model, loss, loss, tasks=3, lr=0.1).__enter__()

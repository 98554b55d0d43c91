"""N inner problems at once."""

import pytest
import torch
import torch.nn.functional as F
from problems import relative
from torch import nn

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
            mean = loop._z["1.running_mean"]
            assert mean.shape == (3, 3)
            assert not torch.allclose(mean[0], mean[1])
            assert loop._buffers["1.num_batches_tracked"].tolist() == [7, 7, 7]
            model.eval()
            same = x[:1].expand(3, -1, -1)
            assert not torch.allclose(loop(same)[0], loop(same)[1])
            model.train()
    assert relative(*grads) < 1e-10
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_attention_and_convolutions_are_vmapped():
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

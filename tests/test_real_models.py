"""Real models just work: every architecture's hypergradient against central differences in float64."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from contract import ENGINES
from problems import differences, hypergrad, relative, same, snapshot, value
from real_models import ARCHITECTURES, problem
from torch import nn

import bilevel_plugin as bilevel

JUDGED = {name: engine for name, engine in ENGINES.items() if engine != "unroll"}  # by which the others are judged


@pytest.mark.parametrize("engine", JUDGED.values(), ids=JUDGED)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_against_differences(name, engine):
    model, h, g, lam, batch, outer = problem(name)
    before = snapshot(model)
    got = hypergrad(model, h, g, lam, batch, outer, 4, lr=0.2, engine=engine)
    assert relative(got, hypergrad(model, h, g, lam, batch, outer, 4, lr=0.2, engine="unroll")) < 1e-10
    v = torch.randn(6, dtype=torch.float64)
    expected = differences(lambda: value(model, h, g, batch, outer, 4, lr=0.2), lam, v)
    assert abs(float((got * v).sum()) - expected) / float(got.norm()) < 1e-7
    assert same(model, before)


def test_replaced_buffers_are_carried_along():
    model, h, g, _, batch, outer = problem("shared submodule")
    with bilevel.inner(model, h, g, solver="gd", lr=0.1) as loop:
        loop.run(4, *batch, outer=outer)
        loop.commit_()
    assert float(model.calls) == 4


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_hugging_face_model_from_a_config(family, transformers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own making
        sizes = {
            "vocab_size": 11,
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        if family == "bert":
            config, kind = transformers.BertConfig(**sizes, num_labels=3), transformers.BertForSequenceClassification
        elif family == "gpt2":
            config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=16)
            kind = transformers.GPT2LMHeadModel
        else:
            config, kind = transformers.LlamaConfig(**sizes, num_key_value_heads=2), transformers.LlamaForCausalLM
        torch.manual_seed(0)
        model = kind(config).double()
    ids = torch.randint(11, (4, 6))
    labels = torch.randint(3, (4,)) if family == "bert" else ids
    lam = torch.zeros((), dtype=torch.float64, requires_grad=True)
    h = lambda m, batch: lam.exp() * m(**batch).loss
    g = lambda m, batch: m(**batch).loss
    batch = ({"input_ids": ids, "labels": labels},)
    got = hypergrad(model, h, g, lam, batch, batch, 3, lr=0.1)
    assert relative(got, hypergrad(model, h, g, lam, batch, batch, 3, lr=0.1, engine="unroll")) < 1e-10
    # the language models compute their loss and norms in float32, whatever they are given: wider, rougher differences
    eps, tolerance = (2e-4, 1e-7) if family == "bert" else (3e-2, 2e-4)
    expected = differences(lambda: value(model, h, g, batch, batch, 3, lr=0.1), lam, torch.ones_like(lam), eps)
    assert float(got) == pytest.approx(expected, rel=tolerance)


def test_autocast_around_the_step_or_in_the_loss():
    """bf16 inside, float32 weights; the reverse sweep computes in the precision of the step, wherever it is called."""
    model, h, g, lam, batch, outer = problem("batchnorm", torch.float32)

    def inside(f):
        def loss(*args):
            with torch.autocast("cpu", torch.bfloat16):
                return f(*args)

        return loss

    grads = []
    for engine in ("reverse", "unroll"):
        with bilevel.inner(model, inside(h), inside(g), lr=0.1, engine=engine) as loop:
            loop.run(4, *batch, outer=outer)
            assert all(w.dtype == torch.float32 for w in loop.weights.values())
            grads.append(loop.hypergrad(lam))
        with bilevel.inner(model, h, inside(g), lr=0.1, engine=engine) as loop:
            with torch.autocast("cpu", torch.bfloat16):
                loop.run(4, *batch, outer=outer)
            grads.append(loop.hypergrad(lam))
    assert relative(grads[0], grads[1]) < 1e-5  # autocast in the loss, or around the step
    assert relative(grads[2], grads[3]) < 1e-5
    # engines round in bf16 at other places: within its rounding unit, of each other and of float32
    single = hypergrad(model, h, g, lam, batch, outer, 4, lr=0.1)
    assert relative(grads[0], grads[2]) < torch.finfo(torch.bfloat16).eps
    assert all(1e-5 < relative(single, x) < torch.finfo(torch.bfloat16).eps for x in grads)


def test_the_mode_of_the_step_is_that_of_its_replay():
    """eval() between the loop and the hypergradient does not change the steps that were taken."""
    model, h, g, lam, batch, outer = problem("dropout")
    results = []
    for engine in ("reverse", "unroll"):
        torch.manual_seed(1)
        model.train()
        with bilevel.inner(model, h, g, lr=0.1, engine=engine) as loop:
            loop.run(4, *batch, outer=outer)
            model.eval()
            results.append(loop.hypergrad(lam))
            assert not model.training
    torch.testing.assert_close(*results)


def test_random_numbers_are_drawn_anew_in_each_step_and_alike_in_its_replay():
    model, h, g, lam, batch, outer = problem("dropout")
    drawn = []

    def watched(model, x, y):
        drawn.append(torch.get_rng_state())
        return h(model, x, y)

    torch.manual_seed(1)
    with bilevel.inner(model, watched, g, solver="gd", lr=0.1, engine=bilevel.Reverse(checkpoint=2)) as loop:
        loop.run(4, *batch, outer=outer)
        after = torch.get_rng_state()
        steps = list(drawn)
        assert len({bytes(s.numpy()) for s in steps}) == 4
        drawn.clear()
        model.eval()
        loop.hypergrad(lam)
        assert torch.equal(torch.get_rng_state(), after)  # the caller's stream is not touched by replays
    assert {bytes(s.numpy()) for s in drawn} == {bytes(s.numpy()) for s in steps}


class OneHead(nn.Module):
    """Attention whose keys have a bias: it moves no score against another, so that its gradient is rounding alone."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1).mean(1))


def with_adam(dtype, data, lam, steps=4, **options):
    """A warm AdamW over `OneHead`, and its loss on the data."""
    torch.manual_seed(1)
    model = OneHead().double()
    torch.manual_seed(2)
    moments = [(0.1 * torch.randn_like(p), 0.01 + torch.rand_like(p)) for p in model.parameters()]
    moments[1][1][8:16] = moments[1][0][8:16] = 0  # of the keys' biases: there, a step divides rounding by its size
    model.to(dtype)
    adam = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-12)
    for p, (mean, square) in zip(model.parameters(), moments, strict=True):
        adam.state[p] = {"step": torch.tensor(9.0), "exp_avg": mean.to(dtype), "exp_avg_sq": square.to(dtype)}
    x, y = data[0].to(dtype), data[1]

    def h(model):
        return (lam.sigmoid() * F.cross_entropy(model(x), y, reduction="none")).mean()

    return model, h, lambda model: F.cross_entropy(model(x), y), adam


@pytest.mark.parametrize("clip", [None, 0.5], ids=["plain", "clipped"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_are_rounding_alone(seed, clip):
    """The fused kernel, in the step, and the one with a second derivative round otherwise; Adam makes steps of it."""
    data = torch.randn(6, 5, 8, dtype=torch.float64), torch.randint(3, (6,))

    def plain_loop(lam):
        model, h, g, adam = with_adam(torch.float64, data, lam)
        for _ in range(4):
            adam.zero_grad()
            h(model).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            adam.step()
        return g(model)

    start = torch.linspace(-1, 1, 6, dtype=torch.float64)
    expected = []
    for i in range(6):
        e = torch.zeros(6, dtype=torch.float64)
        e[i] = 1e-5
        expected.append(((plain_loop(start + e) - plain_loop(start - e)) / 2e-5).detach())
    lam = start.float().requires_grad_()
    model, h, g, adam = with_adam(torch.float32, data, lam)
    with bilevel.inner(model, h, g, solver="gd", optimizer=adam, clip=clip) as loop:
        loop.run(4)
        found = loop.hypergrad(lam)
    assert relative(found.double(), torch.stack(expected)) < 1e-3


def test_a_changed_loss_is_found_where_gradients_are_rounding_alone():
    data = torch.randn(6, 5, 8, dtype=torch.float64), torch.randint(3, (6,))
    lam = torch.zeros(6, requires_grad=True)
    model, h, g, adam = with_adam(torch.float32, data, lam)
    direction = [1.0]

    def turned(model):  # the same value, another gradient
        w = model.out.bias
        return h(model) + direction[0] * (w - w.detach()).sum()

    with bilevel.inner(model, turned, g, solver="gd", optimizer=adam, check=False) as loop:
        loop.run(2)
        direction[0] = 1.1
        with pytest.raises(RuntimeError, match=r"step k = 2, run again for the hypergradient, ended elsewhere"):
            loop.hypergrad(lam)


def test_a_gradient_that_is_another_with_a_graph_is_found():
    """Run again without a graph, the step ends where it ended; with one, by which it is differentiated, elsewhere."""

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, a):
            return 1.1 * a if torch.is_grad_enabled() else a

    lam = torch.zeros(3, requires_grad=True)
    model = nn.Linear(3, 1)
    h = lambda m: (m(lam.exp() * torch.eye(3)) - Turned.apply(m.bias)).square().sum()
    adam = torch.optim.AdamW(model.parameters(), 0.01)
    with bilevel.inner(model, h, lambda m: m.weight.square().sum(), solver="gd", optimizer=adam, check=False) as loop:
        loop.run(2)
        with pytest.raises(RuntimeError, match=r"ended elsewhere"):
            loop.hypergrad(lam)

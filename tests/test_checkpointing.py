"""Backward passes that run a part of the model again, at the weights of the step, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from contract import ENGINES, IMPLICIT, SWAPPED
from plain_loop import (
    RATE,
    SAMPLES,
    Case,
    block,
    data,
    everything,
    exact,
    judge,
    losses,
    right_or_refused,
    start,
    train_and_eval,
    unchanged,
)
from problems import hypergrad, refused, relative, weighted
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")


class Checkpointed(nn.Module):
    """Blocks of layers of which the backward pass runs each again."""

    def __init__(self, *middle: nn.Module, reentrant: bool, sequential: bool = False):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(4, 4), *copy.deepcopy(middle), nn.Tanh())
        self.first, self.blocks, self.last = nn.Linear(3, 4), nn.Sequential(block(), block()), nn.Linear(4, 2)
        self.reentrant, self.sequential = reentrant, sequential

    def forward(self, x):
        x = self.first(x)
        if not x.requires_grad:  # as torchvision asks: a reentrant one warns where nothing is differentiated
            return self.last(self.blocks(x))
        if self.sequential:
            return self.last(checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.reentrant))
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=self.reentrant)
        return self.last(x)


class DenseBlock(nn.Module):
    """As torchvision's DenseNet(memory_efficient=True): a bottleneck over all features so far, run again."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.reentrant = nn.Linear(3, 4), reentrant
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(6)])
        self.layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(6, 2)])
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        features = [self.first(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            bottleneck = lambda *parts, norm=norm, layer=layer: layer(norm(torch.cat(parts, 1)).tanh())
            again = any(f.requires_grad for f in features)
            features.append(
                checkpoint(bottleneck, *features, use_reentrant=self.reentrant) if again else bottleneck(*features)
            )
        return self.last(torch.cat(features, 1))


class Recompute(torch.autograd.Function):
    """A backward of one's own, that runs the module again (as reversible layers do) and is right to any order."""

    depth = 0

    @staticmethod
    def forward(ctx, run, x, *weights):
        ctx.run = run
        ctx.save_for_backward(x, *weights)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        Recompute.depth += 1
        try:
            if Recompute.depth > 20:
                raise RuntimeError("it runs within itself: the module has weights of another step, that depend on this")
            with torch.enable_grad():
                there = x.view_as(x)
                return None, *torch.autograd.grad(ctx.run(there), (there, *weights), grad, create_graph=True)
        finally:
            Recompute.depth -= 1


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(Recompute.apply(self.middle, self.first(x), *self.middle.parameters()))


RECOMPUTING = {
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "checkpoint, reentrant": lambda: Checkpointed(reentrant=True),
    "with dropout": lambda: Checkpointed(nn.Dropout(0.3), reentrant=False),
    "with dropout, reentrant": lambda: Checkpointed(nn.Dropout(0.3), reentrant=True),
    "sequential": lambda: Checkpointed(reentrant=False, sequential=True),
    "sequential, reentrant": lambda: Checkpointed(reentrant=True, sequential=True),
    "dense": lambda: DenseBlock(False),
    "dense, reentrant": lambda: DenseBlock(True),
    "reversible": Reversible,
}


EVAL = lambda h, g: (h, lambda m, *b: g(m.eval(), *b))


@pytest.mark.parametrize("engine", ["reverse", "sqrt"])
@pytest.mark.parametrize("name", RECOMPUTING)
def test_recomputing_backwards_are_exact(name, engine):
    """Running statistics move twice a step where BatchNorm is run again, and so they do here."""
    wrap = EVAL if "dropout" in name else lambda h, g: (h, g)
    exact(losses(RECOMPUTING[name], wrap), ENGINES[engine])


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant", "with dropout, reentrant"])
def test_recomputing_backwards_under_momentum_and_clipping(name):
    momentum = lambda m: torch.optim.SGD(m.parameters(), RATE, momentum=0.9, nesterov=True)
    clip = (0.3, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.3))
    exact(losses(RECOMPUTING[name], EVAL), bits=False, optimizer=momentum, clip=clip)


@pytest.mark.parametrize("reentrant", [False, True])
def test_running_statistics_that_are_moved_twice_a_step_and_read_by_g(reentrant):
    build = losses(lambda: DenseBlock(reentrant), train_and_eval)
    assert not right_or_refused(build, "reverse", "running statistics under activation checkpointing")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_leaves_other_gradients_alone(reentrant):
    """A reentrant one can only be run by .backward(), which adds to every leaf's .grad."""
    encoder, lam = nn.Linear(3, 3), start()
    encoder.weight.grad = torch.ones_like(encoder.weight)
    build = losses(lambda: Checkpointed(reentrant=reentrant), lambda h, g: ((lambda m, x, y: h(m, encoder(x), y)), g))
    torch.manual_seed(0)
    model, h, g, batch, outer = build(lam)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = everything(model)
    with bilevel.inner(model, h, g, solver="gd", lr=0.1, check=False) as loop:
        loop.run(3, *batch, outer=outer)
        loop.hypergrad([lam, *encoder.parameters()])
    unchanged(model, before)
    assert lam.grad is None
    assert encoder.bias.grad is None
    assert torch.equal(encoder.weight.grad, torch.ones_like(encoder.weight))


@pytest.mark.parametrize("engine", SWAPPED)
@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant", "sequential, reentrant", "dense"])
def test_engines_that_swap_weights_refuse_checkpointing(name, engine):
    model, lam = RECOMPUTING[name](), start()
    before = everything(model)
    with refused("checkpoint", "reverse"):
        hypergrad(model, *weighted(lam), lam, data(), data(5), solver="gd", lr=0.1, check=False, engine=SWAPPED[engine])
    unchanged(model, before)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant", "sequential, reentrant", "dense"])
def test_checkpointing_under_tasks(name):
    torch.manual_seed(0)
    model, lam = RECOMPUTING[name](), start()
    before, (x, y) = everything(model), (torch.stack(parts) for parts in zip(data(), data(), strict=True))
    options = {"solver": "gd", "lr": RATE, "check": False}
    got = hypergrad(model, *weighted(lam), lam, (x, y), (x, y), **options, tasks=2)
    apart = [hypergrad(model, *weighted(lam), lam, (x[i], y[i]), (x[i], y[i]), **options) for i in range(2)]
    assert relative(got, apart[0] + apart[1]) < 1e-10
    unchanged(model, before)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant", "with dropout", "sequential", "dense"])
def test_recomputing_backwards_in_forward_mode_are_right_or_refused(name):
    wrap = EVAL if "dropout" in name else lambda h, g: (h, g)
    right = right_or_refused(losses(RECOMPUTING[name], wrap), "forward", "checkpoint", "reverse")
    assert right == (name != "dense")


@pytest.mark.parametrize("engine", ["forward", *SWAPPED])
def test_a_backward_of_ones_own_that_runs_the_module_again(engine):
    """Where graphs are kept, the weights of the step are no longer in the module: an error, and no number."""
    lam = start()
    if engine in SWAPPED:
        with pytest.raises(RuntimeError, match=r"not have been used in the graph|it runs within itself"):
            block(losses(Reversible), lam, ENGINES[engine])
        return
    judge(block(losses(Reversible), lam, ENGINES[engine]), losses(Reversible), lam, bits=False)


@pytest.mark.parametrize("engine", IMPLICIT)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_backwards_at_a_fixed_point(reentrant, engine):
    decay = lambda h, g: ((lambda m, *b: h(m, *b) + sum(p.square().sum() for p in m.parameters())), g)
    build = losses(lambda: Checkpointed(reentrant=reentrant), decay)
    exact(build, engine, bits=False, steps=150, tolerance=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_gradient_checkpointing_of_hugging_face(family, reentrant, transformers):
    sizes = {"vocab_size": 11, "attn_implementation": "eager"}
    if family == "bert":
        wide = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config, kind = (
            transformers.BertConfig(**sizes, **wide, num_labels=2),
            transformers.BertForSequenceClassification,
        )
    else:
        narrow = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
        config, kind = transformers.GPT2Config(**sizes, **narrow, use_cache=False), transformers.GPT2LMHeadModel

    def build(lam):
        model = kind(config).double().train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        ids, y = torch.randint(11, (SAMPLES, 5)), torch.randint(2, (SAMPLES,))
        scores = lambda m, ids: m(input_ids=ids).logits.reshape(SAMPLES, -1)
        h = lambda m, ids, y: (lam.sigmoid() * F.cross_entropy(scores(m, ids), y, reduction="none")).mean()
        g = lambda m, ids, y: F.cross_entropy(scores(m.eval(), ids), y)
        return Case(model, h, g, (ids, y), (ids.flip(0), y))

    exact(build, steps=3)

"""The loops of `make peers`, and how each library is given them, as its own documentation says.

Every loop is one that people have, made small, with a weight for each sample or the named options of the optimizer as
outer variables. Where a library has an option for something, that option is used.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bilevel_plugin as bilevel

from . import runners
from .runners import Host, quietly

STEPS, SAMPLES, BATCH = 8, 6, 4
HYPERTORCH = "hypergrad.hypergradients"  # the module of its repository
Grads = list[Tensor]


class NotThereError(Exception):
    """The library has no such thing."""


# --- the loops --------------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """A plain loop and its outer variables. `h` and `g` take the model and a batch."""

    model: nn.Module
    lam: Grads
    h: Callable[..., Tensor]
    g: Callable[..., Tensor]
    batches: list[tuple[Any, ...]]
    val: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.5})
    kind: type[torch.optim.Optimizer] = torch.optim.SGD
    clip: float | None = None
    learnt: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # options that are outer variables
    keeps_average: bool = True
    average: Grads = field(default_factory=list[Tensor])  # of the weights, kept by a line of the user's own

    def after_step(self) -> None:
        """A line of the user's own, which reads the model."""
        if not self.keeps_average:
            return
        with torch.no_grad():
            now = [p.detach().clone() for p in self.model.parameters()]
            self.average = [0.5 * a + 0.5 * x for a, x in zip(self.average or now, now, strict=True)]

    def optimizer(self, **more: Any) -> torch.optim.Optimizer:
        return self.kind(self.model.parameters(), **{**self.options, **more})

    def plain(self) -> float:
        """g at the end of the loop as people write it."""
        optimizer = self.optimizer(**{name: x.item() for name, x in self.learnt.items()})
        for batch in self.batches:
            optimizer.zero_grad()
            self.h(self.model, *batch).backward(inputs=list(self.model.parameters()))
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            optimizer.step()
            self.after_step()
        return float(self.g(self.model, *self.val).detach())


def weights_for_samples(model: nn.Module, x: Tensor, classes: int = 3, **more: Any) -> Loop:
    """The loop of data cleaning: λ weighs the samples of h, and g is the loss on others."""
    lam = torch.randn(SAMPLES, requires_grad=True)
    y = torch.randint(classes, (2, SAMPLES))
    rows = [torch.arange(k, k + BATCH) % SAMPLES for k in range(STEPS)]

    def h(model: Any, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return (torch.sigmoid(lam[i]) * F.cross_entropy(model(x), y, reduction="none")).mean()

    def g(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return Loop(model, [lam], h, g, [(x[0][i], y[0][i], i) for i in rows], (x[1], y[1]), **more)


def perceptron(**more: Any) -> Loop:
    return weights_for_samples(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(2, SAMPLES, 4), **more
    )


def learnt(*names: str, **options: float) -> Loop:
    """Options of the optimizer as outer variables."""
    loop = perceptron(options=options)
    loop.learnt = {name: torch.tensor(options[name], requires_grad=True) for name in names}
    loop.lam = list(loop.learnt.values())
    return loop


def batch_norm() -> Loop:
    """h with the module in training mode, g in eval mode, as in any training script."""
    loop = weights_for_samples(
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Tanh(), nn.Linear(5, 3)),
        torch.randn(2, SAMPLES, 4),
    )
    in_training_mode = loop.g

    def g(model: Any, *batch: Tensor) -> Tensor:
        model.train(False)
        try:
            return in_training_mode(model, *batch)
        finally:
            model.train(True)

    return replace(loop, g=g)


def dropout() -> Loop:
    """The seed is set before the loop. The masks of the plain loop are those that count."""
    layers = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Dropout(0.4), nn.Linear(12, 3))
    return weights_for_samples(layers, torch.randn(2, SAMPLES, 4))


class Checkpointed(nn.Module):
    """Its body is run again in the backward pass, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second, self.head = (nn.Linear(*s) for s in ((4, 5), (5, 4), (4, 5), (5, 3)))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.between(torch.tanh(self.first(x)))))))


def penalty_over_parameters() -> Loop:
    """A list that was made before the loop, as for weight decay of some layers."""
    loop = perceptron()
    weights, loss = [p for p in loop.model.parameters() if p.ndim > 1], loop.h
    return replace(loop, h=lambda model, *batch: loss(model, *batch) + 0.1 * sum(w.square().sum() for w in weights))


class Sometimes(nn.Module):
    """A branch that only the odd batches go through: in the others its gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        return self.main(x) + torch.tanh(self.side(x)) if branch else self.main(x)


def unused_in_some_steps() -> Loop:
    loop = weights_for_samples(Sometimes(), torch.randn(2, SAMPLES, 4), options={"lr": 0.5, "momentum": 0.5})
    lam = loop.lam[0]

    def h(model: Any, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x, bool(i[0] % 2)), y, reduction="none")
        return (torch.sigmoid(lam[i]) * losses).mean()

    return replace(loop, h=h)


class Attention(nn.Module):
    """nn.TransformerEncoderLayer as it comes: torch chooses the kernel of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def weight_norm() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(normed(nn.Linear(4, 6)), nn.Tanh(), normed(nn.Linear(6, 3)))


class Bag(nn.Module):
    """Words, of which 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x)).mean(1))


def detached() -> Loop:
    """A network gives each sample its weight from the sample's loss, which is detached (Meta-Weight-Net)."""
    loop = perceptron()
    weigher = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid())

    def h(model: Any, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (weigher(losses.detach().unsqueeze(1)).squeeze(1) * losses).mean()

    return replace(loop, h=h, lam=list(weigher.parameters()))


def words() -> Tensor:
    x = torch.randint(1, 9, (2, SAMPLES, 5))
    x[:, :, 3:] = 0
    return x


@dataclass(frozen=True)
class Row:
    """A loop, and what of it is compared: the hypergradient, the user's average, or the model after the block."""

    title: str
    make: Callable[[], Loop]
    what: str = "hypergradient"
    remedy: str = ""  # what a user can do without the library's help, tried where it fails
    seeds: tuple[int, ...] = (0,)


ROWS = [
    Row("SGD", perceptron),
    Row("SGD with momentum and weight decay",
        lambda: perceptron(options={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05})),
    Row("Adam", lambda: perceptron(kind=torch.optim.Adam, options={"lr": 0.05}), seeds=(0, 10, 20)),
    Row("AdamW", lambda: perceptron(kind=torch.optim.AdamW, options={"lr": 0.05})),
    Row("clipped gradients", lambda: perceptron(clip=0.2)),
    Row("a learnt rate", lambda: learnt("lr", lr=0.5)),
    Row("learnt momentum and weight decay",
        lambda: learnt("momentum", "weight_decay", lr=0.1, momentum=0.9, weight_decay=0.05)),
    Row("BatchNorm, with g in eval mode", batch_norm),
    Row("the model afterwards, with its running statistics", batch_norm, "model"),
    Row("Dropout", dropout),
    Row("activation checkpointing", lambda: weights_for_samples(Checkpointed(), torch.randn(2, SAMPLES, 4))),
    Row("tied weights", lambda: weights_for_samples(Tied(), torch.randn(2, SAMPLES, 4))),
    Row("a penalty over a list of parameters", penalty_over_parameters),
    Row("a layer that some steps leave out", unused_in_some_steps),
    Row("a line in the loop that reads `model` (EMA)", perceptron, "average"),
    Row("attention (`nn.TransformerEncoderLayer`)",
        lambda: weights_for_samples(Attention(), torch.randn(2, SAMPLES, 3, 4)), remedy="sdpa_kernel(MATH)"),
    Row("`nn.LSTM`", lambda: weights_for_samples(Recurrent(), torch.randn(2, SAMPLES, 3, 4))),
    Row("`weight_norm`", lambda: weights_for_samples(weight_norm(), torch.randn(2, SAMPLES, 4))),
    Row("`nn.Embedding` with padding", lambda: weights_for_samples(Bag(), words())),
    Row("`.detach()` in the loss", detached),
]  # fmt: skip


def built(make: Callable[[], Loop], seed: int = 0, values: Sequence[Tensor] = ()) -> Loop:
    """The same loop from every call, with these values of its outer variables."""
    torch.manual_seed(seed)
    loop = make()
    with torch.no_grad():
        for x, value in zip(loop.lam, values, strict=bool(values)):
            x.copy_(value)
    torch.manual_seed(seed + 1)  # of what the loop draws
    return loop


@functools.cache
def truth(make: Callable[[], Loop], seed: int = 0, eps: float = 1e-5) -> Tensor:
    """The hypergradient by central differences of the plain loop, number by number."""
    start = [x.detach() for x in built(make, seed).lam]

    def at(tensor: int, place: int, step: float) -> float:
        values = [x.clone() for x in start]
        values[tensor].view(-1)[place] += step
        return built(make, seed, values).plain()

    places = [(n, i) for n, x in enumerate(start) for i in range(x.numel())]
    return torch.tensor([(at(n, i, eps) - at(n, i, -eps)) / (2 * eps) for n, i in places])


# --- the libraries ----------------------------------------------------------------------------------------------


def ours(loop: Loop) -> Grads:
    optimizer = loop.optimizer()
    optimizer.param_groups[0].update(loop.learnt)
    with bilevel.inner(loop.model, loop.h, loop.g, solver="gd", optimizer=optimizer, clip=loop.clip) as handle:
        for batch in loop.batches:
            handle.step(*batch, outer=loop.val)
            loop.after_step()
        return list(handle.hypergrad(loop.lam))


def clipped(grads: Iterable[Tensor], limit: float) -> Grads:
    """clip_grad_norm_ as a formula that can be differentiated."""
    grads = list(grads)
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    return [grad * (limit / (norm + 1e-6)).clamp(max=1) for grad in grads]


def higher(loop: Loop) -> Grads:
    options: dict[str, Any] = {"override": {name: [x] for name, x in loop.learnt.items()}} if loop.learnt else {}
    limit = loop.clip
    clip: Any = None if limit is None else lambda grads: clipped(grads, limit)
    context = quietly("higher").innerloop_ctx(loop.model, loop.optimizer(), copy_initial_weights=False, **options)
    with context as (fast, optimizer):
        for batch in loop.batches:
            optimizer.step(loop.h(fast, *batch), grad_callback=clip)
            loop.after_step()
        return list(torch.autograd.grad(loop.g(fast, *loop.val), loop.lam))


def torchopt(loop: Loop) -> Grads:
    library = quietly("torchopt")
    options = {**loop.options, **loop.learnt}
    if loop.kind is not torch.optim.SGD:
        options["moment_requires_grad"] = True  # else the first moments are cut off
    if loop.clip is not None:
        chain = library.combine.chain(library.clip.clip_grad_norm(max_norm=loop.clip), library.sgd(**options))
        optimizer = library.MetaOptimizer(loop.model, chain)
    else:
        optimizer = getattr(library, f"Meta{loop.kind.__name__}")(loop.model, **options)
    before = library.extract_state_dict(loop.model, by="copy")  # with running statistics of its own
    for batch in loop.batches:
        optimizer.step(loop.h(loop.model, *batch))
        loop.after_step()
    grads = torch.autograd.grad(loop.g(loop.model, *loop.val), loop.lam)
    library.recover_state_dict(loop.model, before)
    return list(grads)


def learn2learn(loop: Loop) -> Grads:
    if loop.kind is not torch.optim.SGD or loop.options.keys() != {"lr"}:
        raise NotThereError("its rule is a plain gradient step with one rate, or one for each weight")
    algorithms, lr = quietly("learn2learn.algorithms"), {**loop.options, **loop.learnt}["lr"]
    learner = algorithms.MAML(loop.model, lr=lr, allow_unused=True).clone()
    for batch in loop.batches:
        loss = loop.h(learner, *batch)
        if loop.clip is None:
            learner.adapt(loss)
        else:  # the two lines that `adapt` stands for, with a third between them
            grads = torch.autograd.grad(loss, list(learner.parameters()), create_graph=True)
            quietly("learn2learn.algorithms.maml").maml_update(learner, lr, clipped(grads, loop.clip))
        loop.after_step()
    return list(torch.autograd.grad(loop.g(learner, *loop.val), loop.lam))


class Functional:
    """What a loss sees of Betty's problem: callable, with parameters and a mode."""

    def __init__(self, problem: Any) -> None:
        self.problem = problem

    def __call__(self, *args: Any) -> Any:
        return self.problem.fmodule(self.problem.params, self.problem.buffers, *args)

    def parameters(self) -> Any:
        return self.problem.params

    def train(self, mode: bool) -> None:
        self.problem.fmodule.train(mode)


def betty(loop: Loop) -> Grads:
    engines, configs, problems = (quietly(f"betty.{name}") for name in ("engine", "configs", "problems"))
    found: Grads = []

    class Inner(problems.IterativeProblem):
        def training_step(self, batch: Any) -> Tensor:
            if self.count > 1:
                loop.after_step()
            return loop.h(Functional(self), *batch)

    class Outer(problems.ImplicitProblem):
        def training_step(self, batch: Any) -> Tensor:
            loop.after_step()
            return loop.g(Functional(self.inner), *batch)

        def trainable_parameters(self) -> Grads:
            return loop.lam

        def optimizer_step(self, *_: Any, **__: Any) -> None:
            found.extend(torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in loop.lam)

    steps, holder = len(loop.batches), nn.ParameterList([torch.zeros(1)])  # it wants a module and an optimizer for λ
    optimizer = loop.optimizer()
    optimizer.param_groups[0].update(loop.learnt)
    config = configs.Config(unroll_steps=steps, retain_graph=True, gradient_clipping=loop.clip or 0.0)
    inner = Inner("inner", config, loop.model, optimizer, train_data_loader=loop.batches, device="cpu")
    idle, config = torch.optim.SGD(holder.parameters(), lr=0.0), configs.Config(first_order=False)
    outer = Outer("outer", config, holder, idle, train_data_loader=[loop.val], device="cpu")
    order = {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}}
    engines.Engine([outer, inner], configs.EngineConfig(train_iters=steps), order).run()
    return found


def hypertorch_maps(loop: Loop) -> tuple[list[Any], Grads, Callable[..., Tensor]]:
    """Its update maps, one for each step; the start; and g. All are functions of lists of tensors."""
    optimizers = quietly("hypergrad.diff_optimizers")
    options = {**loop.options, **loop.learnt}
    if loop.kind is not torch.optim.SGD:
        raise NotThereError("it has plain steps, momentum and the heavy ball; another rule is yours to write")
    if loop.clip is not None:
        raise NotThereError("its optimizers do not clip; a map that does is yours to write")
    host = Host(loop.model)
    names, start = zip(*host.named_parameters(), strict=True)
    buffers = {name: x.clone() for name, x in host.named_buffers()}

    def at(loss: Callable[..., Tensor], w: Grads, batch: tuple[Any, ...]) -> Tensor:
        return torch.func.functional_call(host, {**dict(zip(names, w, strict=True)), **buffers}, (loss, batch))

    def h(w: Grads, _: Any, batch: tuple[Any, ...]) -> Tensor:
        loss = at(loop.h, w, batch)
        decay = options.get("weight_decay")
        return loss if decay is None else loss + decay / 2 * sum(x.square().sum() for x in w)

    def phi(batch: tuple[Any, ...]) -> Any:
        if "momentum" in options:
            return optimizers.Momentum(
                h, lambda _: options["lr"], lambda _: options["momentum"], itertools.repeat(batch)
            )
        return optimizers.GradientDescent(h, lambda _: options["lr"], itertools.repeat(batch))

    made = {id(batch): phi(batch) for batch in loop.batches}  # each keeps the graph of its last loss
    maps = [made[id(batch)] for batch in loop.batches]
    w = maps[0].get_opt_params([x.detach().clone().requires_grad_() for x in start])
    return maps, w, lambda w, _: at(loop.g, w[: len(names)], loop.val)


def hypertorch(loop: Loop) -> Grads:
    """`reverse_unroll`: the graph of the whole loop."""
    maps, w, g = hypertorch_maps(loop)
    for phi in maps:
        w = phi(w, loop.lam)
        loop.after_step()
    return list(quietly(HYPERTORCH).reverse_unroll(w, loop.lam, g, set_grad=False))


def hypertorch_reverse(loop: Loop) -> Grads:
    """`reverse`: the iterates, and each step once more."""
    maps, w, g = hypertorch_maps(loop)
    history = [w]
    for phi in maps:
        w = phi([x.detach().requires_grad_() for x in w], loop.lam, create_graph=False)
        history.append([x.detach() for x in w])
    return list(quietly(HYPERTORCH).reverse(history, loop.lam, maps, g, set_grad=False))


class BoatProblem:
    """The loop as benchmarks.runners.boat wants it. It calls the losses: that is where a user's line can stand."""

    def __init__(self, loop: Loop) -> None:
        self.model, self.outer, self.g, self.steps = loop.model, loop.lam, loop.g, len(loop.batches)
        self.loop = loop

    def h(self, model: Any, *batch: Any) -> Tensor:
        self.loop.after_step()
        return self.loop.h(model, *batch)

    def batches(self) -> Any:
        return self.loop.batches, self.loop.val

    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.loop.optimizer()
        optimizer.param_groups[0].update(self.loop.learnt)
        return optimizer


def boat(loop: Loop) -> Grads:
    if loop.clip is not None:
        raise NotThereError("it takes higher's optimizers without a way to clip")
    return runners.boat(BoatProblem(loop))()  # type: ignore[arg-type]


@dataclass(frozen=True)
class Library:
    how: Callable[[Loop], Grads]
    module: str = ""
    package: str = ""  # its name on the index

    def version(self) -> str:
        if self.module.startswith("hypergrad"):
            command = ["git", "-C", os.environ["HYPERTORCH"], "log", "-1", "--format=%h of %cs"]
            return "commit " + subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return importlib.metadata.version(self.package)


OURS = "bilevel_plugin"
LIBRARIES = {
    OURS: Library(ours, package=OURS),
    "higher": Library(higher, "higher", "higher"),
    "TorchOpt": Library(torchopt, "torchopt", "torchopt"),
    "Betty": Library(betty, "betty", "betty-ml"),
    "learn2learn": Library(learn2learn, "learn2learn", "learn2learn"),
    "hypertorch": Library(hypertorch, HYPERTORCH),
    "BOAT": Library(boat, "boat_torch", "boat-torch"),
}
SECOND = {"hypertorch": hypertorch_reverse}  # another way that the library has; the better one counts

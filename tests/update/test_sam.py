"""bilevel.sam: the end of a plain loop with SAM's two gradients, and differences of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import every_plan
from plain_loop import assert_same, tensors
from problems import differences, refused
from torch import nn

import bilevel_plugin as bilevel

pytestmark = pytest.mark.usefixtures("double")

SAMPLES, STEPS = 6, 4


class Net(nn.Module):
    """BatchNorm in training mode in h, dropout, and two parts."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def recurrent() -> nn.Module:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x.unsqueeze(-1))[0][:, -1])

    return Rows()


def tied() -> nn.Module:
    model = Net(nn.Tanh(), nn.Linear(4, 3, bias=False), nn.Linear(3, 4))
    model.encoder[2].weight = nn.Parameter(torch.randn(3, 4))
    model.encoder[3].weight = nn.Parameter(torch.randn(4, 3))
    model.again = model.encoder[3]
    return model


MODELS = {
    "plain": Net,
    "batchnorm and dropout": lambda: Net(nn.BatchNorm1d(4), nn.Dropout(0.3)),
    "recurrent": recurrent,
    "one submodule in two places": tied,
}
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05, eps=0.1),
}


def sam_step(model: nn.Module, held: list[nn.Parameter], loss: Any, rho: float, adaptive: bool, optimizer: Any) -> None:
    """As the public implementations write it: first step, second step."""
    optimizer.zero_grad()
    loss().backward(inputs=list(model.parameters()))
    with torch.no_grad():
        scaled = [(p.abs() if adaptive else 1.0) * p.grad for p in held]
        scale = rho / (torch.stack([x.norm() for x in scaled]).norm() + 1e-12)
        old = [p.clone() for p in held]
        for p in held:
            p.add_((p.square() if adaptive else 1.0) * p.grad * scale)
    optimizer.zero_grad()
    loss().backward(inputs=list(model.parameters()))
    with torch.no_grad():
        for p, x in zip(held, old, strict=True):
            p.copy_(x)
    optimizer.step()


class Run:
    """The loop by hand and in a block, with a weight for each sample and the length ρ as outer variables."""

    def __init__(self, name: str, optimizer: str = "momentum", adaptive: bool = False, part: str = "") -> None:
        self.name, self.optimizer, self.adaptive, self.part = name, optimizer, adaptive, part
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 3, generator=generator)
        self.y = torch.randint(2, (SAMPLES,), generator=generator)
        self.lam = torch.linspace(-1, 1, SAMPLES).requires_grad_()
        self.rho = torch.tensor(0.2, requires_grad=True)

    def made(self) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = MODELS[self.name]()
        held = list(getattr(model, self.part).parameters() if self.part else model.parameters())
        return model, held, OPTIMIZERS[self.optimizer](held)

    def h(self, model: nn.Module) -> torch.Tensor:
        model.train()
        return (self.lam.exp() * F.cross_entropy(model(self.x), self.y, reduction="none")).mean()

    def g(self, model: nn.Module) -> torch.Tensor:
        model.eval()
        return F.cross_entropy(model(self.x[:4]), self.y[:4])

    def plain(self) -> tuple[dict[str, torch.Tensor], float]:
        model, held, optimizer = self.made()
        torch.manual_seed(1)
        for _ in range(STEPS):
            sam_step(model, held, lambda: self.h(model), float(self.rho.detach()), self.adaptive, optimizer)
        return tensors(model), float(self.g(model).detach())

    def agree(self, engine: Any, **more: Any) -> None:
        model, _, optimizer = self.made()
        over = getattr(model, self.part) if self.part else None
        loss = bilevel.sam(self.h, self.rho, over=over, adaptive=self.adaptive)
        torch.manual_seed(1)
        options = {"solver": "gd", "optimizer": optimizer, "engine": engine, **more}
        with bilevel.inner(model, loss, self.g, **options) as loop:
            loop.run(STEPS)
            assert_same(tensors(model), self.plain()[0], bits=False)
            grads = loop.hypergrad([self.lam, self.rho])
        for x, grad in zip((self.lam, self.rho), grads, strict=True):
            v = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
            true = differences(lambda: self.plain()[1], x, v)
            assert float((grad * v).sum()) == pytest.approx(true, rel=1e-6, abs=1e-6 * float(grad.norm()))


@pytest.mark.parametrize("name", MODELS)
def test_sam_is_the_plain_loop(name, engine):
    Run(name).agree(engine, check=False)


@every_plan
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plans_and_optimizers(optimizer, adaptive, engine):
    """With the sentinel, whose warnings are errors here."""
    Run("plain", optimizer, adaptive).agree(engine)


@pytest.mark.parametrize("part", ["head", "encoder"])
def test_a_part_of_the_model(part, engine):
    """The optimizer holds the part, and the part is perturbed; the other one is an outer variable, or constant."""
    Run("plain", part=part).agree(engine)


def test_blocks_and_compiled_steps_fall_back():
    with pytest.warns(UserWarning, match="stop_gradient"):
        Run("plain").agree(bilevel.Reverse(blocks="auto"))


def test_outside_of_a_block_it_is_the_gradient_of_sam():
    run = Run("plain")
    model, held, _ = run.made()
    bilevel.sam(run.h, 0.2)(model).backward(inputs=held)
    ours = [p.grad.clone() for p in held]
    sam_step(model, held, lambda: run.h(model), 0.2, False, torch.optim.SGD(held, 0.0))
    for g, p in zip(ours, held, strict=True):
        torch.testing.assert_close(g, p.grad)


def test_batches_by_position_and_by_name_and_what_h_returns_beside_its_value():
    run = Run("plain")
    model, _, _ = run.made()

    def h(m, x, *, scale):
        return scale * m(x).square().mean(), m(x)

    with bilevel.inner(model, bilevel.sam(h, 0.1), solver="gd", lr=0.1) as loop:
        found = loop.step(run.x, scale=2.0)
        assert found.aux.shape == (SAMPLES, 2)
        with refused("missing", "scale"):
            loop.step(run.x)


def test_tasks():
    run = Run("plain")
    model, _, _ = run.made()
    lam = torch.tensor(0.3, requires_grad=True)
    x = torch.randn(2, 5, 3)
    h = bilevel.sam(lambda m, x: (m(x) - lam).square().mean(), 0.1)
    g = lambda m, x: m(x).square().mean()
    found = []
    for i in range(2):
        with bilevel.inner(model, h, g, solver="gd", lr=0.1) as loop:
            loop.run(3, x[i], outer=(x[i],))
            found.append(loop.hypergrad(lam))
    with bilevel.inner(model, h, g, solver="gd", lr=0.1, tasks=2) as loop:
        loop.run(3, x, outer=(x,))
        torch.testing.assert_close(loop.hypergrad(lam), sum(found))


def test_what_is_refused_by_name():
    run = Run("plain")
    model, _, _ = run.made()
    head = torch.optim.SGD(model.head.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"which weights does bilevel.sam perturb\? .*'encoder.0.weight' and 1 more"):
        bilevel.inner(model, bilevel.sam(run.h), run.g, solver="gd", optimizer=head)
    bilevel.inner(model, bilevel.sam(run.h, over=model.head), run.g, solver="gd", optimizer=head)
    bilevel.inner(copy.deepcopy(model), bilevel.sam(run.h, over=[model.head]), run.g, solver="gd", lr=0.1)
    with pytest.raises(TypeError, match=r"bilevel.sam: h must be a loss"):
        bilevel.sam(model.head.weight)
    with pytest.raises(TypeError, match=r"bilevel.sam: over= takes a module"):
        bilevel.sam(run.h, over=[model.head.weight])
    with pytest.raises(ValueError, match=r"bilevel.sam: h does not depend on the weights"):
        bilevel.sam(lambda m: 1.0 * run.rho)(model)

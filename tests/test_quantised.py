"""Quantised layers inside a model whose adapters are trained: refused by name where they have no second derivative."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor:UserWarning",  # deprecated, and still what is in use
    "ignore:.*quantized tensor creation functions:UserWarning",
    "ignore:.*torch.ao.quantization is deprecated:DeprecationWarning",
)
ENGINES = ["reverse", "unroll", "forward"]


class Adapted(nn.Module):
    """A frozen backbone, with a trainable layer before it (if wanted) and one after it."""

    def __init__(self, frozen: nn.Module, before: bool = True) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8) if before else nn.Identity()
        self.backbone = nn.ModuleDict({"attention": nn.ModuleList([nn.Tanh(), frozen])})
        self.after = nn.Linear(8, 2)

    def features(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.backbone["attention"]:
            x = layer(x)
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.features(x))


def dynamic() -> nn.Module:
    """A layer as torch.ao.quantization.quantize_dynamic makes it: 8 bits, for the activations too."""
    layer = nn.Linear(8, 8)
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig  # type: ignore[assignment]
    return torch.ao.nn.quantized.dynamic.Linear.from_float(layer)


def solve(
    model: nn.Module, engine: str = "reverse", prepare: Callable[[Tensor], Tensor] = lambda x: x, **options: Any
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, x_val = torch.randn(2, 20, 8)
    y, y_val = (x[:, 0] > 0).long(), (x_val[:, 0] > 0).long()
    x, x_val = prepare(x), prepare(x_val)
    lam = torch.zeros(20, requires_grad=True)

    def h(model: nn.Module) -> Tensor:
        return (torch.sigmoid(lam) * cross_entropy(model(x), y, reduction="none")).mean()

    def g(model: nn.Module) -> Tensor:
        return cross_entropy(model(x_val), y_val)

    with bilevel.inner(model, h, g, solver="gd", lr=0.5, engine=engine, **options) as loop:
        for _ in range(4):
            loop.step()
        return loop.value.detach(), loop.hypergrad(lam)


# --- torch.ao ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dynamically_quantised_layer_is_named(engine: str) -> None:
    model = Adapted(dynamic())
    before = copy.deepcopy(model.before.weight)
    with pytest.raises(TypeError, match=r"'backbone\.attention\.1' \(Linear of torch\.ao.*quantised(.|\n)*dequantise"):
        solve(model, engine)
    assert torch.equal(model.before.weight, before)


def test_the_remedy_works(double: None) -> None:
    """Dequantised, the layer is a constant matrix, and the hypergradient is right."""
    quantised = dynamic()
    layer = nn.Linear(8, 8)
    layer.load_state_dict({"weight": quantised.weight().dequantize().double(), "bias": quantised.bias().double()})
    model = Adapted(layer.requires_grad_(False))
    lam = torch.zeros(6, requires_grad=True)
    x, y = torch.randn(6, 8), torch.tensor([0, 1, 0, 1, 1, 0])
    h = lambda m: (torch.sigmoid(lam) * cross_entropy(m(x), y, reduction="none")).mean()
    report = bilevel.gradcheck(model, h, lambda m: cross_entropy(m(x), 1 - y), lam, solver="gd", lr=0.5)
    assert report, report


@pytest.mark.parametrize("engine", ENGINES)
def test_one_before_all_that_is_trained_is_a_constant(engine: str) -> None:
    """Nothing is differentiated through it: the result is that of features which were computed once."""
    model = Adapted(dynamic(), before=False)
    value, grad = solve(model, engine, check=False)  # the sentinel wants float64, which the layer does not take
    head = nn.Sequential(copy.deepcopy(model.after))
    expected = solve(head, engine, prepare=lambda x: model.features(x).detach())
    assert torch.equal(value, expected[0])
    torch.testing.assert_close(grad, expected[1])
    assert grad.norm() > 1e-3


# --- as bitsandbytes has it -------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """x·Wᵀ with W in 8 bits: the backward is a product too, which autograd can differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return x @ (codes.to(x.dtype) * scale).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        codes, scale = ctx.saved_tensors
        return grad @ (codes.to(grad.dtype) * scale), None, None


class _ProductOnce(_Product):
    """The same by a kernel that autograd can't look into."""

    backward = staticmethod(once_differentiable(_Product.backward))


def eight_bits(function: type[torch.autograd.Function], dequantised: bool = False) -> nn.Module:
    """A layer of a class that says it is of bitsandbytes, or the nn.Linear with its dequantised weights."""

    class Linear8bit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            self.register_buffer("scale", weight.abs().max() / 127)
            self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return function.apply(x, self.weight, self.scale.to(x.dtype))

    Linear8bit.__module__ = "bitsandbytes.nn.modules"
    layer = Linear8bit()
    if not dequantised:
        return layer
    linear = nn.Linear(8, 8, bias=False)
    linear.weight = nn.Parameter((layer.weight * layer.scale).to(linear.weight.dtype), requires_grad=False)
    return linear


@pytest.mark.parametrize("engine", ENGINES)
def test_a_kernel_without_a_second_derivative_is_refused(engine: str) -> None:
    with pytest.raises(RuntimeError, match=r"_ProductOnce, which is marked once_differentiable"):
        solve(Adapted(eight_bits(_ProductOnce)), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_linear_layer_of_bitsandbytes_is_exact(engine: str, double: None) -> None:
    """As its Linear4bit and Linear8bitLt are on the CPU: the frozen weights are a constant matrix, in other bits."""
    torch.manual_seed(0)
    model = Adapted(eight_bits(_Product))
    plain = Adapted(eight_bits(_Product, dequantised=True))
    plain.load_state_dict({n: x for n, x in model.state_dict().items() if "attention" not in n}, strict=False)
    (value, grad), expected = solve(model, engine), solve(plain, engine)
    torch.testing.assert_close(value, expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected[1], rtol=1e-10, atol=1e-14)
    assert grad.norm() > 1e-3

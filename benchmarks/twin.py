"""The problems once more in JAX, from the same numbers: a reference from outside PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .problems import Problem

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jax
    import jax.numpy as jnp
    from jax import lax

Tree = dict[str, Any]


def compiled(p: Problem) -> Callable[[], list[Tensor]]:
    """The hypergradient as one compiled function of (w_0, λ, data), called on arrays that are in place already."""
    if p.outer[0].dtype == torch.float64:
        jax.config.update("jax_enable_x64", True)
    w0 = {n: array(x) for n, x in p.model.named_parameters()}
    names = [n for n, _ in p.encoder.named_parameters()] if p.encoder else ["lam"]
    lam = {n: array(x) for n, x in zip(names, p.outer, strict=True)}
    inner, outer = p.batches()
    last: Any = (array(p.images), array(outer[1])) if p.images is not None else tuple(array(x) for x in outer)
    # a full batch is the same in every step: a constant of the scan, not K copies
    xs: Any = None
    if p.images is not None:
        fixed: Any = (None, array(inner[0][1]), None)
    elif len(inner) == 1:
        fixed = (array(inner[0][0]), array(inner[0][1]), jnp.arange(len(lam["lam"])))
    else:
        fixed = None
        rows = [inner[k % len(inner)] for k in range(p.steps)]
        xs = tuple(jnp.stack([array(row[i]) for row in rows]) for i in range(3))
    losses = few_shot if p.encoder else cleaning

    def value(lam: Tree, w0: Tree, fixed: Any, xs: Any, last: Any) -> Any:
        h, g = losses(p, lam, last)

        def step(w: Tree, batch: Any) -> tuple[Tree, None]:
            grads = jax.grad(h)(w, *(fixed if batch is None else batch))
            return {n: x - p.lr * grads[n] for n, x in w.items()}, None

        return g(lax.scan(step, w0, xs, length=p.steps)[0])

    args = (lam, w0, fixed, xs, last)
    run = jax.jit(jax.grad(value)).lower(*args).compile()

    def once() -> list[Tensor]:
        found = jax.block_until_ready(run(*args))
        return [torch.from_numpy(np.array(found[n])) for n in names]

    return once


def array(x: Tensor) -> Any:
    return jnp.asarray(x.detach().numpy())


def cross_entropy(logits: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[..., 0]


def cleaning(p: Problem, lam: Tree, last: Any) -> tuple[Any, Any]:
    model = {"mlp": mlp, "convolutions": convolutions, "transformer": transformer}[p.kind]

    def h(w: Tree, x: Any, y: Any, i: Any) -> Any:
        return (jax.nn.sigmoid(lam["lam"][i]) * cross_entropy(model(w, x, p.smooth), y)).mean()

    return h, lambda w: cross_entropy(model(w, last[0], p.smooth), last[1]).mean()


def few_shot(p: Problem, lam: Tree, last: Any) -> tuple[Any, Any]:
    images, y = last
    ways = int(p.model.get_parameter("bias").shape[1])
    features = jax.vmap(lambda task: convolutions(lam, task, p.smooth))(images)

    def loss(w: Tree, x: Any, y: Any) -> Any:
        logits = jnp.einsum("tnd,twd->tnw", x, w["weight"]) + w["bias"][:, None]
        return cross_entropy(logits, y).mean(1).sum()

    return lambda w, x, y, i: loss(w, features[:, :ways], y), lambda w: loss(w, features[:, ways:], y)


def normal(x: Any, axes: Any) -> Any:
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def affine(w: Tree, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def kink(x: Any, smooth: bool) -> Any:
    return jax.nn.softplus(x) if smooth else jax.nn.relu(x)


def mlp(w: Tree, x: Any, smooth: bool) -> Any:
    x = affine(w, "0", x)
    return affine(w, "2", kink(x, smooth)) if "2.weight" in w else x


def convolutions(w: Tree, x: Any, smooth: bool) -> Any:
    """The layers of the torch model by their places in it: convolution, perhaps BatchNorm, kink, pooling; linear.

    Channels last, the one layout for which XLA has fast convolutions on the CPU.
    """
    norm = "1.weight" in w
    stride = 4 if norm else 3
    x = x.transpose(0, 2, 3, 1)
    for k in range(4):
        kernel, bias = w[f"{stride * k}.weight"].transpose(2, 3, 1, 0), w[f"{stride * k}.bias"]
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias
        if norm:
            x = normal(x, (0, 1, 2)) * w[f"{stride * k + 1}.weight"] + w[f"{stride * k + 1}.bias"]
        x = kink(x, smooth)
        n, a, b, c = x.shape
        x = x[:, : a // 2 * 2, : b // 2 * 2].reshape(n, a // 2, 2, b // 2, 2, c)
        x = x.mean((2, 4)) if smooth else x.max((2, 4))
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # in the order of torch's Flatten
    return x if norm else affine(w, "13", x)


def layer_norm(w: Tree, name: str, x: Any) -> Any:
    return normal(x, -1) * w[f"{name}.weight"] + w[f"{name}.bias"]


def transformer(w: Tree, x: Any, smooth: bool, heads: int = 4) -> Any:
    x = affine(w, "embed", x)
    n, t, d = x.shape
    for k in range(sum(name.endswith("qkv.weight") for name in w)):
        at = f"layers.{k}"
        qkv = affine(w, f"{at}.qkv", layer_norm(w, f"{at}.norm1", x)).reshape(n, t, 3, heads, d // heads)
        q, k_, v = qkv.transpose(2, 0, 3, 1, 4)
        weights = jax.nn.softmax(q @ k_.swapaxes(-1, -2) / np.sqrt(d // heads))
        x = x + affine(w, f"{at}.mix", (weights @ v).transpose(0, 2, 1, 3).reshape(n, t, d))
        hidden = affine(w, f"{at}.up", layer_norm(w, f"{at}.norm2", x))
        x = x + affine(w, f"{at}.down", jax.nn.gelu(hidden, approximate=False))
    return affine(w, "out", x.mean(1))

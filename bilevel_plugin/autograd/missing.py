"""What has no second derivative: the nodes of a graph that lack one, and torch's errors about it with their fixes."""

from __future__ import annotations

from typing import Any

from torch.autograd.function import once_differentiable

_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__  # pyright: ignore
SUSPECTS: set[type] = set()  # classes of nodes that must be examined one by one
_HARMLESS: set[type] = set()


class DerivativeWarning(UserWarning):
    """A derivative that a hypergradient depends on is not that of the loss, or could not be checked."""


def is_suspect(kind: type) -> bool:
    """Whether nodes of this class may lack a second derivative; the answer is cached for the class."""
    if kind in _HARMLESS:
        return False
    name, forward = kind.__name__, getattr(kind, "_forward_cls", None)
    suspect = name.startswith(("EmbeddingBag", "EmbeddingBackward", "CtcLoss"))
    suspect = suspect or name in ("CompiledFunctionBackward", "CompiledFunction", "CdistBackward0")
    suspect = suspect or getattr(getattr(forward, "backward", None), "__code__", None) is _ONCE_DIFFERENTIABLE
    (SUSPECTS if suspect else _HARMLESS).add(kind)
    return suspect


def refuse_node(node: Any) -> None:
    name = type(node).__name__
    forward = getattr(type(node), "_forward_cls", None)
    if name.startswith("EmbeddingBackward"):
        if getattr(node, "_saved_scale_grad_by_freq", False):
            raise RuntimeError(
                no_second_derivative("nn.Embedding(scale_grad_by_freq=True)", "scale_grad_by_freq=False")
            )
        return
    if name.startswith("Compiled"):
        raise RuntimeError(
            no_second_derivative("a torch.compile'd function", "the function as it was before compiling")
        )
    if forward is not None:
        raise RuntimeError(
            no_second_derivative(
                f"the autograd.Function {forward.__name__}, which is marked once_differentiable,",
                "a backward in differentiable operations",
            )
        )
    what, instead = next(text for op, text in _MISSING.items() if name.lower().startswith(op))
    raise RuntimeError(no_second_derivative(what, instead))


def no_second_derivative(what: str, instead: str) -> str:
    return (
        f"bilevel.inner: h or g uses {what} and that has no second derivative, or a wrong one.\n"
        f"The hypergradient would be wrong. Use {instead}."
    )


_MISSING = {
    "embeddingbag": ("nn.EmbeddingBag,", "nn.Embedding and a mean or sum over its output"),
    "ctcloss": ("CTCLoss,", "a loss written in differentiable operations (log-sum-exp over the alignments)"),
    "cdist": ("torch.cdist,", "(x[:, None] - y[None]).norm(dim=-1), or squared distances by products"),
}
_UNDERIVED = {  # torch's names of operations in its own errors
    "embedding_bag": _MISSING["embeddingbag"],
    "ctc_loss": _MISSING["ctcloss"],
    "cdist": _MISSING["cdist"],
    "attention": (
        "a fused attention kernel, chosen by sdpa_kernel in the loss,",
        "no choice of kernel in the loss: the block takes the one that has a second derivative",
    ),
    "embedding_sparse": ("an embedding with sparse=True,", "sparse=False"),
}


class explained:
    """A context manager that turns torch's errors about derivatives into errors that name the fix."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None or not issubclass(kind, (RuntimeError, NotImplementedError)):
            return
        text = str(error)
        if "through the graph a second time" in text or "have already been freed" in text:
            raise RuntimeError(
                "bilevel.inner: the graph of a loss, or the graph behind a tensor of the batch, has been freed by an "
                "earlier backward pass. A loss must return its value without calling .backward() or "
                "torch.autograd.grad on it. For a graph behind the batch, pass retain_graph=True to the earlier call. "
                "(torch: Trying to backward through the graph a second time.)"
            ) from error
        if "has been modified by an inplace operation" in text:
            raise RuntimeError(
                "bilevel.inner: a tensor that a graph needs was changed in place after it was used. If a loss uses "
                "what was computed from the weights of the model before the block, which writes to them, compute it "
                f"from their .clone(). Otherwise give the operation that changes a tensor a clone. (torch: {text})"
            ) from error
        if "nested_tensor" in text or "view was created in no_grad mode and is being modified inplace" in text:
            raise RuntimeError(
                no_second_derivative(
                    "an operation on a jagged tensor, such as unbind(),",
                    "its rows x.values() with x.offsets() and engine='reverse', or a padded tensor",
                )
            ) from error
        if "is not implemented" in text or "not differentiable" in text or "does not support" in text:
            for op, (what, instead) in _UNDERIVED.items():
                if op in text:
                    raise RuntimeError(no_second_derivative(what, instead)) from error
            if "derivative for" in text or "not implemented" in text:
                raise RuntimeError(
                    no_second_derivative("an operation,", f"another one in its place. torch says: {text}")
                ) from error

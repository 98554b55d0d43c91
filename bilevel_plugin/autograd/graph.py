"""Graphs of autograd: the leaves they end in, the bytes they keep, and what in them has no second derivative."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

State = dict[str, Tensor]
Pairs = list[tuple[Tensor, Tensor]]  # (a tensor of the user, the leaf that takes its place in a step)
_LEAF = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)
_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__  # pyright: ignore


class DerivativeWarning(UserWarning):
    """A derivative that a hypergradient depends on is not that of the loss, or could not be checked."""


class Gradients:
    """Sums of gradients: `direct` for tensors that the losses use, `cut` for those that a leaf stands in for."""

    def __init__(self) -> None:
        self.direct: dict[int, tuple[Tensor, Tensor]] = {}
        self.cut: dict[int, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def add(sums: dict[int, tuple[Tensor, Tensor]], tensor: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            known = sums.get(id(tensor))
            if known is None:
                sums[id(tensor)] = (tensor, grad.clone())
            elif known[1].layout == grad.layout:
                known[1].add_(grad)
            else:  # the gradient of a sparse tensor may be sparse from one operation and dense from another
                sums[id(tensor)] = (tensor, known[1].to_dense() + grad.to_dense())

    def collect(self, cut: Pairs, wanted: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Add the first gradients to those of the pairs of `cut`, and the others to those of the wanted tensors."""
        for (tensor, _), grad in zip(cut, grads, strict=False):
            self.add(self.cut, tensor, grad)
        for tensor, grad in zip(wanted, grads[len(cut) :], strict=True):
            self.add(self.direct, tensor, grad)

    def values(self) -> list[Tensor]:
        return [grad for _, grad in (*self.direct.values(), *self.cut.values())]


@dataclass
class Traced:
    """The value `to` of a function at the point `at`, together with its graph."""

    at: State
    to: State
    cut: Pairs
    leaves: Sequence[Tensor]
    share: float = 1.0  # the share of this process in a mean over several processes
    retain_graph: bool = True  # whether the graph is used again, or is connected to a graph outside the loop

    def vjp(self, a: State, inputs: Sequence[Tensor] | None, into: Gradients) -> State:
        """Return a·∂to/∂at, and add a·∂to/∂λ to the sums, for `inputs`, or for every leaf if they are None."""
        wanted = self.leaves if inputs is None else inputs
        grads = vjp(self.to, a, [*self.at.values(), *(x for _, x in self.cut), *wanted], self.share, self.retain_graph)
        into.collect(self.cut, wanted, grads[len(self.at) :])
        return {n: grad for n, grad in zip(self.at, grads, strict=False) if grad is not None}


def vjp(
    to: State, a: State, inputs: Sequence[Tensor], share: float = 1.0, retain_graph: bool = True
) -> Sequence[Tensor | None]:
    """Return share·a·∂to for every input; None where nothing depends on it.

    The graph is retained by default, since it may be connected to a graph outside the loop, such as that of an encoder.
    """
    keys = [n for n in a if n in to and to[n].requires_grad]
    if not keys:
        return [None] * len(inputs)
    along = [a[n] if share == 1 else a[n] * share for n in keys]
    with explained():
        grads = grad([to[n] for n in keys], inputs, along, retain_graph=retain_graph)
    return [None if g is None else g.detach() for g in grads]  # a custom backward may leave a graph


def grad(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    along: Sequence[Tensor | None],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Compute torch.autograd.grad while function modes stay on.

    Activation checkpointing runs parts of the model again during the backward pass, and must use the same kernels as
    in the forward pass. torch.autograd.grad itself is a function that modes override, and it runs with the modes off.
    Hooks on the inputs do not run: the result is a part of a gradient, and they are for the whole of it.
    """
    along = [torch.ones_like(x) if a is None else a for x, a in zip(outputs, along, strict=True)]
    run: Any = torch.autograd.graph._engine_run_backward  # pyright: ignore[reportPrivateUsage]
    with without_hooks(inputs):
        return run(tuple(outputs), tuple(along), retain_graph, create_graph, tuple(inputs), True, accumulate_grad=False)


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Generator[None]:
    """Switch off the hooks on the gradients of these tensors (register_hook)."""
    hooks = [x._backward_hooks for x in tensors if x._backward_hooks]
    kept = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, items in zip(hooks, kept, strict=True):
            h.update(items)


def as_leaves(z: State) -> State:
    """The same numbers as new leaves that require grad (integers as they are).

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> bilevel.as_leaves({"weight": torch.ones(2)})
        {'weight': tensor([1., 1.], requires_grad=True)}
    """
    return {n: x.detach().requires_grad_() if x.is_floating_point() else x for n, x in z.items()}


def is_finite(tensors: Iterable[Tensor]) -> bool:
    return all(x.device.type == "meta" or bool(torch.isfinite(x).all()) for x in tensors)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of several tensors as one vector."""
    return torch.stack([torch.linalg.vector_norm(x) for x in tensors]).norm()


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors on the host hold the same bits, NaNs included."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.layout != torch.strided or y.layout != torch.strided:
        return x.layout == y.layout and all(map(same_bits, _parts_of_sparse(x), _parts_of_sparse(y)))
    if x.is_contiguous() and y.is_contiguous():
        return _memcmp(x.data_ptr(), y.data_ptr(), x.nbytes) == 0
    return bool(torch.isclose(x.detach(), y.detach(), rtol=0, atol=0, equal_nan=True).all())


def _parts_of_sparse(x: Tensor) -> tuple[Tensor, ...]:
    if x.layout == torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    return x.ccol_indices(), x.row_indices(), x.values()


_memcmp = (ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)).memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a nested structure of tuples, lists and dicts."""
    leaves = tree if _is_flat(tree) else pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same structure with function(x) in place of every tensor x."""
    if _is_flat(tree):
        return tuple(map(function, tree))
    return pytree.tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def _is_flat(tree: Any) -> bool:
    """Whether it is a plain tuple of tensors, as most batches are, for which pytree would be slow."""
    return type(tree) is tuple and all(isinstance(x, Tensor) for x in tree)


def cut_graph(tree: Any, pairs: Pairs) -> Any:
    """Return the tree with a new leaf in place of every tensor that requires grad; add these pairs to `pairs`."""
    stand_ins = {id(tensor): stand_in for tensor, stand_in in pairs}

    def replace(x: Tensor) -> Tensor:
        if x.requires_grad and id(x) not in stand_ins:
            stand_ins[id(x)] = x.detach().requires_grad_()
            pairs.append((x, stand_ins[id(x)]))
        return stand_ins.get(id(x), x)

    return map_tensors(replace, tree)


# --- the nodes of a graph ---


def nodes(roots: Iterable[Tensor], stop: Collection[Any] = ()) -> Generator[Any]:
    """Yield the nodes of a graph, up to and including those to stop at."""
    stack: list[Any] = [x.grad_fn or get_gradient_edge(x).node for x in roots if x.requires_grad]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if node not in stop:
                stack.extend(edge for edge, _ in node.next_functions)


def find_leaves(
    root: Tensor,
    state: Iterable[Tensor] = (),
    known: Iterable[Tensor] = (),
    *,
    twice: bool = False,
    since: int | None = None,
    older: list[Any] | None = None,
) -> tuple[list[Tensor], bool]:
    """Return the leaves of the graph of root, without the state and the known ones, and whether it uses the state.

    With `twice`, a node that has no second derivative is refused. With `since`, a node that uses the state and is
    older than this sequence number is refused as well; any other node that is older is added to `older`.
    """
    state = tuple(state)
    ids = {id(x) for x in state}
    passed = ids | {id(x) for x in known}
    stop = {x.grad_fn for x in state} - {None}
    found: list[Tensor] = []
    met = False
    for node in nodes([root], stop):
        kind, leaf = type(node), leaf_of(node)
        if leaf is not None:
            met = met or id(leaf) in ids
            if id(leaf) not in passed:
                found.append(leaf)
            continue
        if node in stop:
            met = True
            continue
        if twice and (kind in _SUSPECTS or _is_suspect(kind)):
            _refuse_node(node)
        if since is not None and node._sequence_nr() < since:
            if _reads(node, ids, stop):
                raise ValueError(GRAPH_TO_WEIGHTS)
            if older is not None:
                older.append(node)
    return found, met


GRAPH_TO_WEIGHTS = (
    "bilevel.inner: a loss uses a tensor that was computed from the weights of this loop before the step, and that has "
    "a graph back to them. The step does not differentiate through that graph. Compute the tensor inside h (or g), or "
    ".detach() it if it is meant to be a constant. If it was computed from the weights before the block, "
    "engine='unroll' differentiates through it."
)


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf that a node of a graph accumulates the gradient of; None for any other node."""
    return getattr(node, "variable") if type(node) is _LEAF else None  # noqa: B009 (the annotations do not know it)


def _reads(node: Any, leaves: Collection[int], stop: Collection[Any]) -> bool:
    """Whether a node uses one of these leaves, or an output of one of these nodes."""
    edges = (edge for edge, _ in node.next_functions if edge is not None)
    return any(edge in stop or id(leaf_of(edge)) in leaves for edge in edges)


def reaches(roots: Iterable[Tensor], leaves: Collection[int], stop: Collection[Any], since: int) -> bool:
    """Whether a graph has a node to stop at, or uses one of these leaves by a node not older than `since`."""
    return any(
        node in stop or (node._sequence_nr() >= since and _reads(node, leaves, stop)) for node in nodes(roots, stop)
    )


def reads_since(root: Tensor, leaf: Tensor, state: Iterable[Tensor], since: int) -> bool:
    """Whether a node of the graph, down to the state, uses this leaf and is not older than `since`."""
    stop = {x.grad_fn for x in state} - {None}
    return any(
        node not in stop and node._sequence_nr() >= since and _reads(node, {id(leaf)}, ())
        for node in nodes([root], stop)
    )


def leaves_read_since(roots: Iterable[Tensor], since: int) -> list[Tensor]:
    """Return the leaves that a graph uses by nodes not older than `since`, and by no older ones."""
    found: dict[int, Tensor] = {}
    old: set[int] = set()
    for node in nodes(roots):
        for edge, _ in node.next_functions:
            leaf = leaf_of(edge)
            if leaf is not None:
                found[id(leaf)] = leaf
                if node._sequence_nr() < since:
                    old.add(id(leaf))
    return [x for key, x in found.items() if key not in old]


def has_older_nodes(root: Tensor, since: int) -> bool:
    """Whether the graph of root is connected to a graph that was made before."""
    return any(leaf_of(node) is None and node._sequence_nr() < since for node in nodes([root]))


def sequence_number() -> int:
    """Return the sequence number of the next autograd node of this thread; it grows with every node."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore


_SUSPECTS: set[type] = set()  # classes of nodes that must be examined one by one
_HARMLESS: set[type] = set()


def _is_suspect(kind: type) -> bool:
    """Whether nodes of this class may lack a second derivative; the answer is cached for the class."""
    if kind in _HARMLESS:
        return False
    name, forward = kind.__name__, getattr(kind, "_forward_cls", None)
    suspect = name.startswith(("EmbeddingBag", "EmbeddingBackward", "WeightNormInterface", "CtcLoss"))
    suspect = suspect or name in ("CompiledFunctionBackward", "CompiledFunction", "CdistBackward0")
    suspect = suspect or getattr(getattr(forward, "backward", None), "__code__", None) is _ONCE_DIFFERENTIABLE
    (_SUSPECTS if suspect else _HARMLESS).add(kind)
    return suspect


def _refuse_node(node: Any) -> None:
    name = type(node).__name__
    forward = getattr(type(node), "_forward_cls", None)
    if name.startswith("EmbeddingBackward"):
        if getattr(node, "_saved_scale_grad_by_freq", False):
            raise RuntimeError(
                no_second_derivative("nn.Embedding(scale_grad_by_freq=True)", "scale_grad_by_freq=False")
            )
        return
    if name.startswith("WeightNormInterface"):
        if not _weight_norm_is_right():
            raise RuntimeError(
                no_second_derivative("torch's weight_norm", "a parametrization of your own: g * v / v.norm(...)")
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
        if "is not implemented" in text or "not differentiable" in text or "does not support" in text:
            for op, (what, instead) in _UNDERIVED.items():
                if op in text:
                    raise RuntimeError(no_second_derivative(what, instead)) from error
            if "derivative for" in text or "not implemented" in text:
                raise RuntimeError(
                    no_second_derivative("an operation,", f"another one in its place. torch says: {text}")
                ) from error


_autograd: Any = torch._C._autograd  # pyright: ignore
hooks_on_saved: Callable[[bool], Any] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def checkpointing() -> bool:
    """Whether the code that runs now is under activation checkpointing (torch.utils.checkpoint, not reentrant)."""
    if hooks_on_saved is None:
        return _called_by("torch.utils.checkpoint", sys.maxsize)  # torch 2.6 has no function for the hooks
    hooks = hooks_on_saved(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class FirstLook(TorchFunctionMode):
    """Checks the first evaluation of a loss for operations that its graph does not show.

    Hooks on tensors would be applied to second derivatives too, and are refused. So is activation checkpointing, if
    graphs outlive their step: it runs a part of the model again in the backward pass, when the model holds other
    weights. Leaves that do not require grad are recorded, in case `requires_grad` is set later.
    """

    def __init__(self, noted: dict[int, Any], *, graphs_are_kept: bool) -> None:
        super().__init__()
        self._noted, self._kept = noted, graphs_are_kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._kept and checkpointing():
            raise RuntimeError(_RECOMPUTES)
        if func is Tensor.register_hook:
            raise RuntimeError(
                "bilevel.inner: a loss registers a hook on a tensor, and autograd would apply the hook to second "
                "derivatives as well. Write what the hook does to the gradient as an operation of the loss, or as a "
                "function of the direction (direction=)."
            )
        if func in (Tensor.mul, Tensor.__mul__) and _called_by("torch.amp.grad_scaler"):
            raise RuntimeError(
                "bilevel.inner: a loss is scaled by a GradScaler, and a block has no scaler.step() to undo it, so that "
                "every step would be too long by that factor. Return the loss unscaled, under torch.autocast(dtype="
                "torch.bfloat16), which needs no scaling. In float16, multiply the loss by a number in h, and divide "
                "by it in direction=: lambda d: {n: x / scale for n, x in d.items()}."
            )
        for x in args:
            if isinstance(x, Tensor) and not x.requires_grad and x.is_leaf and x.is_floating_point():
                self._noted[id(x)] = weakref.ref(x)
        return func(*args, **(kwargs or {}))


def _called_by(module: str, callers: int = 6) -> bool:
    """Whether a function of this module is among the last few callers."""
    frame, depth = inspect.currentframe(), 0
    while frame is not None and depth < callers:
        if frame.f_globals.get("__name__") == module:
            return True
        frame, depth = frame.f_back, depth + 1
    return False


_RECOMPUTES = (
    "bilevel.inner: h or g uses activation checkpointing (torch.utils.checkpoint), which runs a part of the model "
    "again in the backward pass. With an engine that keeps graphs, the model holds other weights by then. Use "
    "engine='reverse' without memory= and tasks=, or switch checkpointing off, which saves little memory where the "
    "graphs of all steps are kept."
)


def graph_bytes(to: State, at: State, given: Iterable[Tensor]) -> int:
    """Return the bytes that a graph keeps alive, without those of its result and of the given tensors."""
    excluded = {x.untyped_storage().data_ptr() for x in (*given, *at.values(), *to.values()) if not _is_sparse(x)}
    found: dict[int, int] = {}
    with explained():
        for node in nodes(to.values(), {x.grad_fn for x in at.values()}):
            saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
            for x in tensors_of([*saved, getattr(node, "saved_tensors", ())]):
                if not _is_sparse(x):
                    found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(size for where, size in found.items() if where not in excluded)


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the largest number of bytes, over all devices, that tensors made during `run` hold at the same time."""
    with _PeakBytes() as counted:
        run()
    return counted.peak


class _PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators allocate, until these are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._counted: set[int] = set()
        self._bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tensors_of([args, kwargs]):
            self._add(x, made=False)
        result = func(*args, **(kwargs or {}))
        for x in tensors_of([result]):
            self._add(x, made=True)
        return result

    def _add(self, x: Tensor, made: bool) -> None:
        if _is_sparse(x):
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if made else 0  # pyright: ignore[reportPrivateUsage]
        if key not in self._counted:
            self._counted.add(key)
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
            weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self._bytes -= size


def _is_sparse(x: Tensor) -> bool:
    return x.layout != torch.strided


@functools.cache
def _weight_norm_is_right() -> bool:
    """Test the second derivative of torch's weight_norm, which is wrong on the CPU at least up to torch 2.13."""
    generator = torch.Generator().manual_seed(0)
    v, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (3, 1)))
    inputs = (v.requires_grad_(), g.requires_grad_())
    fused = torch._weight_norm  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return torch.autograd.gradgradcheck(lambda v, g: fused(v, g, 0), inputs, raise_exception=False, atol=1e-4)

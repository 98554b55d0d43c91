"""Graphs of autograd: their nodes, the leaves they end in, and what they reach."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .missing import SUSPECTS, is_suspect, refuse_node

_LEAF = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)


class Boundary(torch.autograd.Function):
    """x itself, whose graph belongs to an earlier place of the loop: a look at the graph of a loss ends here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


_BOUNDARY = type(Boundary.apply(torch.zeros((), requires_grad=True)).grad_fn)  # pyright: ignore


def nodes(roots: Iterable[Tensor], stop: Collection[Any] = ()) -> Generator[Any]:
    """Yield the nodes of a graph, up to and including those to stop at, and boundaries."""
    stack: list[Any] = [x.grad_fn or get_gradient_edge(x).node for x in roots if x.requires_grad]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if node not in stop and type(node) is not _BOUNDARY:
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
            if id(leaf) not in passed and is_outer(leaf):
                found.append(leaf)
            continue
        if node in stop:
            met = True
            continue
        if twice and (kind in SUSPECTS or is_suspect(kind)):
            refuse_node(node)
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


FLAGGED: set[int] = set()  # ids of the leaves that the losses under evaluation have made require grad


def is_outer(leaf: Tensor) -> bool:
    """Whether a leaf was not made by the loss itself, to take a derivative with respect to it."""
    return leaf.requires_grad and id(leaf) not in FLAGGED


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
            if leaf is not None and is_outer(leaf):
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

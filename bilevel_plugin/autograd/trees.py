"""Nested structures of tensors: mapped, made into leaves, cut from their graphs, compared bit by bit."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

State = dict[str, Tensor]
Pairs = list[tuple[Tensor, Tensor]]  # (a tensor of the user, the leaf that takes its place in a step)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a nested structure of tuples, lists and dicts."""
    leaves = tree if _is_flat(tree) else pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same structure with function(x) in place of every tensor x."""
    if _is_flat(tree):
        return tuple(map(function, tree))
    return pytree.tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def with_fresh_containers(tree: Any) -> Any:
    """Return the same leaves in new lists and dicts, which may be changed."""
    if _is_flat(tree):
        return tree
    return pytree.tree_map(lambda x: copy.copy(x) if isinstance(x, (MutableMapping, MutableSequence)) else x, tree)


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


def as_leaves(z: State) -> State:
    """The same numbers as new leaves that require grad (integers as they are).

    Examples:
        >>> import torch, bilevel_plugin as bilevel
        >>> bilevel.as_leaves({"weight": torch.ones(2)})
        {'weight': tensor([1., 1.], requires_grad=True)}
    """
    return {n: x.detach().requires_grad_() if x.is_floating_point() else x for n, x in z.items()}


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

"""Arrays out of other people's pickle files, with nothing run on the way."""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def read_pickle(path: Path) -> Any:
    """What the file holds, if that is NumPy arrays, plain containers, numbers and text; else a ValueError.

    A pickle names the functions that rebuild its objects. Here it can name the ones of NumPy's arrays and two
    containers, and no other: a file that asks for more is refused before anything of it is called.
    """
    if not path.is_file():
        raise FileNotFoundError(f"recipes.data: {path} does not exist")
    try:
        return _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load()  # latin1: files of Python 2
    except _Refused as error:
        raise ValueError(
            f"recipes.data: {path} asks for {error}, which no array needs: it is not read, since a pickle can run any "
            "program. If you trust the file, save its arrays as .npz"
        ) from None
    except Exception as error:  # a damaged stream fails in any of the functions that it calls
        raise ValueError(
            f"recipes.data: {path} is damaged, or no pickle of arrays ({error}); fetch it again"
        ) from error


class _Refused(Exception):
    """The name that a pickle asked for."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        module = module_name.replace("numpy.core.", "numpy._core.")  # its name before NumPy 2
        module = module.replace("__builtin__", "builtins")  # its name in Python 2
        if (module, global_name) not in _ADMITTED:
            raise _Refused(f"{module_name}.{global_name}")
        return _ADMITTED[module, global_name]()


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """What `_codecs.encode` is named for: the bytes of an array, in a pickle of protocol 2."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes encoded in {encoding}")
    return text.encode("latin1")


def _from_buffer(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any, *_: Any) -> Any:
    """What `_frombuffer` does: an array of protocol 5. (np.frombuffer refuses a dtype of objects.)"""
    return np.frombuffer(buffer, dtype).reshape(shape, order=order).copy()


# Made anew on each call: a pickle can set attributes of a Python function that it is given.
_ADMITTED: dict[tuple[str, str], Callable[[], Any]] = {
    ("numpy._core.multiarray", "_reconstruct"): lambda: np.zeros(0).__reduce__()[0],
    ("numpy._core.multiarray", "scalar"): lambda: np.float64(0).__reduce__()[0],  # type: ignore[index]
    ("numpy._core.numeric", "_frombuffer"): lambda: lambda *a: _from_buffer(*a),
    ("numpy", "ndarray"): lambda: np.ndarray,
    ("numpy", "dtype"): lambda: np.dtype,
    ("_codecs", "encode"): lambda: lambda *a: _latin1(*a),
    ("collections", "OrderedDict"): lambda: collections.OrderedDict,
    ("builtins", "set"): lambda: set,
}

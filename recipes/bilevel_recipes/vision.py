"""The one place that imports torchvision."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


def torchvision(part: str) -> ModuleType:
    """Import `torchvision.<part>` ("models", "datasets", "datasets.utils"), also beside a CPU-only torch.

    torchvision from the package index is built for CUDA. Beside a CPU torch its C++ operators do not load,
    and its import then fails on two names that it only wants to register. Declaring their schemas is enough.
    """
    try:
        return importlib.import_module(f"torchvision.{part}")
    except ImportError as error:
        raise ImportError(
            f"recipes: this needs torchvision ({error}); pip install 'bilevel_plugin[recipes]'"
        ) from error
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(f"torchvision.{part}")


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")

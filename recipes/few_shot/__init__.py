"""Few-shot hyper-representation: an encoder for many tasks, a linear head for each (the paper's Figures 4 and 5)."""

from .episodes import Episodes, Images
from .evaluate import evaluate
from .train import Result, meta_train

__all__ = ["Episodes", "Images", "Result", "evaluate", "meta_train"]

"""Few-shot hyper-representation: an encoder for many tasks, a linear head for each (the paper's Figures 4 and 5)."""

from .encoder import Encoder, load_encoder
from .episodes import Episodes, Images, collect_tasks
from .evaluate import evaluate, evaluate_tasks
from .train import Result, meta_train

__all__ = [
    "Encoder", "Episodes", "Images", "Result", "collect_tasks", "evaluate", "evaluate_tasks", "load_encoder",
    "meta_train",
]  # fmt: skip

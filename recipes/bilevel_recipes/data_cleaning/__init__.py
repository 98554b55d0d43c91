"""Data cleaning: find the mislabelled samples (the paper's Table 1 and Figures 1-3)."""

from .clean import Result, clean

__all__ = ["Result", "clean"]

"""Kernels: what takes the place of operations whose second derivative is missing or wrong."""

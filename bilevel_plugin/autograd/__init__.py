"""Autograd: trees of tensors, graphs, derivatives, and the bytes that graphs keep."""

"""The step: what it evaluates, what is recorded of it, and how it is repeated."""

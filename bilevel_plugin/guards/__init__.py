"""Guards: what is refused, or warned of, at each phase of a block."""

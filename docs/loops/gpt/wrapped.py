"""# A GPT

The text comes from several sources. The outer variable is a weight for the loss of each source.

- The loss of a micro-batch becomes `h`, with autocast and the division by the number of micro-batches inside.
  `loop.accumulate` replaces `loss.backward()`, and frees the graph of one micro-batch before the next.
- `loop.step()` without a batch takes the step with the accumulated gradients. There is no `zero_grad`.
- Clipping becomes an argument of the block, since the hypergradient goes through it.
- The block reads AdamW's groups, the rate that the loop writes into them, and the moments that exist already.
- `g` sets eval mode. The block restores training mode after each evaluation of `g`.

**Adam in bf16.** The run continues from a checkpoint that has Adam's moments. In bf16 the small entries of a gradient
are rounding errors, and some are exactly 0. Adam divides by their size: the slope of its *first* step at 0 is 1/ε =
10⁸. From fresh moments the hypergradient of this loop in bf16 is up to 500 times that in float32. From a checkpoint the
two agree to 1 %. If you have no checkpoint, take the first steps before the block, or use a larger `eps`.
"""

from __future__ import annotations

from torch import Tensor, nn

import bilevel_plugin as bilevel

from .setup import MICRO_BATCHES, RESUMED, STEPS, Setup, get_batch, held_out_loss, learning_rate


def train(s: Setup) -> tuple[Tensor, list[Tensor]]:
    model, optimizer, (logits,) = s.model, s.optimizer, s.outer

    def h(model: nn.Module, x: Tensor, y: Tensor, source: Tensor) -> Tensor:
        with s.amp():
            return (logits.softmax(0)[source] * model(x, y)).mean() / MICRO_BATCHES

    def g(model: nn.Module) -> Tensor:
        model.eval()
        return held_out_loss(s)

    model.train()
    with bilevel.inner(model, h, g, solver="gd", optimizer=optimizer, clip=1.0) as loop:
        for k in range(RESUMED, STEPS):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(k)
            for _ in range(MICRO_BATCHES):
                x, y, source = get_batch(s.tokens)
                loop.accumulate(x, y, source)
            loop.step()
        value, grads = loop.value, loop.hypergrad(s.outer)
        loop.commit_()
    return value, grads

"""The example of docs/parallel.md, on as many processes as torchrun starts; prints what rank 0 found."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import bilevel_plugin as bilevel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(5, 2)  # the same start on every rank
torch.manual_seed(1 + dist.get_rank())  # but other data
x, x_val = torch.randn(2, 40, 5)
y, y_val = (x[:, 0] > 0).long(), (x_val[:, 0] > 0).long()


def h(model, x, y):
    decay = sum(p.square().sum() for p in model.parameters())
    return (torch.sigmoid(lam) * cross_entropy(model(x), y, reduction="none")).mean() + mu.exp() * decay


def g(model, x, y):
    return cross_entropy(model(x), y)


lam = torch.zeros(len(x), requires_grad=True)  # weights of this rank's own samples
mu = torch.tensor(-3.0, requires_grad=True)  # a regulariser, the same on all ranks

with bilevel.inner(model, h, g, lr=0.1, group=dist.group.WORLD, local=lam) as loop:
    for _ in range(20):
        loop.step(x, y, outer=(x_val, y_val))  # this rank's share of the data
    loop.backward()  # lam.grad: this rank's; mu.grad: the same on all ranks

print(f"rank {dist.get_rank()}: mu.grad {mu.grad:.6f}, lam.grad {lam.grad.norm():.6f}")
dist.destroy_process_group()

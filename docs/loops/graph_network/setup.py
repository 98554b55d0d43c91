"""A graph network (GCN) with a sparse adjacency, dropout and Adam; the outer variable weighs each edge of the graph."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GCN(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.second = nn.Linear(hidden, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.relu(torch.sparse.mm(adjacency, self.first(x)))
        return F.log_softmax(torch.sparse.mm(adjacency, self.second(self.dropout(x))), dim=1)


class Setup(NamedTuple):
    model: GCN
    features: Tensor
    edges: Tensor  # two rows: to, from
    labels: Tensor
    train: Tensor  # the numbers of the nodes
    val: Tensor
    edge_weight: Tensor  # an edge counts by the sigmoid of this

    @property
    def outer(self) -> list[Tensor]:
        return [self.edge_weight]


def normalised(edges: Tensor, weight: Tensor, nodes: int) -> Tensor:
    """D⁻¹ᐟ²(A + I)D⁻¹ᐟ² as a sparse matrix, where the edges of A have these weights."""
    loops = torch.arange(nodes)
    to, source = torch.cat([edges, torch.stack([loops, loops])], dim=1)
    values = torch.cat([weight, weight.new_ones(nodes)])
    scale = values.new_zeros(nodes).index_add(0, to, values).rsqrt()
    values = scale[to] * values * scale[source]
    return torch.sparse_coo_tensor(torch.stack([to, source]), values, (nodes, nodes), check_invariants=True)


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(1)
    nodes, classes = 40, 3
    labels = torch.randint(classes, (nodes,))
    features = F.one_hot(labels, classes).to(dtype) + torch.randn(nodes, classes, dtype=dtype)
    alike = labels[:, None] == labels
    edges = (torch.rand(nodes, nodes) < torch.where(alike, 0.2, 0.05)).fill_diagonal_(False).nonzero().T
    weight = torch.full((edges.shape[1],), 2.0, dtype=dtype, requires_grad=True)
    order = torch.randperm(nodes)
    model = GCN(classes, 16, classes).to(dtype)
    return Setup(model, features, edges, labels, order[:20], order[20:], weight)

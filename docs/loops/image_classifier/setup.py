"""A convolutional classifier of images with Adadelta and StepLR; the outer variable weighs each training sample."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(8 * 3 * 3, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class Setup(NamedTuple):
    model: Net
    train_loader: DataLoader  # images, labels, and the numbers of the samples
    test_loader: DataLoader
    weight: Tensor  # a sample counts by the sigmoid of this

    @property
    def outer(self) -> list[Tensor]:
        return [self.weight]


def make(dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(1)
    patterns = torch.randn(4, 1, 10, 10, dtype=dtype)  # one for each class

    def images(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(4, (n,))
        return patterns[labels] + torch.randn(n, 1, 10, 10, dtype=dtype), labels

    training = TensorDataset(*images(64), torch.arange(64))
    return Setup(
        Net().to(dtype),
        DataLoader(training, batch_size=16, shuffle=True),
        DataLoader(TensorDataset(*images(40)), batch_size=20),
        torch.zeros(64, dtype=dtype, requires_grad=True),
    )

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bilevel_recipes.vision import torchvision


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of torchvision's with random weights, as its state dict."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = torchvision("models").resnet18(weights=None)
    file = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(model.state_dict(), file)
    return file

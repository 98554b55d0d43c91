"""Features of images by a trained torchvision or timm model whose weights are on disk; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from ..vision import torchvision

_BATCH = 32


@dataclass(frozen=True)
class Backbone:
    """A model without its last layer, and the form of its images.

    head: the name of the removed layer. cached: where the model's library puts downloaded weights.
    height, width: in pixels. mean, deviation: mean and standard deviation of each colour, for values from 0 to 1.
    """

    model: nn.Module
    head: str
    cached: Path
    height: int
    width: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def encode(content: Any, name: str, weights: str | Path | None, quiet: bool) -> tuple[NDArray[np.float32], str]:
    """Return the standardised outputs of the model before its last layer, and a sentence that describes them.

    name: "torchvision:resnet18" or "timm:resnet10t". weights: a .pt, .pth or .safetensors file with a state dict.
    """
    backbone, file = load(name, weights)
    x = _run(backbone, content, name, quiet)
    words = f"The features are the {x.shape[1]} outputs before the last layer of {name} ({file.name}), standardised."
    return x, words


def build(name: str) -> Backbone:
    """Return the model called "torchvision:resnet18" or "timm:resnet10t", with random weights."""
    library, _, model = name.partition(":")
    if library not in _LIBRARIES:
        raise ValueError(f"bilevel-clean: there are no features {name!r}; choose torchvision:NAME or timm:NAME.")
    return _LIBRARIES[library](model)


def load(name: str, weights: str | Path | None) -> tuple[Backbone, Path]:
    """Return the model with its weights, and their file: `weights`, or the one in the cache of its library."""
    backbone = build(name)
    file = backbone.cached if weights is None else Path(weights)
    if weights is not None and not file.is_file():
        state = "is a folder" if file.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"bilevel-clean: the file of the weights of {name}, {file}, {state}; name the file that has them with "
            "--weights FILE. Nothing is downloaded."
        )
    if not file.is_file():
        raise FileNotFoundError(
            f"bilevel-clean: the weights of {name} are not on disk, and nothing is downloaded; put them at "
            f"{file}, or name the file that has them with --weights FILE."
        )
    _load(backbone, file, name)
    return backbone, file


def resized(content: Any, height: int, width: int, colour: bool = False) -> NDArray[np.uint8]:
    """Return all images as one array of that size, in colour if `colour` says so or one of them is."""
    colour = colour or any(image.ndim == 3 for image in content)
    mode = "RGB" if colour else "L"
    if isinstance(content, np.ndarray) and content.shape[1:3] == (height, width) and colour == (content.ndim == 4):
        return content
    images = (Image.fromarray(image).convert(mode) for image in content)
    return np.stack([np.asarray(i.resize((width, height), Image.Resampling.BILINEAR)) for i in images])


def _from_torchvision(name: str) -> Backbone:
    models = torchvision("models")
    if name not in models.list_models(module=models):
        raise ValueError(f"bilevel-clean: torchvision has no classifier {name!r}; list them with list_models().")
    model = models.get_model(name, weights=None)
    layers = [layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ValueError(f"bilevel-clean: {name} does not end with a linear layer; choose another torchvision model.")
    model.set_submodule(layers[-1], nn.Identity())
    published = models.get_model_weights(name).DEFAULT
    preset: Any = published.transforms()
    cached = Path(torch.hub.get_dir()) / "checkpoints" / published.url.rpartition("/")[2]
    side = preset.crop_size[0]
    return Backbone(model, layers[-1], cached, side, side, tuple(preset.mean), tuple(preset.std))


def _from_timm(name: str) -> Backbone:
    try:
        import timm
        from timm.data.config import resolve_model_data_config
    except ImportError as error:
        raise ImportError(
            f"bilevel-clean: features 'timm:{name}' need timm ({error}); pip install 'bilevel_plugin[backbones]'."
        ) from error
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.partition('.')[0]}*")[:5]) or "timm.list_models()"
        raise ValueError(f"bilevel-clean: timm has no model {name!r}; look among {near}.")
    model: Any = timm.create_model(name, pretrained=False, num_classes=0)
    config: Any = resolve_model_data_config(model)
    cached = _timm_cache(model.pretrained_cfg, name)
    _, height, width = config["input_size"]
    head = str(model.pretrained_cfg["classifier"])
    return Backbone(model, head, cached, height, width, tuple(config["mean"]), tuple(config["std"]))


def _timm_cache(config: dict[str, Any], name: str) -> Path:
    """Return the file in the cache of Hugging Face, or else its place among the downloads of torch."""
    from huggingface_hub import try_to_load_from_cache  # a requirement of timm

    found = try_to_load_from_cache(config["hf_hub_id"], "model.safetensors") if config.get("hf_hub_id") else None
    return Path(found) if isinstance(found, str) else Path(torch.hub.get_dir()) / "checkpoints" / f"{name}.safetensors"


def _load(backbone: Backbone, file: Path, name: str) -> None:
    """Load the weights of all layers but the last. A file of another model is refused."""
    state = _read(file)
    wanted = backbone.model.state_dict()
    rest = {key: value for key, value in state.items() if not key.startswith(f"{backbone.head}.")}
    wrong = [key for key in sorted(wanted.keys() | rest.keys()) if _shape(wanted, key) != _shape(rest, key)]
    if wrong:
        key = wrong[0]
        raise ValueError(
            f"bilevel-clean: {file} does not hold the weights of {name}: {len(wrong)} of {len(wanted)} tensors differ, "
            f"for instance {key}, of shape {_shape(rest, key)} in the file and {_shape(wanted, key)} in the model."
        )
    backbone.model.load_state_dict(rest)


def _shape(state: dict[str, Tensor], key: str) -> tuple[int, ...] | None:
    return tuple(state[key].shape) if key in state else None


def _read(file: Path) -> dict[str, Tensor]:
    """Return a state dict, which may be the state_dict or the model of a checkpoint. Nothing is unpickled."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except ImportError:
        raise
    except Exception as error:  # both readers raise a dozen kinds on what is damaged, some with bad advice
        raise ValueError(
            f"bilevel-clean: {file} can't be read as weights: it is damaged, or holds more than tensors; write it with "
            "torch.save(model.state_dict(), FILE)."
        ) from error
    if isinstance(found, dict):
        found = next((found[key] for key in ("state_dict", "model") if key in found), found)
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(
            f"bilevel-clean: {file} holds no state dict; write it with torch.save(model.state_dict(), FILE)."
        )
    return {key.removeprefix("module."): value for key, value in found.items()}


@torch.no_grad()
def _run(backbone: Backbone, content: Any, name: str, quiet: bool) -> NDArray[np.float32]:
    backbone.model.eval()
    mean, deviation = (255 * torch.tensor(part)[:, None, None] for part in (backbone.mean, backbone.deviation))
    parts: list[Tensor] = []
    for start in tqdm(range(0, len(content), _BATCH), desc=name, unit="batch", disable=quiet):
        images = resized(content[start : start + _BATCH], backbone.height, backbone.width, colour=True)
        x = torch.from_numpy(images).permute(0, 3, 1, 2)
        parts.append(backbone.model((x - mean) / deviation).flatten(1))
    return torch.cat(parts).numpy()


_LIBRARIES: dict[str, Callable[[str], Backbone]] = {"torchvision": _from_torchvision, "timm": _from_timm}

"""A trained encoder as two files: its weights in encoder.safetensors, and all else in encoder.json."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from .. import runs
from ..clean import backbones
from ..clean.pictures import Picture, as_array, read_pictures
from ..models import ENCODERS, build_encoder
from .collection import Look, own_prefix, resize, without_prefix
from .heads import Head
from .train import prepare

WEIGHTS, ABOUT = "encoder.safetensors", "encoder.json"
LARGEST = 256, 1024  # pixels: the largest side of an encoder of our own, and of a torchvision or timm model
FORMAT = 1  # the format of encoder.json; a file with another number is refused
Read = str | Path | Image.Image | NDArray[np.uint8]


@dataclass(frozen=True)
class Spec:
    """All that an encoder is rebuilt from, besides its weights.

    architecture: a name of `models.ENCODERS`, torchvision:NAME or timm:NAME. height, width: of its images, in pixels.
    channels: 1 or 3. mean, deviation: of each channel, for values from 0 to 255.
    """

    architecture: str
    height: int
    width: int
    channels: int
    mean: list[float]
    deviation: list[float]
    head: Head
    about: dict[str, Any] = field(default_factory=dict[str, Any])


class Encoder(nn.Module):
    """An encoder of pictures: `encoder(encoder.prepare(pictures))` are their features."""

    def __init__(self, body: nn.Module, spec: Spec) -> None:
        super().__init__()
        self.body, self.spec = body, spec
        scale = torch.tensor([spec.mean, spec.deviation])[:, :, None, None]
        self.register_buffer("scale", scale, persistent=False)  # it is in encoder.json

    @property
    def look(self) -> Look:
        return Look(self.spec.height, self.spec.width, self.spec.channels == 3)

    def prepare(self, pictures: Sequence[Read]) -> Tensor:
        """Return pictures as N × channels × height × width, normalised as the encoder wants them.

        A picture is a path, a PIL image, or a uint8 array of H × W or H × W × 3; its size and colour are any.
        """
        x = torch.from_numpy(resize([_picture(one) for one in pictures], self.look))
        x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)
        scale: Any = self.scale
        return (x.to(scale.device) - scale[0]) / scale[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)

    @torch.no_grad()
    def encode(self, pictures: Sequence[Read], chunk: int = 32) -> NDArray[np.float32]:
        """Return the features of pictures as an array; the encoder has to be in eval mode."""
        parts = [self(self.prepare(pictures[i : i + chunk])) for i in range(0, len(pictures), chunk)]
        return torch.cat(parts).float().cpu().numpy()


def _picture(one: Read) -> Picture:
    if isinstance(one, Image.Image):
        return as_array(one.copy())
    if isinstance(one, np.ndarray):
        if one.dtype != np.uint8 or one.ndim not in (2, 3) or (one.ndim == 3 and one.shape[-1] != 3) or one.size == 0:
            raise ValueError(
                f"bilevel-fewshot: a picture is a uint8 array of H × W or H × W × 3; got {one.dtype} of {one.shape}."
            )
        return one
    if not isinstance(one, (str, Path)):
        raise TypeError(
            f"bilevel-fewshot: a picture is a path, a PIL image or a uint8 array; got {type(one).__name__}."
        )
    file = Path(one).absolute()
    [found], reasons = read_pictures([file], file.parent, quiet=True)
    if found is None:
        raise ValueError(f"bilevel-fewshot: {one}: {reasons[0]}.")
    return found


def build_body(name: str, shape: tuple[int, int, int], seed: int = 0) -> nn.Module:
    """Return the named architecture with random weights from the seed, checked on one image of this shape."""
    if ":" in name:
        with own_prefix(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body = backbones.build(name).model
    elif name in ENCODERS:
        with own_prefix():
            body = build_encoder(name, shape, seed)
    else:
        raise ValueError(
            f"bilevel-fewshot: there is no encoder {name!r}; choose {', '.join(ENCODERS)}, torchvision:NAME or "
            "timm:NAME."
        )
    check_size(body, name, shape)
    return body


def check_size(body: nn.Module, name: str, shape: tuple[int, int, int], train: bool = False) -> None:
    """Refuse a size or a number of colours that the model can't take, and with `train` also one that can't be trained.

    In training, some models return more than features, and need larger images for that.
    """
    training = body.training
    model = copy.deepcopy(body) if train else body  # in training, BatchNorm's statistics would change
    try:
        with torch.no_grad():
            found = model.train(train)(torch.zeros(2, *shape))
        if not isinstance(found, Tensor):
            raise ValueError(f"in training, it returns {type(found).__name__} instead of features")
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"bilevel-fewshot: {name} can't take images of {shape[1]} × {shape[2]} pixels with {shape[0]} colours "
            f"({str(error).splitlines()[0]}); choose another --image-size or model."
        ) from error
    finally:
        body.train(training)


def save_encoder(folder: Path, body: nn.Module, spec: Spec) -> None:
    """Write encoder.safetensors and encoder.json into the folder, each whole or not at all."""
    from safetensors.torch import save

    content = save({name: value.detach().cpu().contiguous() for name, value in body.state_dict().items()})
    runs.write(folder / WEIGHTS, content)
    about = {"format": FORMAT, "sha256": hashlib.sha256(content).hexdigest(), **asdict(spec)}
    text = json.dumps(about, indent=1, ensure_ascii=False) + "\n"
    runs.write(folder / ABOUT, text.encode("utf-8", "backslashreplace"))  # \udcff in a file name stays JSON


def load_encoder(run: str | Path) -> Encoder:
    """Return the encoder of a run, in eval mode: `encoder(encoder.prepare(pictures))` are the features of pictures.

    run: the folder that `bilevel-fewshot PHOTOS` wrote. Nothing is unpickled.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(run)
    missing = [name for name in (ABOUT, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"bilevel-fewshot: {folder} has no {' and no '.join(missing)}; give the folder of a finished run of "
            "bilevel-fewshot PHOTOS."
        )
    spec, digest = _read_spec(folder / ABOUT)
    content = (folder / WEIGHTS).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(
            f"bilevel-fewshot: {folder / WEIGHTS} is not the file that {ABOUT} was written with; it is damaged, or of "
            "another run. Copy both files from one run."
        )
    try:
        body = build_body(spec.architecture, (spec.channels, spec.height, spec.width))
    except ValueError as error:
        raise ValueError(
            f"bilevel-fewshot: the encoder of {folder / ABOUT} can't be built: {without_prefix(error)}"
        ) from error
    try:
        body.load_state_dict(load(content))
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"bilevel-fewshot: {folder / WEIGHTS} does not hold the weights that {ABOUT} describes, of "
            f"{spec.architecture} for images of {spec.height} × {spec.width} pixels and {spec.channels} channels; copy "
            f"both files from one run, or use the versions named in {ABOUT}."
        ) from error
    return Encoder(body, spec).eval().requires_grad_(False)


def _read_spec(file: Path) -> tuple[Spec, str]:
    try:
        found = json.loads(file.read_text("utf-8"))
        _require_keys(found, ["format", "sha256"])
        if found["format"] == FORMAT:  # otherwise the rest may have any form
            digest = found["sha256"]
            rest = {name: value for name, value in found.items() if name not in ("format", "sha256")}
            spec = _made(Spec, {**rest, "head": _made(Head, rest.get("head"))})
            _check(spec)
            return spec, digest
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"bilevel-fewshot: {file} does not describe an encoder ({error}); copy it again from the run that wrote it."
        ) from error
    raise ValueError(
        f"bilevel-fewshot: {file} was written by another version of bilevel_plugin (its format is {found['format']!r}, "
        f"and this version reads {FORMAT}); use that version, or train the encoder again."
    )


def _require_keys(found: Any, names: Sequence[str]) -> None:
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object where one is needed")
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")


def _made(kind: Any, found: Any) -> Any:
    """Return the dataclass with these values. Say which are missing, and which are unknown."""
    known = fields(kind)
    _require_keys(found, [f.name for f in known if f.default is MISSING and f.default_factory is MISSING])
    unknown = sorted(found.keys() - {f.name for f in known})
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is unknown")
    return kind(**found)


def _check(spec: Spec) -> None:
    """Refuse values that would silently give wrong features, or use up the memory."""
    prepare(spec.head.features)
    if not isinstance(spec.architecture, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"architecture is {spec.architecture!r}")
    sizes = (spec.height, spec.width, spec.channels)
    largest = LARGEST[":" in spec.architecture]
    if not all(type(n) is int and 1 <= n <= largest for n in sizes) or spec.channels not in (1, 3):
        raise ValueError(f"height, width and channels are {sizes}")
    if type(spec.head.ways) is not int:
        raise ValueError(f"ways are {spec.head.ways!r}")
    numbers = [*spec.mean, *spec.deviation, *spec.head.rates, spec.head.decay]
    if not all(type(n) in (int, float) for n in numbers):
        raise ValueError("mean, deviation, rates and decay have to be numbers")
    if len(spec.mean) != spec.channels or len(spec.deviation) != spec.channels or not np.isfinite(numbers).all():
        raise ValueError("mean and deviation have to be finite numbers, one for each channel")
    if min(spec.deviation) <= 0 or not spec.head.rates or min(numbers[2 * spec.channels :]) < 0 or spec.head.ways < 1:
        raise ValueError("deviations have to be above 0, and rates at least 0")

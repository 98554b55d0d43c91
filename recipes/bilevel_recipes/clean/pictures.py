"""Images of any mode and size as uint8 arrays that fit in memory."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..data import FORMATS, inside

SUFFIXES = frozenset(
    [".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".webp"]
)
# The longer side of an image in memory, in pixels: 256 × 256 × 3 bytes are 0.2 MB, a photograph of a phone is 36 MB.
LONGEST = 256

Picture = NDArray[np.uint8]


def read_pictures(
    cells: Sequence[Any], folder: Path, quiet: bool = False
) -> tuple[list[Picture | None], dict[int, str]]:
    """Return an image for each cell, or None, and for each None the reason why there is no image.

    A cell is a path inside the folder, the bytes of a file, or a mapping with `bytes` or `path`, as Hugging Face
    stores images. quiet: show no progress.
    """
    from PIL import Image

    def read(cell: Any) -> Picture | str:
        try:
            return _picture(cell, folder)
        except Exception as error:  # Pillow's decoders raise a dozen kinds, one of them for images of absurd size
            return f"unreadable image: {error}" if not isinstance(error, LookupError) else str(error.args[0])

    with warnings.catch_warnings(), ThreadPool(min(8, 2 * (os.cpu_count() or 1))) as pool:
        # Between 90 and 180 million pixels Pillow only warns, which would take 4 GB with eight threads.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        done = pool.imap(read, cells, chunksize=16)
        found = list(tqdm(done, "images", len(cells), leave=False, unit="image", delay=2, disable=quiet))
    reasons = {position: item for position, item in enumerate(found) if isinstance(item, str)}
    return [None if isinstance(item, str) else item for item in found], reasons


def _picture(cell: Any, folder: Path) -> Picture:
    from PIL import Image

    with Image.open(_locate(cell, folder), formats=FORMATS) as image:
        image.draft(None, (LONGEST, LONGEST))  # a JPEG is decoded at a fraction of its size, which is much faster
        return as_array(image)


def _locate(cell: Any, folder: Path) -> Path | io.BytesIO:
    """Return what to open for a cell, or raise a LookupError that says why there is nothing to open."""
    if isinstance(cell, Mapping):
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, bytes):
        return io.BytesIO(cell)
    if not isinstance(cell, (str, Path)) or not str(cell).strip():
        raise LookupError("no image is named")
    try:
        file = inside(folder, str(cell), folder)
    except ValueError:
        raise LookupError(f"the image {str(cell)!r} is not in the folder {folder}; give root") from None
    if not file.is_file():
        raise LookupError(f"the image {str(cell)!r} does not exist in the folder {folder}")
    return file


def as_array(image: Any) -> Picture:
    """Return an image as H × W (grey) or H × W × 3, 0 to 255, with transparent parts on white."""
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_eight_bits(np.asarray(image)))
    elif image.has_transparency_data:
        over = image.convert("RGBA")
        grey = image.mode in ("LA", "La", "L", "1")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("L" if grey else "RGB")
    else:
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    image.thumbnail((LONGEST, LONGEST))
    return np.array(image)


def _eight_bits(values: NDArray[Any]) -> Picture:
    """Scale grey values of 16 bits, or fractions, to 0 to 255, by the same factor in each image of a kind."""
    low, high = float(values.min()), float(values.max())
    top = next((top for top in ((1, 255, 65535) if values.dtype.kind == "f" else (65535,)) if high <= top), None)
    if top is None or not low >= 0:  # `not >=` holds for NaN as well
        raise ValueError(f"its grey values go from {low:g} to {high:g}; 0 to 65535, 0 to 255 or 0 to 1 are read")
    return np.round(values.astype(np.float64) * (255 / top)).astype(np.uint8)

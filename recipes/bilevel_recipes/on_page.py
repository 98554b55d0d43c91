"""Pictures of a page that opens from disk: in the page itself as long as they fit, otherwise in a folder beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from PIL import Image

INSIDE = 15_000_000  # characters of pictures or text that the page itself may hold
TINY, LARGEST = 64, 384  # pixels: up to TINY a picture is kept exactly, beyond LARGEST it is made smaller
Shown = tuple[str, bytes]  # a picture as it is shown: its format, and its content


def folder_beside(page: Path) -> Path:
    """Return the folder for the pictures that do not fit into the page NAME.html: NAME_files."""
    return page.with_name(f"{page.stem}_files")


def place(pictures: Iterable[Shown | None], folder: Path) -> tuple[list[str | None], list[Path]]:
    """Return the address of each picture, and the files that were written: none if all fit into the page.

    The pictures of an earlier page are removed from the folder, and the folder itself if nothing else is in it.
    """
    old = set(folder.glob("picture_*")) if folder.is_dir() else set[Path]()
    held: list[Shown | None] = []
    inside, size = True, 0
    files: list[Path | None] = []
    for picture in pictures:
        held.append(picture)
        size += len(picture[1]) * 4 // 3 if picture else 0
        if size > INSIDE:
            inside = False
            folder.mkdir(exist_ok=True)
            files += [_file(folder, len(files) + k, one) for k, one in enumerate(held)]
            held.clear()
    written = [file for file in files if file]
    _remove(old - set(written), folder)
    if inside:
        return [p and f"data:image/{p[0]};base64,{base64.b64encode(p[1]).decode()}" for p in held], []
    return [file and f"{quote(folder.name)}/{file.name}" for file in files], written


def _remove(stale: set[Path], folder: Path) -> None:
    for file in stale:
        file.unlink()
    if stale and not any(folder.iterdir()):
        folder.rmdir()


def _file(folder: Path, number: int, picture: Shown | None) -> Path | None:
    if picture is None:
        return None
    file = folder / f"picture_{number:06d}.{picture[0]}"
    file.write_bytes(picture[1])
    return file


def shown(image: NDArray[np.uint8]) -> Shown:
    """Return a small picture exactly, as PNG, and a larger one as JPEG, of at most LARGEST pixels a side."""
    picture = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
    buffer = io.BytesIO()
    if max(picture.size) <= TINY:
        picture.save(buffer, "PNG")
        return "png", buffer.getvalue()
    picture.thumbnail((LARGEST, LARGEST))
    picture.save(buffer, "JPEG", quality=85)
    return "jpeg", buffer.getvalue()


def is_grey(image: NDArray[np.uint8]) -> bool:
    return image.ndim == 2 or image.shape[-1] == 1 or bool((image == image[..., :1]).all())

"""A page that opens from disk in any browser: no script, no network, every image inside the file."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
body { color: #1b1f24; background: #fff } h1 { font-size: 1.6rem; margin-bottom: .2rem }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #d8dee4 }
p { max-width: 60rem } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #d8dee4; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #57606a } td:first-child, th:first-child { text-align: left }
img.figure { max-width: 100%; height: auto; display: block; margin: 1rem 0 }
.gallery { display: flex; flex-wrap: wrap; gap: .8rem } .gallery figure { margin: 0; width: 7rem; text-align: center }
.gallery img { width: 6rem; height: 6rem; image-rendering: pixelated; border: 1px solid #d8dee4 }
figcaption { font-size: .8rem; line-height: 1.3; overflow-wrap: anywhere }
pre { font-size: .85rem; background: #f6f8fa; padding: .8rem; overflow-x: auto }
"""


def page(title: str, lead: str, sections: Iterable[tuple[str, str]]) -> str:
    """The whole document; a section is (heading, html)."""
    body = "".join(f"<section><h2>{escape(head)}</h2>{html}</section>\n" for head, html in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1><p>{escape(lead)}</p>\n{body}</body></html>\n"
    )


def text(words: str) -> str:
    return f"<p>{escape(words)}</p>"


def code(words: str) -> str:
    return f"<pre>{escape(words)}</pre>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def made(command: str, settings: dict[str, Any], versions: dict[str, Any]) -> tuple[str, str]:
    """The section that says how to make the page again."""
    details = json.dumps({"settings": settings, "versions": versions}, indent=1, ensure_ascii=False)
    return "How this was made", code(command) + code(details)


def figure(path: Path, alt: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img class="figure" alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def gallery(pictures: Iterable[tuple[Any, str]]) -> str:
    """Small uint8 images (H × W, H × W × 1 or 3), each with its caption."""
    items = "".join(
        f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{_png(image)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for image, caption in pictures
    )
    return f'<div class="gallery">{items}</div>'


def _png(image: Any) -> str:
    from PIL import Image

    array = np.asarray(image)
    buffer = io.BytesIO()
    Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()

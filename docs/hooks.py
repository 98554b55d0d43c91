"""What the site needs beyond mkdocs and its plugins:

- formulas as MathML, made when the site is built, so that a page needs no script for them;
- excerpts: a block marked `<!-- excerpt of FILE -->` must have its lines in that file; it gets their place as a title;
- a folder in `nav` stands for the pages that are in it, and for nothing if there are none;
- CONTRIBUTING.md and CHANGELOG.md, which stay at the root of the repository, as pages;
- notebooks as pages, with the outputs that are stored in them;
- each picture as a link to its file, so that a tap on a phone shows it in full size;
- no table of contents beside pages that are mostly code, so that the lines of the code have its room.
"""

from __future__ import annotations

import base64
import html
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_EXCERPT = re.compile(r"^<!-- excerpt of (\S+) -->\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"(^|\s+)#.*")
_NOTEBOOK = re.compile(r"\]\(([^():]+)\.ipynb([^()]*)\)")  # a link to one
_PICTURE = re.compile(r'(?<=<p>)<img [^>]*?src="([^"]+)"[^>]*>(?=</p>)')  # alone in its paragraph
_COMMENT_ABOVE = re.compile(r"\A\s*<!--.*?-->\s*(?=# )", re.DOTALL)  # above a title, which hides it from mkdocs
_CODE = ("tutorials/", "loops/", "notebooks/", "coming-from/")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]*)[^)]*\)")


def on_config(config: Any) -> Any:
    config.nav = expand(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Any, config: Any) -> Any:
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text().replace("](docs/", "](")))
    for path in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        stem = path.relative_to(config.docs_dir).with_suffix("")
        text, pictures = notebook(json.loads(path.read_text()), stem.name)
        files.append(File.generated(config, f"{stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, str(stem.with_name(name)), content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def excerpt(match: re.Match[str]) -> str:
        name, code = match.groups()
        try:
            return f'```python title="{name}, line {find(code, ROOT / name)}"\n{textwrap.dedent(code)}```'
        except (OSError, ValueError) as error:
            raise PluginError(f"{page.file.src_uri}: {error}") from error

    markdown = _COMMENT_ABOVE.sub("", markdown)
    if page.file.src_uri.startswith(_CODE):
        page.meta.setdefault("hide", ["toc"])

    return inside(_NOTEBOOK.sub(r"](\1.md\2)", _EXCERPT.sub(excerpt, markdown)), Path(page.file.src_uri))


def notebook(stored: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page, and the pictures of its outputs by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in stored["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}_{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![The picture that this cell draws]({picture})")
            else:
                printed = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{printed.rstrip()}\n```")
    title, *rest = parts[0].split("\n", 1)
    download = f'This page is a notebook: <a href="{name}.ipynb" download>download it</a>.'
    return "\n\n".join([title, download, *rest, *parts[1:]]), pictures


def on_page_content(html: str, **_: Any) -> str:
    return _PICTURE.sub(r'<a href="\1">\g<0></a>', _MATH.sub(mathml, html))


def mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return convert(html.unescape(match[2]).strip(), display=display)


def find(code: str, path: Path) -> int:
    """The line of the file at which an excerpt begins. Its lines stand in the file in this order, comments aside."""
    source = enumerate(map(_bare, path.read_text().splitlines()), start=1)
    places: list[int] = []
    for line in filter(None, map(_bare, code.splitlines())):
        place = next((n for n, text in source if text == line), None)
        if place is None:
            raise ValueError(f"an excerpt of {path.name} has a line that is not there, or not in this order: {line!r}")
        places.append(place)
    if not places:
        raise ValueError(f"an excerpt of {path.name} has no line of code")
    return places[0]


def _bare(line: str) -> str:
    return " ".join(_COMMENT.sub("", line).split())


def expand(nav: list[Any], docs: Path) -> list[Any]:
    """The nav with the pages of a folder in place of the folder."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, content),) = entry.items()
            if isinstance(content, str) and content.endswith("/"):
                content = [p.relative_to(docs).as_posix() for p in in_order(docs / content)]
            if content:
                found.append({title: content})
        else:
            found.append(entry)
    return found


def in_order(folder: Path) -> list[Path]:
    """The pages of a folder: its index, then the others as the index names them, then those that it does not name.

    What is called …_notes.md is no page of its own: a page that is made by a command ends with it.
    """
    index = folder / "index.md"
    text = index.read_text() if index.exists() else ""
    named = lambda page: text.find(f"({page.name}") if f"({page.name}" in text else len(text)
    pages = [page for page in folder.glob("*.md") if not page.name.endswith("_notes.md")]
    pages += [page.with_suffix(".md") for page in folder.glob("*.ipynb")]
    return sorted(pages, key=lambda page: (page != index, named(page), page.name))


def inside(markdown: str, page: Path) -> str:
    """Links that leave docs/ for another file of the repository: to its page if it has one, else plain text."""

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path = (ROOT / "docs" / page.parent / target).resolve()
        if image or not path.exists() or path.is_relative_to(ROOT / "docs"):
            return match[0]
        up = "../" * (len(page.parts) - 1)
        return f"[{text}]({up}{path.name})" if path in [ROOT / name for name in PAGES] else text

    return _LINK.sub(link, markdown)

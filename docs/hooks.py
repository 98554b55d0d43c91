"""What the site needs beyond mkdocs and its plugins:

- formulas as MathML, made when the site is built, so that a page needs no script for them;
- excerpts: a block titled with a file of the repository must be in that file, word for word; it gets its line number;
- a folder in `nav` stands for the pages that are in it, and for nothing if there are none;
- CONTRIBUTING.md and CHANGELOG.md, which stay at the root of the repository, as pages.
"""

from __future__ import annotations

import html
import logging
import re
import textwrap
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
ELLIPSIS = "# …"
_log = logging.getLogger("mkdocs.plugins.docs")
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_EXCERPT = re.compile(r'^```py title="([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]*)[^)]*\)")


def on_config(config: Any) -> Any:
    config.nav = expand(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Any, config: Any) -> Any:
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text().replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def excerpt(match: re.Match[str]) -> str:
        name, code = match.groups()
        try:
            shown = f"{ELLIPSIS}\n".join(map(textwrap.dedent, _parts(code)))
            return f'```py title="{name}, line {find(code, ROOT / name)}"\n{shown}```'
        except (OSError, ValueError) as error:
            _log.warning("%s: %s", page.file.src_uri, error)
            return match[0]

    return inside(_EXCERPT.sub(excerpt, markdown), Path(page.file.src_uri))


def on_page_content(html: str, **_: Any) -> str:
    return _MATH.sub(mathml, html)


def mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return convert(html.unescape(match[2]).strip(), display=display)


def find(code: str, path: Path) -> int:
    """The line of the file at which the code begins. A line `# …` in it stands for lines that are left out."""
    lines = path.read_text().splitlines()
    at, first = 0, None
    for part in _parts(code):
        wanted = textwrap.dedent(part).splitlines()
        where = next((i for i in range(at, len(lines)) if _dedented(lines[i : i + len(wanted)]) == wanted), None)
        if where is None:
            raise ValueError(f"an excerpt is not in {path.name} as it stands: {wanted[0].strip()!r} …")
        at, first = where + len(wanted), where + 1 if first is None else first
    assert first is not None
    return first


def _parts(code: str) -> list[str]:
    return re.split(rf"^\s*{ELLIPSIS}\n", code, flags=re.MULTILINE)


def _dedented(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).splitlines()


def expand(nav: list[Any], docs: Path) -> list[Any]:
    """The nav with the pages of a folder, its index first, in place of the folder."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, content),) = entry.items()
            if isinstance(content, str) and content.endswith("/"):
                pages = sorted((docs / content).glob("*.md"), key=lambda p: (p.name != "index.md", p.name))
                content = [p.relative_to(docs).as_posix() for p in pages]
            if content:
                found.append({title: content})
        else:
            found.append(entry)
    return found


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

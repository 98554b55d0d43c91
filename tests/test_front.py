"""README and the home page: what they include is up to date, and each figure in their text has its command."""

import re
from pathlib import Path

import pytest

from docs import front

ROOT = Path(__file__).parent.parent
FRONT = ("README.md", "docs/index.md")
SOURCES = ROOT / "docs" / "results" / "figures.md"
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"(?<![\w.])\d[\d,.]*\s?(?:%|×|[kMG]i?B\b|ms\b|s\b|seconds|minutes|hours|times)")


def figures(page: str) -> set[str]:
    """The numbers with a unit, without those in code and in what is included."""
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return set(MEASURED.findall(front.COPY.sub("", text)))


def sources() -> dict[str, str]:
    """Each figure of the table, and the text of the page that has it."""
    rows = [line.split("|") for line in SOURCES.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    pages = {row[1].strip(): re.search(r"\((\w+\.md)\)", row[3]) for row in rows if MEASURED.match(row[1].strip())}
    return {figure: (SOURCES.parent / page[1]).read_text(encoding="utf-8") for figure, page in pages.items() if page}


def test_readme_shows_what_the_generated_pages_have() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(front.COPY.findall(text)) >= 2
    assert front.filled(text) == text, "python -m docs.front copies the parts again"


def test_a_part_that_is_not_there_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"docs/results/peers\.md has no part 'nothing'"):
        front.filled("<!-- from docs/results/peers.md: nothing -->\nold\n<!-- end -->")


def test_figures_are_recognised() -> None:
    assert MEASURED.findall("1.5 % of 2,000 MB in 3 s, 4 × as P8 and Python 3.10 say; 5 steps") == [
        "1.5 %",
        "2,000 MB",
        "3 s",
        "4 ×",
    ]


@pytest.mark.parametrize("page", FRONT)
def test_each_figure_has_its_command(page: str) -> None:
    known = sources()
    assert figures(page) <= known.keys(), "docs/results/figures.md says which command makes each figure"


def test_each_figure_stands_on_the_page_that_is_named() -> None:
    for figure, text in sources().items():
        number, unit = re.match(r"([\d,.]+)\s?(.+)", figure).groups()
        assert re.search(rf"(?<![\d,.]){re.escape(number)}(?:\.0)?(?![\d,])", text), figure
        assert unit in text, figure


def test_the_command_that_readme_shows_is_the_one_that_made_its_figures() -> None:
    command = re.search(
        r"^python -m bilevel_recipes\.few_shot .*$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert command is not None
    page = (ROOT / "docs/results/few_shot.md").read_text(encoding="utf-8")
    assert f"{command[0]}\n" in page.replace(" --resume", "")

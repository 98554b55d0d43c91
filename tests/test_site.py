"""The site builds without a warning, needs nothing from elsewhere, and its excerpts are what they say."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEWS = {"NO_MKDOCS_2_WARNING": "1"}  # the theme's news about its own future is no warning of ours


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    there = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(there)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | NEWS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return there


@pytest.fixture(scope="module")
def site(built):
    return {p.relative_to(built).as_posix(): p.read_text() for p in built.rglob("*.html")}


class Fetched(HTMLParser):
    """What a browser would fetch to show a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        key = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}.get(tag)
        if key and attrs.get(key):
            self.found.append(attrs[key])


def test_nothing_is_fetched_from_elsewhere(site):
    for name, page in site.items():
        parser = Fetched()
        parser.feed(page)
        assert len(parser.found) > 2  # a style, a script
        assert not [x for x in parser.found if re.match(r"(https?:)?//", x)], name


# What is wider than the page, and stands in nothing that scrolls.
TOO_WIDE = """() => {
  const wide = document.documentElement.clientWidth;
  const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const found = [...document.querySelectorAll(".md-content *")].filter((e) => {
    const box = e.getBoundingClientRect();
    return box.width > 0 && box.right > wide + 1 && !scrolls(e.parentElement);
  });
  const said = found.map((e) => `${e.localName} of ${Math.round(e.getBoundingClientRect().right)} px: `
    + e.textContent.trim().slice(0, 60));
  const over = document.documentElement.scrollWidth - wide;
  return over > 0 ? [...said, `the page, by ${over} px`] : said;
}"""


# Tables that scroll, where the screen has room for all of their columns.
SCROLLS = """() => [...document.querySelectorAll(".md-typeset__scrollwrap")]
  .filter((e) => e.scrollWidth > e.clientWidth + 1)
  .map((e) => `a table of ${e.scrollWidth} px: ${e.innerText.slice(0, 60)}`)"""


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.set_default_timeout(120_000)  # of milliseconds: the machine may be busy
    yield page
    page.close()


def test_nothing_is_wider_than_the_screen(built, page):
    """A few pages; `make widths` goes over all. Code may scroll inside of itself, and on a phone tables too."""
    few = ["index", "reference", "have/loop", "tutorials/weights", "notebooks/data_cleaning"]
    few += ["results/benchmarks", "results/peers"]
    pages = sorted(built.rglob("*.html")) if "ALL_PAGES" in os.environ else [built / f"{name}.html" for name in few]
    found = {}
    for path in pages:
        page.goto(path.as_uri())
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate(TOO_WIDE):
                page.wait_for_timeout(2000)  # the search field moves while the width changes
            if too_wide := page.evaluate(TOO_WIDE) + (page.evaluate(SCROLLS) if width == 1280 else []):
                found[f"{path.relative_to(built)} at {width} px"] = too_wide[:3]
    assert not found, "\n".join(f"{where}: {what}" for where, what in found.items())


def test_what_is_too_wide_is_found(page):
    page.set_viewport_size({"width": 390, "height": 900})
    wide = '<p style="width: 500px">wide</p>'
    page.set_content(f'<div class="md-content">{wide}</div>')
    assert any("p of" in found for found in page.evaluate(TOO_WIDE))
    page.set_content(f'<div class="md-content"><div style="overflow-x: auto">{wide}</div></div>')
    assert page.evaluate(TOO_WIDE) == []


def test_the_search_works_from_disk(built, page):
    page.goto((built / "have" / "loop.html").as_uri())
    found = page.locator(".md-search-result__item").first
    for _ in range(40):  # what is typed before the page's script runs is not seen
        page.fill(".md-search__input", "")
        page.locator(".md-search__input").press_sequentially("stop_gradient")
        page.wait_for_timeout(1500)
        if found.is_visible():
            break
    assert "Reference" in page.inner_text(".md-search-result__list")


def test_the_notebook_is_a_page(site):
    page = site["notebooks/data_cleaning.html"]
    assert page.count('<img alt="The picture that this cell draws"') == 2
    assert "mean share of right labels" in page
    assert 'href="notebooks/data_cleaning.html"' in site["data_cleaning.html"]


@pytest.mark.parametrize("name", ["how-it-works", "how/step", "how/replay", "how/memory", "how/compile"])
def test_formulas_are_mathml(site, name):
    page = site[f"{name}.html"]
    written = (ROOT / f"docs/{name}.md").read_text().count("$$") // 2
    assert page.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') == written >= 1
    assert "arithmatex" not in page


def _lines(path):
    return (ROOT / path).read_text().splitlines()


def test_excerpts_have_their_line(site):
    line = int(re.search(r"bilevel_plugin/update/solvers\.py, line (\d+)", site["how/step.html"])[1])
    assert "t * alpha, s * (1 - alpha)" in _lines("bilevel_plugin/update/solvers.py")[line - 1]


def test_every_public_name_is_in_the_reference(site):
    import bilevel_plugin

    for name in bilevel_plugin.__all__:
        path = "inner.inner" if name == "inner" else name  # bilevel_plugin.inner would be the file
        assert f'id="bilevel_plugin.{path}"' in site["reference.html"], name


def test_an_excerpt_that_went_stale_is_noticed(hooks, tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import os\n\n\ndef f(x):\n    y = x + 1\n    return y\n\n\ndef g():\n    return 2\n")
    assert hooks.find("y = x + 1  # why\nreturn y\n", path) == 5
    assert hooks.find("def f(x):\n    # …\n    return y\ndef g():\n", path) == 4
    for stale in ("y = x + 2\n", "def g():\ndef f(x):\n", "# …\n"):
        with pytest.raises(ValueError, match=r"an excerpt of a\.py has"):
            hooks.find(stale, path)


def test_folders_of_the_nav(hooks, tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("b.md", "index.md", "a.md", "c.txt", "z.md"):
        (tmp_path / "a" / name).touch()
    (tmp_path / "a" / "index.md").write_text("[z](z.md#x)")
    nav = ["x.md", {"A": "a/"}, {"None": "b/"}, {"Page": "y.md"}]
    assert hooks.expand(nav, tmp_path) == [
        "x.md",
        {"A": ["a/index.md", "a/z.md", "a/a.md", "a/b.md"]},
        {"Page": "y.md"},
    ]


def test_links_that_leave_the_docs(hooks):
    page = Path("results/x.md")
    assert hooks.inside("[a](../../CHANGELOG.md)", page) == "[a](../CHANGELOG.md)"
    assert hooks.inside("[a](../../Makefile) [b](../limits.md#x)", page) == "a [b](../limits.md#x)"


def test_one_version():
    import bilevel_plugin

    for name in ("pyproject.toml", "CITATION.cff"):
        version = re.search(r"^version\s*[:=]\s*\"?([\w.]+)", (ROOT / name).read_text(), re.MULTILINE)[1]
        assert version == bilevel_plugin.__version__, name

"""The review page in a real Chromium, opened from disk: clicks, keys, filters, and decisions that come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from clean_examples import example_rows, example_verdict

from bilevel_recipes import on_page
from bilevel_recipes.clean.decisions import decided, read_decisions
from bilevel_recipes.clean.report import write_report

CLASSES = ["</script><b>cat</b>", 'dog, "old"; big', "two\nlines", "עברית"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Pictures with class names of every sort: rows, verdict and the page."""
    rows = example_rows("images", 300, CLASSES)
    verdict = example_verdict(rows)
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(path, rows, verdict, title="Photos", settings={}, command="bilevel-clean photos.csv")
    return rows, verdict, path


@pytest.fixture
def open_page(browser):
    """Open a file in a new browser profile; at the end, no error was logged and nothing was asked of a network."""
    contexts, errors, requests = [], [], []

    def opened(path, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)  # of milliseconds: the machine may be busy
        page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: requests.append(r.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors
    assert not [url for url in requests if not url.startswith(("file:", "data:", "blob:"))]


def _suspects(verdict):
    """Positions of the suspects, in the order of the page."""
    return sorted(np.flatnonzero(verdict.issue), key=lambda i: verdict.score[i])


def _export(page, path: Path) -> Path:
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(path)
    return path


def _count(page) -> str:
    return page.inner_text("#count")


def _card(page, k):
    return page.locator(".card").nth(k)


def test_clicks_export_and_reading_back(open_page, written, tmp_path):
    rows, verdict, path = written
    page = open_page(path)
    order = _suspects(verdict)
    assert _count(page) == f"0 of {len(order)} decided"
    assert page.locator(".card").count() == 48
    assert page.evaluate("Math.min(...[...document.querySelectorAll('.card img')].map((i) => i.clientWidth))") >= 96
    for k, action in enumerate(["accept", "keep", "drop"]):
        _card(page, k).locator(f"[data-action={action}]").click()
        assert _card(page, k).get_attribute("data-state") == action
    fourth = next(c for c in range(4) if c not in (rows.y[order[3]], verdict.suggested[order[3]]))
    _card(page, 3).locator("[data-action=other]").click()
    page.fill("#wanted", rows.classes[fourth].split("\n")[0])
    page.keyboard.press("Enter")
    assert _card(page, 3).get_attribute("data-state") == "other"
    _card(page, 4).locator("[data-action=keep]").click()
    _card(page, 4).locator(".undo").click()
    assert _count(page) == f"4 of {len(order)} decided"

    read = read_decisions(_export(page, tmp_path / "decisions.csv"), rows).set_index("row")
    assert read.decision[rows.used[order[:4]]].tolist() == ["relabel", "keep", "drop", "relabel"]
    after = decided(rows, read.reset_index())
    label = dict(zip(after.used.tolist(), after.labels.tolist(), strict=True))
    want = [verdict.suggested[order[0]], rows.y[order[1]], None, fourth]
    assert [label.get(rows.used[i]) for i in order[:4]] == want


def test_keyboard_alone(open_page, written, tmp_path):
    rows, verdict, path = written
    page = open_page(path)
    order = _suspects(verdict)
    for key in ("a", "s", "ArrowRight", "d", "j", "k", "ArrowLeft", "u"):  # u: on the row that d dropped
        page.keyboard.press(key)
    assert [_card(page, k).get_attribute("data-state") for k in range(4)] == ["accept", "keep", None, None]
    page.keyboard.press("z")
    assert _card(page, 3).get_attribute("data-state") == "drop"
    page.keyboard.press("e")
    assert page.locator("#zoom img").is_visible()
    before = page.get_attribute("#zoom img", "src")
    page.keyboard.press("a")  # decides the enlarged row and shows the next one
    assert page.get_attribute("#zoom img", "src") != before
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    assert page.evaluate("document.activeElement.id") == "wanted"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    page.wait_for_function("document.querySelector('.pager').innerText.includes('Page 2')")
    page.keyboard.press("s")
    found = read_decisions(_export(page, tmp_path / "d.csv"), rows).set_index("row").decision
    assert found[rows.used[order[48]]] == "keep"
    assert len(found) == 5


def test_filter_pages_and_bulk_with_undo(open_page, written):
    rows, verdict, path = written
    page = open_page(path)
    order = _suspects(verdict)
    pair = rows.y[order[0]], verdict.suggested[order[0]]
    fit = [i for i in order if (rows.y[i], verdict.suggested[i]) == pair]
    page.locator(f".matrix tbody tr:nth-child({pair[0] + 1}) td:nth-of-type({pair[1] + 1}) button").click()
    page.wait_for_function(f"document.querySelectorAll('.card').length === {len(fit)}")
    assert [c.get_attribute("title") for c in page.locator(".card .name").all()] == [rows.names[i] for i in fit]
    page.click("#accept-pair")
    assert _count(page) == f"{len(fit)} of {len(order)} decided"
    page.click("#toast button")
    assert _count(page) == f"0 of {len(order)} decided"
    page.click("#clear")
    page.wait_for_function("document.querySelectorAll('.card').length === 48")
    page.click("#accept-page")
    page.check("#undecided")
    page.wait_for_function(f"document.getElementById('listed').innerText.startsWith('{len(order) - 48} ')")
    page.click("#accept-page")  # the list stays as it was, so the next page holds the next rows
    page.locator(".pager button").nth(1).click()
    page.wait_for_function("location.hash.includes('page=2')")
    assert page.locator(".card .name").first.get_attribute("title") == rows.names[order[96]]
    page.reload()
    assert page.is_checked("#undecided")
    assert _count(page) == f"96 of {len(order)} decided"
    page.uncheck("#undecided")
    page.fill("#q", rows.names[order[100]].upper())
    page.wait_for_function("document.querySelectorAll('.card').length === 1")
    page.click("#clear")
    page.check("input[value=rest]")
    page.wait_for_function("location.hash.includes('view=rest')")
    assert page.inner_text("#listed").startswith(f"{(~verdict.issue & ~verdict.known).sum()} other rows")


def test_reload_import_and_refused_import(open_page, written, tmp_path):
    rows, _, path = written
    page = open_page(path)
    page.click("#accept-page")
    _card(page, 0).locator("[data-action=drop]").click()
    page.reload()
    assert _count(page).startswith("48 of ")
    assert _card(page, 0).get_attribute("data-state") == "drop"
    file = _export(page, tmp_path / "decisions.csv")
    other = open_page(path)  # another profile: it knows nothing of the first
    assert _count(other).startswith("0 of ")
    semicolons = read_decisions(file, rows).to_csv(index=False, sep=";", lineterminator="\r\n", encoding="utf-8-sig")
    file.write_text("\ufeff" + semicolons, newline="")
    other.set_input_files("#file", file)
    other.wait_for_function("document.getElementById('count').innerText.startsWith('48 of ')")
    assert _card(other, 0).get_attribute("data-state") == "drop"
    back = read_decisions(_export(other, tmp_path / "back.csv"), rows)
    pd.testing.assert_frame_equal(back, read_decisions(file, rows))
    file.write_text(file.read_text().replace("photo_", "picture_"))
    third = open_page(path)
    third.set_input_files("#file", file)
    third.wait_for_function("document.getElementById('toast').innerText.includes('Nothing was imported')")
    assert "and 38 more" in third.inner_text("#toast")
    assert _count(third).startswith("0 of ")


def test_without_storage_the_page_says_so(open_page, written):
    page = open_page(written[2])
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('denied'); } })")
    page.reload()
    assert "does not keep decisions" in page.inner_text("#kept")
    page.keyboard.press("a")
    assert _count(page).startswith("1 of ")


@pytest.mark.parametrize(
    ("kind", "scheme"), [("images", "light"), ("text", "dark"), ("table", "light"), ("embeddings", "dark")]
)
def test_phone_width(open_page, tmp_path, kind, scheme):
    rows = example_rows(kind, 80, [*CLASSES, "w" * 200])
    rows = replace(rows, names=["n" * 150 + name for name in rows.names])
    write_report(tmp_path / "r.html", rows, example_verdict(rows), title="x" * 100, settings={}, command="c " * 300)
    page = open_page(tmp_path / "r.html", viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True)
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("[...document.querySelectorAll('.actions button')].every((b) => b.offsetHeight >= 40)")
    _card(page, 0).locator("[data-action=accept]").tap()
    assert _count(page).startswith("1 of ")
    assert page.locator("script").count() == 2


def _contrast(page, selector):
    """The contrast of text with what is behind it, by the formula of WCAG 2."""
    return page.evaluate(
        """(selector) => {
          const light = (colour) => {
            const part = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => part(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const element = document.querySelector(selector);
          let behind = element;
          while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
          const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        }""",
        selector,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_page, written, scheme):
    page = open_page(written[2], color_scheme=scheme, reduced_motion="reduce")
    for key in "asd":
        page.keyboard.press(key)
    for selector in (".figures dt", ".warning li", ".labels .given", ".line .score", ".line .name", "#export",
                     "[data-state=accept] [aria-pressed=true]", "[data-state=keep] [aria-pressed=true]",
                     "[data-state=drop] [aria-pressed=true]", "[data-state] .undo", "#import"):  # fmt: skip
        assert _contrast(page, selector) >= 4.5, selector


def test_twenty_thousand_suspects_stay_quick(open_page, tmp_path):
    rows = example_rows("text", 22_500)
    verdict = example_verdict(rows, 1.0)
    write_report(tmp_path / "r.html", rows, verdict, title="Many", settings={}, command="")
    page = open_page(tmp_path / "r.html")
    assert _count(page) == "0 of 20,250 decided"
    page.keyboard.press("a")  # the first key takes up the page's fonts and styles
    for act in ("document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'a', bubbles: true }))",
                "document.getElementById('accept-page').click()",
                "document.querySelectorAll('.pager button')[1].click()"):  # fmt: skip
        took = page.evaluate(f"() => {{ const t = performance.now(); {act}; return performance.now() - t; }}")
        assert took < 500, (act, took)
    page.select_option("#given", "0")
    page.select_option("#suggested", "1")
    page.click("#accept-pair")
    page.reload()
    assert int(_count(page).split()[0].replace(",", "")) > 3000


def test_pictures_in_the_folder_are_shown(open_page, tmp_path, monkeypatch):
    monkeypatch.setattr(on_page, "INSIDE", 1000)
    rows = example_rows("images", 40)
    folder = tmp_path / "my #1 report?"
    paths = write_report(folder / "a page #2.html", rows, example_verdict(rows), title="", settings={}, command="")
    assert len(paths) == 2
    page = open_page(paths[0])
    shown = "[...document.querySelectorAll('.card img')].slice(0, 4)"
    page.wait_for_function(f"{shown}.every((i) => i.naturalWidth === 12)")


def test_the_next_run_knows_what_was_decided(open_page, written, tmp_path):
    """Review, run again, review: earlier decisions are shown, can be taken back, and are exported with the new ones."""
    rows, _, path = written
    page = open_page(path)
    for key in "ads":
        page.keyboard.press(key)
    first = read_decisions(_export(page, tmp_path / "first.csv"), rows)
    after = decided(rows, first)
    again = tmp_path / "again.html"
    write_report(again, after, example_verdict(after), title="", settings={}, command="", decisions=first)
    page = open_page(again)
    assert _count(page).endswith("decided (and 3 other rows)")
    page.keyboard.press("a")
    second = read_decisions(_export(page, tmp_path / "second.csv"), rows)
    assert len(second) == 4
    assert set(first.itertuples(index=False, name=None)) < set(second.itertuples(index=False, name=None))
    page.check("input[value=earlier]")
    page.wait_for_function("document.querySelectorAll('.card').length === 3")
    page.locator(".card[data-state=drop] .undo").click()
    third = read_decisions(_export(page, tmp_path / "third.csv"), rows)
    assert len(third) == 3
    assert "drop" not in set(third.decision)
    page.reload()
    assert _count(page).endswith("(and 2 other rows)")

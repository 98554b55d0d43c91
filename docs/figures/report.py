"""The review page of `bilevel-clean demo` as a picture, and how well the demo did as a page.

    python -m docs.figures.report [FOLDER]      FOLDER: where a run of the demo is; without it, it is run again

It writes docs/figures/report.png and docs/results/demo.md. It needs playwright and a Chromium: apt-get install
chromium, or playwright install chromium.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FILE = Path(__file__).with_suffix(".png")
CHOICES = ("all rows, as labelled", "suspects dropped", "right labels only (best possible)")
PAGE = Path(__file__).parent.parent / "results" / "demo.md"


def main() -> None:
    if sys.argv[1:]:
        show(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["bilevel_recipes.clean", "demo", "--quiet", "--out", folder, "--overwrite", "--threads", "1"]
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
        show(Path(folder))


def show(run: Path) -> None:
    PAGE.write_text(page(json.loads((run / "results.json").read_text())))
    photograph(run / "report.html")
    print(f"docs/results/{PAGE.name}, docs/figures/{FILE.name}")


def page(results: dict[str, Any]) -> str:
    """The demo's figures, with the part that the front pages show between two marks."""
    trust, compared = results["trust"], results["comparison"]
    rows = "\n".join(
        f"| {name} | {100 * found['recall']:.1f} % | {100 * (1 - found['precision']):.1f} % | {found['f1']:.3f} |"
        for name, found in compared["lists"].items()
    )
    tested = "\n".join(f"| {name} | {100 * x:.1f} % |" for name, x in compared["test_accuracy"].items())
    every, kept, best = (f"{100 * compared['test_accuracy'][name]:.1f} %" for name in CHOICES)
    used = ", ".join(f"{name} {results['versions'][name]}" for name in ("bilevel_plugin", "cleanlab", "torch"))
    return f"""# The demo

`make demo` prints these figures, and `python -m docs.figures.report` wrote this page. The labels were made wrong on
purpose. *Checked rows alone* is a classifier trained on the checked rows. Other processors round differently, which
changes the verdict on a few rows. Versions: {used}.
[The study on many data sets](cleaning.md) says more.

<!-- --8<-- [start:short] -->

{trust["rows"]:,} handwritten digits, of which {compared["wrong_labels"]} have a wrong label and {trust["checked"]} are
checked:

| list of suspects | wrong labels found | false alarms in the list | F1 |
| --- | ---: | ---: | ---: |
{rows}

A classifier trained on all rows gets {every} of new digits right. Trained without the suspects, it gets {kept} right.
If all wrong labels were known and left out, it would get {best}.
<!-- --8<-- [end:short] -->

## The same classifier, trained on a choice of rows

| trained on | test accuracy |
| --- | ---: |
{tested}
"""


def photograph(report: Path) -> None:
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(report.as_uri())
        page.screenshot(path=FILE)
        browser.close()


if __name__ == "__main__":
    main()

"""The review page of `bilevel-clean demo`, as a picture. python -m docs.figures.report

It needs playwright and a Chromium: apt-get install chromium, or playwright install chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

FILE = Path(__file__).with_suffix(".png")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = ["bilevel_recipes.clean", "demo", "--quiet", "--out", folder, "--overwrite"]
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
        photograph(Path(folder) / "report.html")
    print(f"docs/figures/{FILE.name}")


def photograph(report: Path) -> None:
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(report.as_uri())
        page.screenshot(path=FILE)
        browser.close()


if __name__ == "__main__":
    main()

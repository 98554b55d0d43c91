"""Every code block of README.md and docs/ is run, or is an excerpt of code that is; and every notebook.

What becomes of a block hangs on its language, and on an HTML comment on the line above it:

    python                   run, after the page's earlier blocks, in one namespace with them
      <!-- needs higher -->    where that module can be imported; where it can't, the rest of the page runs
      <!-- before -->          one version of a piece of code (run), of which
      <!-- after -->           is the next (run too, and the `before` of a further one)
      <!-- excerpt of FILE --> not run: its lines stand in FILE, in this order
    diff                     what leads from `before` to the `after` that follows; `python tests/test_docs.py` writes it
    text                     below a python block: what that prints, numbers to 5 %; elsewhere anything
    none, bash, console      commands: flags are parsed, make targets and scripts exist

Tutorials end in two numbers, `before` and `after`, and IMPROVES says by how much they differ. Pages of coming-from/ end
in two lists of gradients, `ours` and `theirs`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import io
import re
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch
import tyro

from benchmarks.runners import importable
from bilevel_recipes import command
from bilevel_recipes.attribution import __main__ as bilevel_attribute
from bilevel_recipes.clean import __main__ as bilevel_clean
from bilevel_recipes.few_shot import __main__ as bilevel_fewshot
from bilevel_recipes.vision import torchvision
from docs.hooks import find

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^(?: *<!-- ([^\n]*) -->\n)?( *)```(\w*)[^\n]*\n(.*?)^\2```$", re.M | re.S)
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*\.?\d*")

# How much more `after`, the learnt variable, has at least than `before`, the best baseline (accuracy), or less (error).
IMPROVES = {
    "accelerate": 0.05, "distillation": 0.02, "lightning": 0.04, "maml": -0.4, "plain_loop": 0.01, "rates": 0.01,
    "weights": 0.005, "why": 0.3,
}  # fmt: skip


@dataclass
class Block:
    page: str
    line: int  # of the code's first line
    mark: str
    language: str
    code: str

    @property
    def needs(self) -> str:
        return self.mark.removeprefix("needs ") if self.mark.startswith("needs ") else ""

    @property
    def runs(self) -> bool:
        return self.language == "python" and not self.mark.startswith("excerpt")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> Iterator[str]:
    yield "README.md"
    yield from sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = list(FENCE.finditer(text))
    assert len(re.findall(r"^ *```", text, re.M)) == 2 * len(found), f"{page}: a fence is not closed"
    return [Block(page, text.count("\n", 0, m.start(4)) + 1, m[1] or "", m[3], textwrap.dedent(m[4])) for m in found]


ALL = {page: blocks(page) for page in pages()}


def run(block: Block, names: dict[str, Any]) -> str:
    """Run it as a script would, with the page's lines in tracebacks; what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec", dont_inherit=True), names)
    return out.getvalue()


@pytest.mark.parametrize("page", [page for page, found in ALL.items() if any(b.runs for b in found)])
def test_a_page_runs_as_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what a page writes
    torchvision("datasets")  # transformers and Lightning import it, which fails beside a CPU torch without this
    missing = {b.needs: why for b in ALL[page] if b.needs and (why := importable(b.needs)) is not True}
    names: dict[str, Any] = {"__name__": "page"}
    printed = everything = ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")  # of torch's newer ways, in its own code
        if any(b.needs for b in ALL[page]):
            warnings.simplefilter("ignore")  # the peers are older than this torch
        for block in ALL[page]:
            if block.runs:
                printed = "" if block.needs in missing else run(block, names)
                everything += printed
            elif block.language == "text" and printed:
                assert alike(printed, block.code), f"{block} does not show what is printed:\n{printed}"
                printed = ""
    if missing:
        pytest.skip("not compared: " + "; ".join(f"{name}: {why}" for name, why in missing.items()))
    where, stem = page.rpartition("/")[::2]
    if where == "docs/tutorials":
        gain = IMPROVES[stem.removesuffix(".md")]
        assert (names["after"] - names["before"]) / gain >= 1, (names["before"], names["after"])
    elif where == "docs/coming-from":
        for a, b in zip(names["ours"], names["theirs"], strict=True):
            assert a.dtype == b.dtype == torch.float64
            assert float((a - b).norm() / b.norm()) <= 1e-10
    elif page == "docs/few_shot.md":
        assert 0.2 < names["found"]["5"].mean <= 1
    elif page == "README.md":
        example = next(b for b in ALL[page] if b.runs)
        assert sum(bool(line.strip()) for line in example.code.splitlines()) <= 16  # "fifteen lines"
        wrong, right = map(int, re.findall(r"(\d+)%", everything))
        assert wrong >= 90
        assert right <= 10
        assert names["report"], str(names["report"])


def alike(printed: str, shown: str) -> bool:
    """The same words; numbers to 5 %, or to 0.02 for small ones."""
    a, b = ([float(x.replace(",", "").replace("−", "-")) for x in NUMBER.findall(text)] for text in (printed, shown))
    close = len(a) == len(b) and all(abs(x - y) <= max(0.02, 0.05 * abs(y)) for x, y in zip(a, b, strict=True))
    words = [" ".join(NUMBER.sub("0", text).split()) for text in (printed, shown)]
    return close and words[0] == words[1]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored_in_it(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this code, wherever an installation points
    stored = nbformat.read(path, as_version=4)
    fresh = copy.deepcopy(stored)
    fresh.cells.append(nbformat.v4.new_code_cell("import sys; sys.executable"))
    nbclient.NotebookClient(fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    assert fresh.cells.pop().outputs[0]["data"]["text/plain"].strip("'") == sys.executable
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        before, after = (list(map(shown, cell.get("outputs", []))) for cell in (old, new))
        assert len(before) == len(after), new
        for a, b in zip(after, before, strict=True):
            assert alike(a, b), f"{path.name} does not show what is printed:\n{a}"


def shown(output: Any) -> str:
    """An output as text; of a picture, that it is one."""
    return output["text"] if "text" in output else " ".join(sorted(output["data"]))


def diffs(page: str) -> Iterator[tuple[Block, str]]:
    """Each diff block of the page, and the diff that belongs there."""
    found = ALL[page]
    for n, block in enumerate(found):
        if block.language == "diff":
            before = next(b for b in reversed(found[:n]) if b.mark in ("before", "after"))
            after = next(b for b in found[n:] if b.mark == "after")
            lines = difflib.unified_diff(before.code.splitlines(), after.code.splitlines(), n=1, lineterm="")
            # without the file names and the numbers of lines, which say nothing here
            hunks = ["@@" if x.startswith("@@") else x.rstrip() for x in list(lines)[2:]]
            yield block, "\n".join(hunks[1:]) + "\n"


@pytest.mark.parametrize("page", [page for page, found in ALL.items() if any(b.language == "diff" for b in found)])
def test_a_diff_leads_from_the_code_above_it_to_the_code_below(page: str) -> None:
    for block, right in diffs(page):
        assert block.code == right, f"{block} is not the diff of the two blocks; python tests/test_docs.py writes it"


EXCERPTS = [b for found in ALL.values() for b in found if b.mark.startswith("excerpt")]


@pytest.mark.parametrize("block", EXCERPTS, ids=str)
def test_an_excerpt_stands_in_its_file(block: Block) -> None:
    """By the rule that the site is built with."""
    assert find(block.code, ROOT / block.mark.removeprefix("excerpt of ")) > 0


COMMANDS = [b for found in ALL.values() for b in found if b.language in ("", "bash", "console")]


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_are_ones_that_exist(block: Block) -> None:
    """They may take hours, so they are not run: the recipes' tests run each command on small data."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in block.code.replace("\\\n", " ").splitlines():
        words = [w for w in shlex.split(line, comments=True) if w != "$" and not re.match(r"[A-Z_]+=", w)]
        if not words:
            continue
        program, flags = words[0].removeprefix(".venv/bin/"), words[1:]
        if program == "torchrun":  # what comes behind its own flags is as for python
            program, flags = "python", flags[flags.index("-m") :] if "-m" in flags else flags[-1:]
        if program == "make":
            assert set(flags) <= targets, line
        elif (
            program == "python" and flags[:1] == ["-m"] and flags[1].split(".")[0] in ("bilevel_recipes", "benchmarks")
        ):
            module = importlib.import_module(flags[1])
            module = importlib.import_module(f"{flags[1]}.__main__") if hasattr(module, "__path__") else module
            if flags[2:] and flags[2:] != ["--help"]:
                if recipe := getattr(module, "RECIPE", None):
                    command.parse(recipe, flags[2:])
                elif settings := getattr(module, "Settings", None):
                    tyro.cli(settings, args=flags[2:], config=(tyro.conf.FlagCreatePairsOff,))
                else:
                    module.parser().parse_args(flags[2:])
        elif program == "bilevel-clean":
            if flags != ["--help"]:
                bilevel_clean.parse(flags)
        elif program == "bilevel-attribute":
            if flags != ["--help"]:
                bilevel_attribute.parse(flags)
        elif program == "bilevel-fewshot":
            if flags[-1:] != ["--help"]:
                bilevel_fewshot.parse(flags)
        elif program == "python" and flags[0].endswith(".py"):
            assert (ROOT / flags[0]).exists(), line
        else:
            known = ("python", "pip", "git", "cd", "pytest", "ruff", "pyright", "mkdocs")
            assert program in known, f"{block}: what is {program}? (text goes in ```text)"


def test_every_block_is_of_a_known_kind() -> None:
    for block in (b for found in ALL.values() for b in found):
        assert block.language not in ("py", "python3", "pycon"), f"{block}: python blocks are marked as python"
        known = block.mark.split(" ")[0] in ("", "needs", "before", "after", "excerpt")
        assert known or block.language != "python", f"{block}: what does <!-- {block.mark} --> mean?"
    assert {f"docs/tutorials/{name}.md" for name in IMPROVES} == {
        page for page in ALL if page.startswith("docs/tutorials/") and not page.endswith("index.md")
    }


if __name__ == "__main__":  # write the diffs into the pages
    for page in sys.argv[1:] or ALL:
        lines = (ROOT / page).read_text().splitlines(keepends=True)
        for block, right in reversed(list(diffs(page))):
            lines[block.line - 1 : block.line - 1 + block.code.count("\n")] = [right]
        (ROOT / page).write_text("".join(lines))

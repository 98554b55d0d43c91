"""Imports go one way, the rooms do not know each other, and docs/architecture.md shows the graph that the code has."""

import ast
from pathlib import Path

import pytest

from docs.figures.imports import ORDER, PAGE, Edge, edges, modules, table, upward, with_table

FOUND = edges()
ROOMS = {
    "solvers": {"solvers", "schedules"},
    "pullbacks": {name for name in modules() if name.startswith("pullback/")},
    "engines": {name for name in modules() if name.startswith("hypergrad/")},
}


def test_every_file_has_a_place_in_the_order():
    assert sorted(ORDER) == sorted(modules())
    assert len(FOUND) > 50


def test_no_import_goes_upward():
    assert upward(FOUND) == []


def test_the_order_is_not_kept_by_hiding():
    """Imports in a function are for what is slow to import, or not there in every build; none is for types alone."""
    hidden = {(e.of, e.to): e.kind for e in FOUND if e.kind}
    assert hidden == {("hypergrad/reverse", "pullback/compiled"): "lazy", ("inner", "parallel"): "lazy"}


def test_the_rooms_do_not_know_each_other():
    """Only `reverse` knows of pullbacks, by their table; engines share no more than what an engine is."""
    room = {name: title for title, names in ROOMS.items() for name in names}
    across = {(e.of, e.to) for e in FOUND if e.of in room and e.to in room and room[e.of] != room[e.to]}
    assert across == {("hypergrad/reverse", "pullback/__init__"), ("hypergrad/reverse", "pullback/compiled")}
    engines = {f"hypergrad/{name}" for name in ("unroll", "forward", "implicit", "reverse")}
    assert not [e for e in FOUND if e.of in engines and e.to in engines]


@pytest.mark.parametrize("name", ["step", "replay", *sorted(set().union(*ROOMS.values()))])
def test_no_step_solver_pullback_or_engine_knows_of_tasks_or_group(name):
    """They are two kinds of binding, and what they change is behind its methods."""
    assert not [e for e in FOUND if e.of == name and e.to in ("tasks", "parallel")]
    read = {node.attr for node in ast.walk(ast.parse(modules()[name].read_text())) if isinstance(node, ast.Attribute)}
    assert not read & {"tasks", "group", "_group", "ranks", "_ranks"}


def test_the_page_shows_the_graph_of_the_code():
    """If it fails: python -m docs.figures.imports."""
    page = PAGE.read_text()
    assert page == with_table(page)
    assert table() in page


def test_an_upward_edge_is_found_whatever_way_it_is_written(tmp_path):
    """By all the ways to write an import, in a package that has the names of ours."""
    package = tmp_path / "bilevel_plugin"
    for name in ORDER:
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    for name, lines in {
        "graph": ["from . import loop", "import torch, math", "from torch.nn import inner"],
        "kernels": ["if TYPE_CHECKING:", "    from .inner import Inner", "else:", "    from .graph import x"],
        "solvers": ["import bilevel_plugin.hypergrad.plan as p", "from .schedules import power"],
        "updates": ["class A:", "    def f(self):", "        if self:", "            from bilevel_plugin import check"],
        "step": ["try:", "    from .hypergrad import Engine", "except ImportError:", "    pass"],
        "pullback/base": ["from ..replay import x", "from . import lean", "from .. import graph, State"],
        "hypergrad/base": ["def f():", "    from . import reverse", "from .reverse import Reverse"],
    }.items():
        (package / f"{name}.py").write_text("\n".join(lines))
    found = edges(package)
    assert set(upward(found)) == {
        Edge("graph", "loop"),
        Edge("kernels", "inner", "types"),
        Edge("solvers", "hypergrad/plan"),
        Edge("updates", "check", "lazy"),
        Edge("step", "hypergrad/__init__"),
        Edge("pullback/base", "replay"),
        Edge("pullback/base", "pullback/lean"),
        Edge("pullback/base", "__init__"),  # State, from the top
        Edge("hypergrad/base", "hypergrad/reverse"),
    }
    assert set(found) - set(upward(found)) == {
        Edge("kernels", "graph"),
        Edge("solvers", "schedules"),
        Edge("pullback/base", "graph"),
    }


TESTS = Path(__file__).parent
ENGINES, PULLBACKS = "hypergrad/test_every_engine.py", "pullback/test_every_pullback.py"
TESTED_BY = {
    "__init__": "test_doctests.py",
    **{f"hypergrad/{name}": ENGINES for name in ("__init__", "base")},
    **{f"pullback/{name}": PULLBACKS for name in ("__init__", "base", "plain")},
}


@pytest.mark.parametrize("name", modules())
def test_a_module_has_its_test_file(name):
    folder, _, stem = name.rpartition("/")
    assert (TESTS / TESTED_BY.get(name, f"{folder}/test_{stem}.py").lstrip("/")).is_file()


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.stem)
def test_no_test_file_imports_another(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    assert not [name for name in names if name.startswith("test_")]

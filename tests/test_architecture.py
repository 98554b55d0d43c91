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
BY_CONTRACT = {  # hypergrad/test_every_engine.py and pullback/test_every_pullback.py
    "hypergrad/__init__",
    "hypergrad/base",
    "pullback/__init__",
    "pullback/base",
    "pullback/plain",
}


def test_every_module_has_its_test_file():
    wanted = {str(Path(m).parent / f"test_{Path(m).name}.py") for m in modules() if m not in BY_CONTRACT | {"__init__"}}
    assert {name for name in wanted if not (TESTS / name).is_file()} == set()


def test_no_test_file_imports_another():
    found = [
        (path.name, name)
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if name.startswith("test_")
    ]
    assert found == []

"""Imports go one way, the rooms do not know each other, and docs/architecture.md shows the graph that the code has."""

import ast
from pathlib import Path

import pytest

from docs.figures.imports import PAGE, Edge, edges, level, modules, table, upward, with_table

FOUND = edges()
ENGINES = [name for name in modules() if name.startswith("engine/")]
UNAWARE = [name for name in modules() if name.startswith(("update/", "step/", "pullback/", "engine/"))]


def test_every_file_has_a_level():
    assert all(level(name) >= 0 for name in modules())
    assert len(FOUND) > 50


def test_no_import_goes_upward_or_round_in_a_circle():
    assert upward(FOUND) == []


def test_the_order_is_not_kept_by_hiding():
    """Imports in a function are for what is slow to import, or not there in every build; types go within a room."""
    hidden = [e for e in FOUND if e.kind]
    assert {(e.of, e.to) for e in hidden if e.kind == "lazy"} <= {
        ("engine/reverse", "pullback/compiled"), ("inner", "model/group"),
    }  # fmt: skip
    assert all(level(e.of) >= level(e.to) for e in hidden)


def test_engines_do_not_know_each_other():
    engines = {f"engine/{name}" for name in ("unroll", "forward", "implicit", "reverse")}
    assert not [e for e in FOUND if e.of in engines and e.to in engines]


@pytest.mark.parametrize("name", UNAWARE)
def test_no_step_update_pullback_or_engine_knows_of_tasks_or_group(name):
    """They are two objects of the model, and what they change is behind their methods."""
    assert not [e for e in FOUND if e.of == name and e.to == "model/group"]
    read = {node.attr for node in ast.walk(ast.parse(modules()[name].read_text())) if isinstance(node, ast.Attribute)}
    assert not read & {"group", "_group", "_ranks", "vmaps"}


def test_the_page_shows_the_graph_of_the_code():
    """If it fails: python -m docs.figures.imports."""
    page = PAGE.read_text()
    assert page == with_table(page)
    assert table() in page


def test_an_upward_edge_is_found_whatever_way_it_is_written(tmp_path):
    """By all the ways to write an import, in a package that has the names of ours."""
    package = tmp_path / "bilevel_plugin"
    for name in modules():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    for name, lines in {
        "autograd/graph": ["from .. import loop", "import torch, math", "from torch.nn import inner"],
        "kernels/replace": [
            "if TYPE_CHECKING:",
            "    from ..inner import Inner",
            "else:",
            "    from ..autograd.graph import x",
        ],
        "update/solvers": ["import bilevel_plugin.engine.schedule as p", "from .schedules import power"],
        "update/update": [
            "class A:",
            "    def f(self):",
            "        if self:",
            "            from bilevel_plugin.check import gradcheck",
        ],
        "step/step": ["try:", "    from ..engine import Engine", "except ImportError:", "    pass"],
        "pullback/base": ["from ..autograd.graph import x", "from . import lean", "from .. import State"],
        "pullback/lean": ["from .base import x"],
    }.items():
        (package / f"{name}.py").write_text("\n".join(lines))
    found = edges(package)
    assert set(upward(found)) >= {
        Edge("autograd/graph", "loop"),
        Edge("kernels/replace", "inner", "types"),
        Edge("update/solvers", "engine/schedule"),
        Edge("update/update", "check/gradcheck", "lazy"),
        Edge("step/step", "engine/__init__"),
        Edge("pullback/base", "__init__"),  # State, from the top
    }
    assert {e for e in upward(found) if e.of.startswith("pullback/") and e.to.startswith("pullback/")}  # the circle
    assert Edge("update/solvers", "update/schedules") in set(found) - set(upward(found))


TESTS = Path(__file__).parent
TESTED_BY = {  # files without one of their own, by the beginnings of their names
    "autograd/": "autograd/test_graph.py", "engine/": "engine/test_every_engine.py",
    "guards/": "model/test_model.py", "model/group": "model/test_ranks.py", "outer": "test_outer_losses.py",
    "pullback/": "pullback/test_every_pullback.py", "step/": "step/test_step.py", "update/": "update/test_update.py",
    **dict.fromkeys(("collect", "gradients", "inputs", "run", "steps"), "test_loop.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in modules() if not name.endswith("__init__")])
def test_a_module_has_its_test_file(name):
    """Its own, `tests/room/test_name.py`, or one that tests it with others."""
    room, _, stem = name.rpartition("/")
    others = [path for start, path in TESTED_BY.items() if name.startswith(start)]
    assert any((TESTS / path).is_file() for path in (f"{room}/test_{stem}.py".lstrip("/"), *others))


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.stem)
def test_no_test_file_imports_another(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    assert not [name for name in names if name.startswith("test_")]

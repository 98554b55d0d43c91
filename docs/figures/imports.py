"""The import graph of the package, as the table of docs/architecture.md. python -m docs.figures.imports"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bilevel_plugin"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- made by python -m docs.figures.imports -->\n", "<!-- the end of what was made -->\n"

LEVELS = (  # a file imports files of levels before its own, and of its own level without going round in a circle
    ("autograd/",), ("kernels/",), ("update/",), ("model/", "guards/"), ("step/",), ("pullback/",), ("engine/",),
    ("check/",), ("run", "steps", "outer", "inputs", "collect", "gradients", "loop", "inner"),
    ("check/gradcheck", "check/runs", "check/check_loop", "check/trainings", "check/smoothness", "check/forecast"),
    ("__init__",),
)  # fmt: skip


def level(name: str) -> int:
    """The level of a file: that of the longest name in LEVELS that its own name begins with."""
    fits = [(len(start), i) for i, starts in enumerate(LEVELS) for start in starts if name.startswith(start)]
    if not fits:
        raise ValueError(f"{name} has no level: give its room one in LEVELS, docs/figures/imports.py.")
    return max(fits)[1]


@dataclass(frozen=True)
class Edge:
    """One file of the package imports another: at once, in a function that needs it (lazy), or for its types alone."""

    of: str
    to: str
    kind: str = ""  # "lazy", "types"


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """The files of the package by their names."""
    return {path.relative_to(package).with_suffix("").as_posix(): path for path in sorted(package.rglob("*.py"))}


def edges(package: Path = PACKAGE) -> list[Edge]:
    """Every import of one file of the package by another, relative or by the package's name."""
    known = modules(package)
    found: dict[tuple[str, str], Edge] = {}
    for name, path in known.items():
        for node, kind in _imports(ast.parse(path.read_text()), ""):
            for target in _targets(node, name, known, package.name):
                edge = Edge(name, target, kind)
                before = found.get((name, target))
                if before is None or (before.kind and not kind):  # an import at once outweighs a lazy one
                    found[name, target] = edge
    return list(found.values())


def upward(found: list[Edge]) -> list[Edge]:
    """The edges to a file of a later level, or round in a circle; names of types may go both ways in one level."""
    place = {name: i for i, name in enumerate(order(found))}
    circles = [e for e in found if e.kind != "types" and place.get(e.to, -1) >= place.get(e.of, -1)]
    return [e for e in found if level(e.to) > level(e.of) or e in circles]


def order(found: list[Edge]) -> list[str]:
    """The files, each after those that it imports, and by their levels and names where that leaves a choice."""
    before: dict[str, set[str]] = {name: set() for e in found for name in (e.of, e.to)}
    for e in found:
        if e.kind != "types":
            before[e.of].add(e.to)
    done: list[str] = []
    while before:
        ready = [name for name, imports in before.items() if not imports & before.keys()] or list(before)
        done.append(min(ready, key=lambda name: (level(name), name)))
        del before[done[-1]]
    return done


def _imports(node: ast.AST, kind: str) -> list[tuple[ast.Import | ast.ImportFrom, str]]:
    """The import statements under a node, each with how it is run."""
    found: list[tuple[ast.Import | ast.ImportFrom, str]] = []
    for child in ast.iter_child_nodes(node):
        inside = kind
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside = "lazy"
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            found += [pair for part in child.body for pair in _imports(ast.Module([part], []), "types")]
            found += [pair for part in child.orelse for pair in _imports(ast.Module([part], []), kind)]
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            found.append((child, inside))
        else:
            found += _imports(child, inside)
    return found


def _targets(node: ast.Import | ast.ImportFrom, name: str, known: dict[str, Path], package: str) -> list[str]:
    """The files that a statement imports from: `from . import x` means the file x, if there is one."""
    if isinstance(node, ast.Import):
        inside = [a.name.split(".")[1:] for a in node.names if a.name.split(".")[0] == package]
        return [t for parts in inside if (t := _file(parts, known)) is not None]
    parts = (node.module or "").split(".") if node.module else []
    if node.level:
        parts = [*name.split("/")[: -node.level], *parts]
        if node.level > len(name.split("/")):
            raise ValueError(f"{name}: a relative import leaves the package")
    elif parts[:1] == [package]:
        parts = parts[1:]
    else:
        return []
    files = [_file([*parts, a.name], known) for a in node.names]
    whole = _file(parts, known)
    return list(dict.fromkeys(t for t in (f or whole for f in files) if t is not None and t != name))


def _file(parts: list[str], known: dict[str, Path]) -> str | None:
    path = "/".join(parts)
    return (
        path if path in known else f"{path}/__init__".lstrip("/") if f"{path}/__init__".lstrip("/") in known else None
    )


# --- the table ---


def label(name: str) -> str:
    """The file as the page names it: a folder stands for its __init__.py."""
    return (
        "bilevel_plugin" if name == "__init__" else f"{name.removesuffix('__init__')}" if "/__init__" in name else name
    )


def table(package: Path = PACKAGE) -> str:
    """The files in their order, with the first line of each docstring and what each one imports."""
    known, found = modules(package), edges(package)
    place = {name: i for i, name in enumerate(order(found))}
    lines = ["| file | what is in it | imports |", "| --- | --- | --- |"]
    for name in sorted(known, key=lambda name: (level(name), place.get(name, -1), name)):
        mine = sorted((e for e in found if e.of == name), key=lambda e: (level(e.to), place[e.to]))
        marks = {"": "", "lazy": " (when it is needed)", "types": " (for its types)"}
        imports = ", ".join(f"`{label(e.to)}`{marks[e.kind]}" for e in mine) or "nothing"
        text = (ast.get_docstring(ast.parse(known[name].read_text())) or "").split("\n")[0].replace("|", "\\|")
        lines.append(f"| `{label(name)}` | {text} | {imports} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table of the code as it is now."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    print(PAGE.relative_to(ROOT))

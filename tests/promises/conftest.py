"""Marks what red.py lists: tests of promises that are not kept yet. Their failures are expected, and have to be mended.

The list is that of the versions in constraints.txt. With others (`--core`, `--newer`) a listed test may pass.
"""

import pytest
from red import RED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    strict = not (config.getoption("--core") or config.getoption("--newer"))
    for item in items:
        test = getattr(item, "originalname", None)
        row, found = RED.get(item.path.name, {}).get(test, ("", {}))
        what, _, variant = item.name.removeprefix(f"{test}").removeprefix("[").removesuffix("]").rpartition("-")
        if what in found and (variant == found[what] or variant in found[what].split()):
            raises = AssertionError, pytest.fail.Exception
            item.add_marker(pytest.mark.xfail(strict=strict, raises=raises, reason=f"issue 25: {row}"))

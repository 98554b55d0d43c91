"""The list of what is red names tests that exist, of rows that are said."""

import importlib
from pathlib import Path

from red import RED


def test_the_list_names_tests_and_their_rows():
    for file, tests in RED.items():
        assert (Path(__file__).parent / file).exists(), file
        module = importlib.import_module(file.removesuffix(".py"))
        for test, (row, found) in tests.items():
            assert callable(getattr(module, test, None)), f"{file} has no {test}"
            assert row, f"{test} of {file} has no row"
            assert found, f"{test} of {file} is in the list, and nothing of it is red"

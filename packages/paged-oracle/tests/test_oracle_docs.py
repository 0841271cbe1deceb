"""Every example in the documentation runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import paged_oracle
import pytest

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(paged_oracle.__path__, "paged_oracle.")
    if name != "paged_oracle.onnx"
]


def test_readme() -> None:
    found = doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False)
    assert found.attempted >= 10
    assert found.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
    assert module.__doc__

"""Examples run, and the package keeps to its imports."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import paged_kv
import paged_kv.vmm
import pytest

README = Path(__file__).parent.parent / "README.md"
GROWING = Path(__file__).parents[3] / "docs" / "growing.md"
MODULES = sorted(name for _, name, _ in pkgutil.walk_packages(paged_kv.__path__, "paged_kv."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_examples_in_the_readme() -> None:
    failed, ran = doctest.testfile(str(README), module_relative=False)
    assert failed == 0
    assert ran > 5


def test_examples_about_growing() -> None:
    failed, ran = doctest.testfile(str(GROWING), module_relative=False)
    assert failed == 0
    assert ran > 20


def test_importing_brings_numpy_and_nothing_else() -> None:
    program = (
        "import sys, paged_kv, paged_kv.vmm\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & {'pydantic', 'paged_schema', 'paged_cuda', 'cuda', 'onnx', 'hypothesis'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_public_is_documented() -> None:
    for package in (paged_kv, paged_kv.vmm):
        for name in package.__all__:
            thing = getattr(package, name)
            assert not callable(thing) or thing.__doc__, name

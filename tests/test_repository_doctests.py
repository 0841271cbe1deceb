"""The examples in the docstrings of every module, public or not, run and print what they say."""

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

PACKAGES = ("paged_schema", "paged_oracle", "paged_kv", "paged_cuda", "paged_bench")
# This one runs inside another interpreter, beside a package that is not installed here.
ELSEWHERE = {"paged_schema.testing.ort_worker"}


def modules(package: str) -> Iterator[ModuleType]:
    root = importlib.import_module(package)
    yield root
    for found in pkgutil.walk_packages(root.__path__, f"{package}."):
        if not found.name.endswith(".__main__") and found.name not in ELSEWHERE:
            yield importlib.import_module(found.name)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_examples_hold(package: str) -> None:
    public = vars(importlib.import_module(package))
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    for module in modules(package):
        # An example may use its own module's names and whatever the package exports.
        for test in finder.find(module, module.__name__, extraglobs={**public, **vars(module)}):
            runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)

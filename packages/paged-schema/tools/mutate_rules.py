"""Change one thing in the rules, run the tests, and report every change that no test notices.

Each mutant runs in a forked child that imports the package anew with one module's source changed. Run it from
the repository root: `python packages/paged-schema/tools/mutate_rules.py [MODULE ...]`. Exit status 1 if one
survives.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hypothesis  # noqa: F401 - imported before the forks, so that each child starts fast
import numpy  # noqa: F401 - as above
import onnx  # noqa: F401 - as above
import pydantic  # noqa: F401 - as above
import pytest

PACKAGE = Path(__file__).parents[1]
SOURCE = PACKAGE / "src" / "paged_schema"
MODULES = (
    "rules/verify",
    "rules/inference",
    "rules/build",
    "rules/rows",
    "rules/values",
    "rules/caches",
    "rules/sequences",
    "rules/rotary",
    "rules/quantisation",
    "rules/select",
    "rules/shapes",
    "backends",
    "eligibility",
)
TESTS = (
    "test_schema_rules.py",
    "test_schema_recorded.py",
    "test_schema_backends.py",
    "test_schema_models.py",
    "test_schema_cuda_provider.py",
)
SECONDS = 180
# The project's configuration would turn "already imported" into an error.
PYTEST = ("-x", "-q", "-c", os.devnull, "--import-mode=importlib", "--assert=plain", "-p", "no:cacheprovider")

COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def mutants(tree: ast.Module) -> Iterator[tuple[str, ast.Module]]:
    """Yield a description and a changed copy for every change."""
    silent = skipped(tree)
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in silent:
            continue
        for what, change in changes(node):
            mutated = copy.deepcopy(tree)
            target = next(found for at, found in enumerate(ast.walk(mutated)) if at == index)
            replace(target, change)
            yield f"line {getattr(node, 'lineno', '?')}: {what}", ast.fix_missing_locations(mutated)


def changes(node: ast.AST) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what to change in one node, as new values of its fields."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            for other in COMPARE[type(operator)]:
                operators = [other() if index == at else old for index, old in enumerate(node.ops)]
                yield f"{ast.unparse(node)} with {other.__name__}", {"ops": operators}
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{ast.unparse(node)} with {type(other).__name__}", {"op": other}
        for at in range(len(node.values)):
            rest = [value for index, value in enumerate(node.values) if index != at]
            yield f"{ast.unparse(node)} without part {at}", {"values": rest if len(rest) > 1 else rest * 2}
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not is_text(node):
        other = ARITHMETIC[type(node.op)]
        yield f"{ast.unparse(node)} with {other.__name__}", {"op": other()}
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield (
            f"{ast.unparse(node)} without not",
            {"op": ast.Not(), "operand": ast.UnaryOp(ast.Not(), node.operand)},
        )
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} becomes {node.value + 1}", {"value": node.value + 1}
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield f"{node.value} flipped", {"value": not node.value}
    elif isinstance(node, ast.FunctionDef) and node.name == "_":
        yield (
            f"rule {ast.unparse(node.decorator_list[0])[:40]} dropped",
            {"body": [ast.Return(ast.Constant(None))]},
        )


def is_text(node: ast.BinOp) -> bool:
    """Return whether an operation joins types or text, not numbers."""
    return any(
        isinstance(side, ast.Constant) and not isinstance(side.value, int) for side in (node.left, node.right)
    )


def replace(node: ast.AST, change: dict[str, object]) -> None:
    """Set fields of a node in place."""
    for name, value in change.items():
        setattr(node, name, value)


def skipped(tree: ast.Module) -> set[int]:
    """Return the ids of nodes that decide nothing: annotations, class decorators and the text of messages."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            roots.append(node)
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            roots.append(node.annotation)
        elif isinstance(node, ast.ClassDef):
            roots += node.decorator_list
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            roots.append(node.returns)
    return {id(inner) for root in roots for inner in ast.walk(root)}


class Serve(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that serves one module from changed source."""

    def __init__(self, name: str, tree: ast.Module, path: Path) -> None:
        self.name, self.tree, self.path = name, tree, path

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Claim the one module."""
        return (
            importlib.util.spec_from_loader(name, self, origin=str(self.path)) if name == self.name else None
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source."""
        module.__file__ = str(self.path)
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def survives(name: str, tree: ast.Module, path: Path) -> bool:
    """Return whether the tests pass with the change."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "paged_schema"]:
            del sys.modules[loaded]
        sys.meta_path.insert(0, Serve(name, tree, path))
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if quietly_passes() else 1
            for test in () if code else TESTS:
                code = code or int(pytest.main([*PYTEST, str(PACKAGE / "tests" / test)]))
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def quietly_passes() -> bool:
    """Run the plain and the parametrised tests without pytest, which takes most of the time."""
    for name in TESTS[:3]:
        spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), PACKAGE / "tests" / name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        for test in [value for key, value in vars(module).items() if key.startswith("test_")]:
            marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
            wanted = list(inspect.signature(test).parameters)
            if not wanted and not hasattr(test, "hypothesis"):
                test()
            elif len(marks) == 1 and wanted == names_of(marks[0].args[0]):
                for values in marks[0].args[1]:
                    test(*(values if len(wanted) > 1 else (values,)))
    return True


def names_of(given: str | tuple[str, ...]) -> list[str]:
    """Return the parameter names of a parametrised test."""
    return given.replace(",", " ").split() if isinstance(given, str) else list(given)


def main(names: list[str]) -> int:
    """Mutate the named modules, all of them without a name."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    total, survivors = 0, []
    for module in names or MODULES:
        path = SOURCE / f"{module}.py"
        tree = ast.parse(path.read_text())
        dotted = "paged_schema." + module.replace("/", ".")
        if not survives(dotted, tree, path):
            print(f"{module}: the tests fail without any change")
            return 1
        for what, mutant in mutants(tree):
            total += 1
            if survives(dotted, mutant, path):
                survivors.append(f"{module}.py {what}")
                print(f"survived: {survivors[-1]}", flush=True)
    print(f"{total} mutants, {len(survivors)} survived")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Who may import whom, read from the syntax trees, so that a lazy import counts as well."""

import ast
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package: what its modules may import besides the standard library and themselves.
ALLOWED = {
    "paged_schema": {"pydantic"},
    "paged_oracle": {"paged_schema", "numpy", "ml_dtypes"},
    "paged_kv": {"paged_schema", "numpy"},
    "paged_cuda": {"paged_schema", "numpy", "cuda"},
    "paged_bench": {
        *("paged_schema", "paged_oracle", "paged_kv", "paged_cuda"),
        *("numpy", "ml_dtypes", "cuda", "gguf", "rich", "tokenizers"),
    },
}
# What an extra brings: only inside a function, so that the package imports without it.
LAZY = {"paged_schema": {"onnx"}, "paged_cuda": {"ml_dtypes"}}
# Modules that exist for an extra, or that run in another interpreter; nothing may import them eagerly.
APART = {
    "paged_oracle/onnx.py": {"onnx"},
    "paged_schema/onnx.py": {"onnx"},
    "paged_schema/strict.py": {"numpy"},
    "paged_schema/testing/ort_worker.py": {"onnxruntime"},
}


def source_of(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


def absolute(node: ast.AST) -> list[str]:
    """Return the top-level names that an import statement asks for; relative imports ask for none."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module.partition(".")[0]]
    return []


def type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, *, inside_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each imported top-level name and whether the import waits until a function is called."""
    for name in absolute(node):
        yield name, inside_function
    late = inside_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or type_checking(node)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, inside_function=late)


def strangers(package: str, text: str, apart: Set[str] = frozenset()) -> set[str]:
    """Return what the source text imports although its package may not."""
    eager = ALLOWED[package] | {package} | apart | sys.stdlib_module_names
    lazy = eager | LAZY.get(package, set())
    found = imports(ast.parse(text))
    return {name for name, late in found if name not in (lazy if late else eager)}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_keep_to_the_layers(package: str) -> None:
    source = source_of(package)
    files = {path.relative_to(source.parent).as_posix(): path for path in sorted(source.rglob("*.py"))}
    assert files
    found = {
        name: strangers(package, path.read_text(encoding="utf-8"), APART.get(name, set()))
        for name, path in files.items()
    }
    assert {name: names for name, names in found.items() if names} == {}


def test_what_stands_apart_exists() -> None:
    for name in APART:
        assert (source_of(name.partition("/")[0]).parent / name).is_file()


@pytest.mark.parametrize(
    ("package", "text", "caught"),
    [
        ("paged_kv", "import paged_cuda.vmm", {"paged_cuda"}),
        ("paged_cuda", "def f():\n    from paged_kv import stats", {"paged_kv"}),
        ("paged_schema", "import onnx", {"onnx"}),
        ("paged_schema", "def f():\n    import onnx", set()),
        ("paged_oracle", "from . import attention\nimport math, numpy.typing", set()),
    ],
)
def test_the_check_sees_what_it_should(package: str, text: str, caught: set[str]) -> None:
    assert strangers(package, text) == caught

"""Who may import whom, read from the syntax trees, so that a late import counts as well."""

import ast
import sys
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
        *("numpy", "ml_dtypes", "cuda", "gguf", "pydantic", "rich", "tokenizers"),
    },
}
# What an extra or the caller brings. Another test sees that importing the package does without.
OPTIONAL = {
    "paged_schema": {"google", "numpy", "onnx"},
    "paged_oracle": {"onnx"},
    "paged_cuda": {"ml_dtypes"},
}
# Runs in another interpreter, beside a package that is not installed here.
ELSEWHERE = {"paged_schema/testing/ort_worker.py": {"onnxruntime"}}


def source_of(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-") / "src"


def absolute(node: ast.AST) -> list[str]:
    """Return the top-level names that a node imports; relative imports ask for none."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module.partition(".")[0]]
    return []


def strangers(package: str, text: str) -> set[str]:
    """Return what the source text imports although its package may not."""
    allowed = ALLOWED[package] | OPTIONAL.get(package, set()) | {package} | sys.stdlib_module_names
    return {name for node in ast.walk(ast.parse(text)) for name in absolute(node)} - allowed


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_keep_to_the_layers(package: str) -> None:
    source = source_of(package)
    files = {path.relative_to(source).as_posix(): path for path in sorted(source.rglob("*.py"))}
    assert len(files) > 5
    found = {name: strangers(package, path.read_text(encoding="utf-8")) for name, path in files.items()}
    outside = {name: names - ELSEWHERE.get(name, set()) for name, names in found.items()}
    assert {name: names for name, names in outside.items() if names} == {}


@pytest.mark.parametrize(
    ("package", "text", "caught"),
    [
        ("paged_kv", "import paged_cuda.vmm", {"paged_cuda"}),
        ("paged_cuda", "def f():\n    from paged_kv import stats", {"paged_kv"}),
        ("paged_schema", "import paged_oracle", {"paged_oracle"}),
        ("paged_schema", "def f():\n    import onnx", set()),
        ("paged_oracle", "from . import attention\nimport math, numpy.typing", set()),
    ],
)
def test_the_check_sees_what_it_should(package: str, text: str, caught: set[str]) -> None:
    assert strangers(package, text) == caught

"""The CI entry and the guard against hung tests."""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENTRY = ROOT / ".ci" / "run"

HUNG_IN_PYTHON = "import time\ndef test_hung():\n    time.sleep(600)\n"
# A mutex locked twice: no signal wakes it and the interpreter lock is held, as when an extension deadlocks.
HUNG_IN_C = """
import ctypes
def test_hung():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any("nox.session" in ast.unparse(d) for d in f.decorator_list)}


def test_the_sessions_are_the_ones_agreed() -> None:
    expected = {
        "demo",
        "tests",
        "lint",
        "types",
        "kernels",
        "build",
        "docs",
        "minimums",
        "gpu_parity",
        "bench",
    }
    assert sessions() == expected


def test_ci_runs_the_tests_first_and_then_the_checks() -> None:
    text = ENTRY.read_text(encoding="utf-8")
    assert os.access(ENTRY, os.X_OK)
    assert "set -euo pipefail" in text
    assert re.findall(r"^session \w+ (\w+)$", text, re.MULTILINE) == ["tests", "lint", "types", "kernels"]
    subprocess.run(["bash", "-n", str(ENTRY)], check=True)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGALRM and pthread are POSIX")
@pytest.mark.parametrize("body", [HUNG_IN_PYTHON, HUNG_IN_C], ids=["in Python", "in C, holding the GIL"])
def test_a_hung_test_is_killed(tmp_path: Path, body: str) -> None:
    (tmp_path / "test_hung.py").write_text(body, encoding="utf-8")
    short = ["-o", "timeout=1", "-o", "faulthandler_timeout=3", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *short, str(tmp_path)]
    started = time.monotonic()
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert time.monotonic() - started < 100
    assert "Timeout" in result.stdout + result.stderr

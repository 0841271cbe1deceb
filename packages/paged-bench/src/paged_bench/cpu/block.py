"""One run of the pytest-benchmark files: its samples and its failures.

Invariant: a benchmark's id follows from its file and its name alone, so that one that fails has the id of the
one that worked.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from paged_bench.errors import BenchError
from paged_bench.record import Case, Samples
from paged_bench.record.types import Scalar

MOST_SAMPLES = 400  # of one benchmark in one block; more are thinned out evenly
_CONFIGURATION = "[pytest]\npython_files = bench_*.py\npython_functions = test_*\n"
# A file that cannot be imported, as over an older base, costs its own benchmarks and no others.
_OPTIONS = (
    *("-q", "-p", "no:cacheprovider", "--import-mode=importlib"),
    *("--benchmark-disable-gc", "--continue-on-collection-errors"),
)
_BAD = ("failure", "error", "skipped")
_NOTHING_CHOSEN = 5  # pytest's own exit status


def benchmark_files(root: Path) -> list[Path]:
    """Return the benchmark files of the packages under `root`.

    Raises:
        BenchError: There are none.
    """
    found = sorted((root / "packages").glob("*/benchmarks/bench_*.py"))
    if not found:
        raise BenchError(
            str(root), "has no packages/*/benchmarks/bench_*.py", "give the source tree by --root"
        )
    return found


def suite_digest(files: Sequence[Path]) -> str:
    """Return one SHA-256 over the names and texts of the files."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        digest.update(f"{path.name}\0".encode() + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def case_id(package: str, name: str) -> str:
    """Return the stable id of a benchmark.

    Example:
        >>> case_id("paged-oracle", "test_prefill_2048_tokens[bfloat16]")
        'oracle/prefill-2048-tokens/bfloat16'
    """
    words, _, parameters = name.removeprefix("test_").rstrip("]").partition("[")
    parts = [package.removeprefix("paged-"), words, parameters]
    return "/".join(re.sub(r"[^a-z0-9.+=]+", "-", part.lower()).strip("-") for part in parts if part)


def run_block(files: Sequence[Path], select: str = "") -> tuple[Case, ...]:
    """Run every benchmark once, in a process of its own, and return a case for each.

    Raises:
        BenchError: pytest could not run, or nothing was chosen.
    """
    packages = {path.stem: path.parent.parent.name for path in files}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text(_CONFIGURATION, encoding="utf-8")
        raw, report = folder / "raw.json", folder / "report.xml"
        root = files[0].parents[3]
        words = [
            "-c",
            str(folder / "pytest.ini"),
            f"--rootdir={root}",
            f"--benchmark-json={raw}",
            f"--junitxml={report}",
        ]
        words += ["-k", select] if select else []
        command = [sys.executable, "-m", "pytest", *_OPTIONS, *words, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode == _NOTHING_CHOSEN:
            raise BenchError(f"--select {select}", "chooses no benchmark", "see packages/*/benchmarks")
        if not report.exists() or done.returncode not in (0, 1):
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            problem = f"ended with status {done.returncode}: {' '.join(last)}"
            raise BenchError(
                "pytest", problem, "install pytest-benchmark, and run the files alone to see more"
            )
        text = raw.read_text(encoding="utf-8") if raw.exists() else ""
        return (*_timed(json.loads(text or "{}"), packages), *_failures(report, packages))


def _timed(found: dict[str, list[dict[str, Any]]], packages: dict[str, str]) -> Iterator[Case]:
    names: dict[str, str] = {}
    for row in found.get("benchmarks", []):
        stats, about = row["stats"], dict(row["extra_info"])
        module = Path(row["fullname"].partition("::")[0]).stem
        data = stats["data"]
        step = max(1, -(-len(data) // MOST_SAMPLES))
        values = tuple(round(value * 1e6, 4) for value in data[::step])
        name = case_id(packages[module], row["name"])
        if name in names:
            problem = f"{names[name]} and {row['name']} both have the id {name}"
            raise BenchError("benchmarks", problem, "name their parameters apart")
        names[name] = row["name"]
        yield Case(
            id=name,
            title=about.pop("title", name),
            group=name.partition("/")[0],
            parameters={key: _scalar(value) for key, value in about.items()},
            series=(Samples(what="call", timing="wall", values=values, calls=stats["iterations"]),),
        )


def _scalar(value: object) -> Scalar:
    return value if isinstance(value, str | int | float) else json.dumps(value)


def _failures(report: Path, packages: dict[str, str]) -> Iterator[Case]:
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((case.find(kind) for kind in _BAD if case.find(kind) is not None), None)
        if found is None:
            continue
        # A file that cannot be imported has no class name; the file is then the case.
        module = case.get("classname", "").rpartition(".")[2] or case.get("name", "").rpartition(".")[2]
        name = case_id(packages.get(module, module), case.get("name", ""))
        why = " ".join((found.get("message") or found.tag).split())[:300]
        yield Case(id=name, title=name, group=name.partition("/")[0], failed=why)

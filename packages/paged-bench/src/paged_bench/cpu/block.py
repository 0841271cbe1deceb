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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from paged_bench.errors import BenchError
from paged_bench.record.schema import Scalar

MOST_SAMPLES = 400  # of one benchmark in one block; more are thinned out evenly
_CONFIGURATION = "[pytest]\npython_files = bench_*.py\npython_functions = test_*\n"
_OPTIONS = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--benchmark-disable-gc")
_NOTHING_CHOSEN = 5  # pytest's own exit status


@dataclass(frozen=True)
class Timed:
    """The samples of one benchmark in one block, microseconds a call."""

    title: str
    values: tuple[float, ...]
    calls: int
    parameters: dict[str, Scalar]


@dataclass
class Block:
    """What one run gave, by id."""

    timed: dict[str, Timed] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


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


def run_block(files: Sequence[Path], select: str = "") -> Block:
    """Run every benchmark once, in a process of its own.

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
        timed = _timed(json.loads(raw.read_text(encoding="utf-8") or "{}"), packages) if raw.exists() else {}
        return Block(timed, _failures(report, packages))


def _timed(found: dict[str, list[dict[str, object]]], packages: dict[str, str]) -> dict[str, Timed]:
    result = {}
    for row in found.get("benchmarks", []):
        stats, extra = row["stats"], row["extra_info"]
        assert isinstance(stats, dict)
        assert isinstance(extra, dict)
        name, module = str(row["name"]), Path(str(row["fullname"]).partition("::")[0]).stem
        data = [value * 1e6 for value in stats["data"]]
        step = max(1, -(-len(data) // MOST_SAMPLES))
        about = {key: value for key, value in extra.items() if key != "title"}
        values = tuple(round(value, 4) for value in data[::step])
        title = str(extra.get("title", name))
        result[case_id(packages[module], name)] = Timed(title, values, int(stats["iterations"]), about)
    return result


def _failures(report: Path, packages: dict[str, str]) -> dict[str, str]:
    failed = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2] or case.get("name", "")
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                why = " ".join((found.get("message") or kind).split())[:300]
                name = case_id(packages.get(module, module), case.get("name", ""))
                failed[name] = why
    return failed

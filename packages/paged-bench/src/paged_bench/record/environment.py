"""The environment block of a record: the machine as a reader needs to know it, without its owner."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paged_bench.record.machine import Environment, Gpu
from paged_bench.record.schema import Revision

PACKAGES = (
    *("paged-schema", "paged-oracle", "paged-kv", "paged-cuda", "paged-bench"),
    *("numpy", "ml-dtypes", "pydantic", "pytest-benchmark", "cuda-core", "cuda-bindings", "torch"),
)


def capture(gpu: Gpu | None = None, *, packages: tuple[str, ...] = PACKAGES) -> Environment:
    """Describe this machine now; `finish` adds its load at the end.

    Args:
        gpu: The device that is measured on, as its driver describes it.
        packages: Distributions whose versions are noted where installed.
    """
    return Environment(
        python=platform.python_version(),
        system=" ".join(part for part in (platform.system(), platform.release(), platform.machine()) if part),
        cpu=_processor(),
        cores=_cores(),
        governor=_read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        load=(_load(), _load()),
        packages={name: found for name in packages if (found := _version(name)) is not None},
        gpu=gpu,
    )


def finish(environment: Environment, gpu: Gpu | None = None) -> Environment:
    """Return the block with the load, and the device's state, as they are at the end of the run."""
    before = environment.load[0] if environment.load else 0.0
    return environment.model_copy(update={"load": (before, _load()), "gpu": gpu or environment.gpu})


def revision(root: Path) -> Revision | None:
    """Return the commit of the tree at `root`, or None where that is no git checkout."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return Revision(commit=commit, dirty=None if changes is None else bool(changes))


def _git(root: Path, *words: str) -> str | None:
    command = ["git", "-c", f"safe.directory={root.resolve()}", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    text = _read("/proc/cpuinfo") or ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _load() -> float:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

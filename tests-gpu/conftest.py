"""Runs on a machine with a GPU. A whole, green run writes `parity-record.json`."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from paged_cuda import CubinCache, Device, Stream, require_driver
from paged_cuda._nvrtc import nvrtc_version
from paged_cuda.compiler import architecture_of, compile_kernels
from paged_cuda.device import resolve_device
from paged_cuda.sources import sources_digest
from paged_cuda.variants import variants_for
from parity import GROUPS, LSE_TOLERANCE, TOLERANCES

HERE = Path(__file__).parent
RECORD = HERE / "parity-record.json"
OPEN = HERE / "parity-open.json"  # what is said while no record is of the present kernels
PACKAGES = (
    "paged-cuda",
    "numpy",
    "ml-dtypes",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "pytest",
    "hypothesis",
)


@pytest.fixture(scope="session")
def device() -> Device:
    return resolve_device(0)


@pytest.fixture(scope="session", autouse=True)
def warm_cache(device: Device) -> None:
    """Compile every shipped variant once, with all cores; operators then find them on disk."""
    architecture = architecture_of(*device.properties.capability)
    jobs = [(variant.signature, architecture) for variant in variants_for(architecture)]
    compile_kernels(jobs, CubinCache())


@pytest.fixture(scope="session")
def stream(device: Device) -> Stream:
    return Stream(device)


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """What single tests add to the record."""
    return FACTS


FACTS: dict[str, Any] = {}
_STARTED = time.monotonic()


def pytest_sessionstart(session: pytest.Session) -> None:
    require_driver()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    narrowed = config.option.keyword or config.option.markexpr or session.shouldstop or len(config.args) != 1
    if exitstatus != 0 or narrowed or not GROUPS or Path(config.args[0]).resolve() != HERE:
        return
    RECORD.write_text(json.dumps(_record(session), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    OPEN.unlink(missing_ok=True)


def _record(session: pytest.Session) -> dict[str, Any]:
    device = resolve_device(0)
    architecture = architecture_of(*device.properties.capability)
    kernels = compile_kernels([(variant.signature, architecture) for variant in variants_for(architecture)])
    return {
        "format": 1,
        "sources_sha256": sources_digest(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "pytest", *map(str, session.config.invocation_params.args)]),
        "seconds": round(time.monotonic() - _STARTED, 1),
        "tests": session.testscollected,
        "gpu": device.properties.name,
        "architecture": architecture,
        "driver": "{}.{}".format(*device.driver.version()),
        "nvrtc": "{}.{}".format(*nvrtc_version()),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: _version(name) for name in PACKAGES},
        "tolerances": {
            "output (absolute, relative, cosine distance)": TOLERANCES,
            "lse (absolute, relative)": LSE_TOLERANCE,
            "cache rows": "every bit",
        },
        "groups": {name: group.to_dict() for name, group in sorted(GROUPS.items())},
        "kernels": {kernel.signature.symbol: kernel.resources.to_dict() for kernel in kernels},
        "facts": FACTS,
        "sanitizer": _sanitizer(),
    }


def _sanitizer() -> list[str]:
    """Return the summary lines of compute-sanitizer runs made before this one, if a file of them is named."""
    named = os.environ.get("PAGED_SANITIZER_LOG")
    return Path(named).read_text(encoding="utf-8").splitlines() if named else []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

"""The kernels that ship were compared on a GPU, or the tree says openly that they were not."""

import json
from pathlib import Path
from typing import Any

import pytest
from paged_cuda.sources import sources_digest
from paged_cuda.variants import variants_for

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "tests-gpu" / "parity-record.json"
OPEN = ROOT / "tests-gpu" / "parity-open.json"
SANITIZERS = ROOT / "tests-gpu" / "sanitizer-record.txt"
PAGES = (ROOT / "README.md", ROOT / "packages" / "paged-cuda" / "README.md")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def test_the_record_is_of_these_sources_or_the_pages_say_what_is_missing(record: dict[str, Any]) -> None:
    """A green run writes the record and removes what was open; what is open names these very sources."""
    if record["sources_sha256"] == sources_digest():
        assert not OPEN.exists(), "the record is of these sources: remove parity-open.json"
        return
    assert OPEN.exists(), "run `nox -s gpu_parity` on a GPU and commit its record"
    unproven = json.loads(OPEN.read_text(encoding="utf-8"))
    assert unproven["sources_sha256"] == sources_digest(), "never run: run `nox -s gpu_parity`"
    assert unproven["why"]
    assert unproven["missing"]
    for page in PAGES:
        assert "tests-gpu/parity-open.json" in page.read_text(encoding="utf-8"), page


def test_the_sanitizers_ran_on_the_kernels_of_the_record(record: dict[str, Any]) -> None:
    """The record has their lines if it was told of them, else a file does, which names the kernels."""
    lines = record["sanitizer"]
    if not lines:
        lines = SANITIZERS.read_text(encoding="utf-8").splitlines()
        assert f"# kernels: {record['sources_sha256']}" in lines
    found = {line.partition(": ")[0]: line for line in lines if not line.startswith("#")}
    assert set(found) == {
        "memcheck",
        "initcheck",
        *(f"racecheck of {path}" for path in ("sm80", "sm90", "baseline")),
    }
    clean = [name for name, line in found.items() if "exit 0;" in line and "0 errors" in line]
    assert set(clean) == set(found) - {"racecheck of sm90"}


def test_every_variant_for_that_gpu_is_in_the_record(record: dict[str, Any]) -> None:
    if record["sources_sha256"] != sources_digest():
        assert OPEN.exists()
        return
    symbols = {variant.signature.symbol for variant in variants_for(str(record["architecture"]))}
    assert symbols == set(record["kernels"])


def test_errors_in_the_record_are_inside_the_tolerance(record: dict[str, Any]) -> None:
    groups = record["groups"]
    assert {"golden: ONNX Runtime", "random calls", "replays over changing lengths"} <= set(groups)
    for name, group in groups.items():
        assert group["max_units"] <= 1.0, name
        assert group["runs"] > 0, name
    assert groups["random calls"]["runs"] >= 2000

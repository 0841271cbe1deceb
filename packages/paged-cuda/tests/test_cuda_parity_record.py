"""The kernels that ship are the kernels that were compared on a GPU."""

import json
from pathlib import Path

import pytest
from paged_cuda.sources import sources_digest
from paged_cuda.variants import variants_for

RECORD = Path(__file__).parents[3] / "tests-gpu" / "parity-record.json"


@pytest.fixture(scope="module")
def record() -> dict[str, object]:
    found: dict[str, object] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def test_the_record_is_of_these_sources(record: dict[str, object]) -> None:
    assert record["sources_sha256"] == sources_digest(), (
        "run `nox -s gpu_parity` on a GPU and commit its record"
    )


def test_every_variant_for_that_gpu_is_in_the_record(record: dict[str, object]) -> None:
    kernels = record["kernels"]
    assert isinstance(kernels, dict)
    symbols = {variant.signature.symbol for variant in variants_for(str(record["architecture"]))}
    assert symbols == set(kernels)


def test_errors_in_the_record_are_inside_the_tolerance(record: dict[str, object]) -> None:
    groups = record["groups"]
    assert isinstance(groups, dict)
    assert {"golden: ONNX Runtime", "random calls", "replays over changing lengths"} <= set(groups)
    for name, group in groups.items():
        assert group["max_units"] <= 1.0, name
        assert group["runs"] > 0, name
    assert groups["random calls"]["runs"] >= 2000

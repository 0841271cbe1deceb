"""Against outputs of the real ONNX Runtime operator: cache rows bit for bit, outputs within the tolerance."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paged_cuda import Stream
from paged_schema import PagedAttentionAttributes
from parity import Result, assert_close, call_of, paths_for, reference, run
from problems import Case, Problem

FOLDER = Path(__file__).parent.parent / "tests-golden"
NAMES = sorted(
    path.stem for path in FOLDER.glob("latent*.npz") if "int8" not in path.stem and "fp8" not in path.stem
)
INPUTS = (
    "query",
    "key",
    "key_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "slot_mapping",
    "cos_cache",
    "sin_cache",
)


def load(name: str) -> tuple[Problem, Result]:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        stored = dict(file)
    meta: dict[str, Any] = json.loads(stored.pop("meta_json").tobytes())
    kind = np.dtype(ml_dtypes.bfloat16 if meta["dtype"] == "bf16" else np.float16)
    sixteen = {"query", "key", "key_cache", "cos_cache", "sin_cache"}
    inputs = {
        key: stored[key].view(kind) if key in sixteen else stored[key] for key in INPUTS if key in stored
    }
    attributes = PagedAttentionAttributes(**meta["attributes"])
    cache = inputs["key_cache"].copy()
    rows = cache.view(np.uint16).reshape(-1, cache.shape[-1])
    rows[stored["out.key_cache.changed_slots"]] = stored["out.key_cache.changed_rows"].view(np.uint16)
    problem = Problem(Case((), ()), attributes, inputs)
    output = stored["out.output"].view(kind)
    return problem, Result(output, cache, reference(problem).lse)


def test_there_are_golden_files() -> None:
    assert len(NAMES) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_onnx_runtime(name: str, stream: Stream) -> None:
    problem, want = load(name)
    for kernel in paths_for(call_of(problem), stream.device):
        got = run(problem, stream, kernel)
        assert_close("golden: ONNX Runtime", kernel, got, want)
        assert_close("golden: oracle", kernel, got, reference(problem))

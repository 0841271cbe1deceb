"""The operator on the GPU against the oracle, for every path that takes the call, and what was measured.

Cache rows must agree bit for bit, dead ones included. Outputs must lie within the tolerances that the
record states.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from paged_cuda import ArgumentMismatch, Bounds, Device, DeviceArray, PagedAttention, Stream
from paged_cuda.launch_plan import PathOptions
from paged_cuda.paths import PATHS, choose_path
from paged_cuda.sm90_path import TWO_TERM_KEYS
from paged_cuda.split_shape import ROW_TILES
from paged_oracle import paged_attention
from paged_schema import Call, check
from problems import Problem, specs_of

Array = npt.NDArray[Any]
# Absolute, relative, and the cosine distance of the whole output.
TOLERANCES = {"bfloat16": (8e-4, 2.01 / 128, 5e-6), "float16": (1e-4, 2.01 / 1024, 5e-7)}
LSE_TOLERANCE = (1e-6, 8.01 / 65536)


@dataclass
class Group:
    """Worst errors of one group of cases."""

    runs: int = 0
    kernels: set[str] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)
    max_abs: float = 0.0
    max_units: float = 0.0
    max_cosine: float = 0.0
    max_lse: float = 0.0
    values: int = 0
    differing: int = 0

    def add(self, other: Group) -> None:
        """Take in what another process measured."""
        self.runs += other.runs
        self.kernels |= other.kernels
        self.dtypes |= other.dtypes
        self.max_abs = max(self.max_abs, other.max_abs)
        self.max_units = max(self.max_units, other.max_units)
        self.max_cosine = max(self.max_cosine, other.max_cosine)
        self.max_lse = max(self.max_lse, other.max_lse)
        self.values += other.values
        self.differing += other.differing

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {**self.__dict__, "kernels": sorted(self.kernels), "dtypes": sorted(self.dtypes)}


GROUPS: dict[str, Group] = {}


@dataclass
class Result:
    """What one run left behind, as it lies in memory."""

    output: Array
    cache: Array
    lse: Array


def bits(array: Array) -> Array:
    """Return 16-bit values as integers."""
    return array.view(np.uint16)


def call_of(problem: Problem) -> Call:
    """Return the checked call; extents that a step may change stay symbolic."""
    return check(problem.attributes, specs_of(problem.inputs), ort="1.31")


def bounds_of(problem: Problem) -> Bounds:
    """Return bounds that just hold the problem."""
    tokens, batch = problem.inputs["query"].shape[0], problem.inputs["past_seqlens"].shape[0]
    table = problem.inputs["block_table"]
    context = max(1, table.shape[1] * problem.inputs["key_cache"].shape[1])
    return Bounds(max_batch=max(1, batch), max_tokens=max(1, tokens), max_context=context)


def paths_for(call: Call, device: Device, *, debug: bool = False) -> Iterator[str]:
    """Yield every path that takes the call on this GPU."""
    options = PathOptions(debug=debug)
    named = os.environ.get("PAGED_TEST_PATHS")
    for path in PATHS:
        if named and path.name not in named.split(","):
            continue
        try:
            choose_path(call, Bounds(1, 1, 1), device.properties, kernel=path.name, options=options)
        except ArgumentMismatch:
            continue
        yield path.name


def upload(problem: Problem, stream: Stream) -> dict[str, DeviceArray]:
    """Copy all inputs to the GPU."""
    return {
        name: DeviceArray.from_numpy(array, stream, stream.device) for name, array in problem.inputs.items()
    }


def poisoned(shape: tuple[int, ...], dtype: str, stream: Stream) -> DeviceArray:
    """Return an array of NaN."""
    array = DeviceArray.empty(shape, dtype, stream.device)
    if array.nbytes:
        with stream.device as device:
            device.driver.fill(array.pointer, 0xFF, array.nbytes, stream.handle)
    return array


def poison_workspace(op: PagedAttention, stream: Stream) -> None:
    """Fill the operator's workspace with NaN."""
    workspace = op._workspace
    if workspace is not None and workspace.nbytes:
        with stream.device as device:
            device.driver.fill(workspace.pointer, 0xFF, workspace.nbytes, stream.handle)


# Head sizes whose tall row tiles ship: every case of theirs runs one further tile and a fixed split as well.
TILED = ((576, 512), (192, 128))


def variations(problem: Problem, call: Call, device: Device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a label and the operator's options for every way to run the problem."""
    kernels = tuple(paths_for(call, device))
    yield from ((kernel, {"kernel": kernel}) for kernel in kernels)
    if "sm80" in kernels and (call.head_size, call.v_head_size) in TILED:
        tokens = problem.inputs["query"].shape[0]
        row_tile = ROW_TILES[(tokens + call.num_heads) % len(ROW_TILES)]
        yield f"sm80, row tile {row_tile}", {"kernel": "sm80", "row_tile": row_tile}
        yield "sm80, fixed split", {"kernel": "sm80", "split_rows": 64}
    if "sm90" in kernels:
        tokens = problem.inputs["query"].shape[0]
        extra: tuple[tuple[str, dict[str, Any]], ...] = (
            ("one term", {"weight_terms": 1}),
            ("fixed split", {"split_rows": 64, "weight_terms": 2}),
            ("two terms", {"weight_terms": 2}),
        )
        label, options = extra[(tokens + call.num_heads) % len(extra)]
        yield f"sm90, {label}", {"kernel": "sm90", **options}


def rounds_weights(problem: Problem, kernel: str, *, weight_terms: int | None = None, **_: Any) -> bool:
    """Return whether some softmax weights are rounded to 16 bits, which ONNX Runtime does not do."""
    longest = max((q + past for q, past in zip(problem.case.q, problem.case.past, strict=True)), default=0)
    default = kernel == "sm90" and longest > TWO_TERM_KEYS
    return weight_terms == 1 or (weight_terms is None and default)


def run(
    problem: Problem,
    stream: Stream,
    kernel: str,
    *,
    bounds: Bounds | None = None,
    debug: bool = False,
    **options: Any,
) -> Result:
    """Run once on fresh, poisoned memory."""
    op = PagedAttention(
        call_of(problem),
        bounds or bounds_of(problem),
        device=stream.device,
        kernel=kernel,
        debug=debug,
        **options,
    ).prepare()
    result = run_with(op, problem, stream)
    if debug:
        problem.extra["violations"] = op.violations(stream)
    return result


def run_with(op: PagedAttention, problem: Problem, stream: Stream) -> Result:
    """Run a prepared operator once on fresh, poisoned memory."""
    arrays = upload(problem, stream)
    tokens, heads = problem.inputs["query"].shape[0], op.call.num_heads
    output = poisoned((tokens, heads * (op.call.v_head_size or 0)), op.call.dtype, stream)
    lse = poisoned((tokens, heads), "float32", stream)
    poison_workspace(op, stream)
    op.run(**arrays, output=output, lse=lse, key_cache_out=arrays["key_cache"], stream=stream)
    return Result(output.to_numpy(stream), arrays["key_cache"].to_numpy(stream), lse.to_numpy(stream))


def reference(problem: Problem) -> Result:
    """Return the oracle's result, the caller's cache left alone."""
    inputs = {**problem.inputs, "key_cache": problem.inputs["key_cache"].copy()}
    outputs = paged_attention(problem.attributes, inputs, rounding="ort", ort="1.31")
    return Result(outputs.output, outputs.key_cache, outputs.lse)


def assert_close(group: str, kernel: str, got: Result, want: Result) -> None:
    """Compare and record.

    Raises:
        AssertionError: A cache bit differs, or an output lies outside the tolerance.
    """
    np.testing.assert_array_equal(bits(got.cache), bits(want.cache), err_msg=f"{kernel}: cache rows")
    dtype = got.output.dtype.name
    absolute, relative, cosine_limit = TOLERANCES[dtype]
    actual, expected = got.output.astype(np.float64), want.output.astype(np.float64)
    error = np.abs(actual - expected)
    bound = absolute + relative * np.abs(expected)
    assert np.isfinite(actual).all(), (
        f"{kernel}: {np.count_nonzero(~np.isfinite(actual))} values are not finite"
    )
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else None
    assert (error <= bound).all(), f"{kernel}: {actual[worst]} for {expected[worst]} at {worst}"
    distance = cosine(actual, expected)
    assert distance < cosine_limit, f"{kernel}: cosine distance {distance}"
    lse_error = compare_lse(got.lse, want.lse)

    entry = GROUPS.setdefault(group, Group())
    entry.runs += 1
    entry.kernels.add(kernel)
    entry.dtypes.add(dtype)
    entry.max_abs = max(entry.max_abs, float(error.max(initial=0.0)))
    entry.max_units = max(entry.max_units, float((error / bound).max(initial=0.0)))
    entry.max_cosine = max(entry.max_cosine, distance)
    entry.max_lse = max(entry.max_lse, lse_error)
    entry.values += error.size
    entry.differing += int(np.count_nonzero(bits(got.output) != bits(want.output)))


def assert_close_but_for_weights(group: str, kernel: str, got: Result, want: Result, heads: int) -> None:
    """Compare where softmax weights were rounded.

    Each weight is off by up to 2^-8 of itself (2^-11 in float16), so a row of a head is off by at most that
    share of the weighted mean of its values' norms, for which the longest row of the cache stands. As few
    weights are off by so much, and not all to one side, the bound is about half of that. Both outputs are
    rounded besides, each by up to 2^-8 of itself; of many columns these average.

    Raises:
        AssertionError: A cache bit differs, or a row of a head lies outside.
    """
    np.testing.assert_array_equal(bits(got.cache), bits(want.cache), err_msg=f"{kernel}: cache rows")
    tokens, width = got.output.shape
    rows = (tokens * heads, width // heads)
    actual, expected = (x.output.astype(np.float64).reshape(rows) for x in (got, want))
    assert np.isfinite(actual).all(), f"{kernel}: values are not finite"
    values = want.cache.reshape(-1, want.cache.shape[-1])[:, : rows[1]].astype(np.float64)
    longest = np.linalg.norm(values[np.isfinite(values).all(axis=1)], axis=1).max(initial=0.0)
    scale = 1.0 if got.output.dtype.name == "bfloat16" else 0.125
    error, size = np.linalg.norm(actual - expected, axis=1), np.linalg.norm(expected, axis=1)
    bound = scale * (1.1 * 2.0**-9 * longest + 2.0**-8 * (1 + rows[1] ** -0.5) * size + 1e-6)
    worst = int(np.argmax(error - bound)) if error.size else 0
    assert (error <= bound).all(), f"{kernel}: row {worst} is off by {error[worst]} of {size[worst]}"
    entry = GROUPS.setdefault(f"{group}, rounded weights", Group())
    entry.runs += 1
    entry.kernels.add(kernel)
    entry.dtypes.add(got.output.dtype.name)
    entry.max_units = max(entry.max_units, float((error / bound).max(initial=0.0)))
    entry.max_lse = max(entry.max_lse, compare_lse(got.lse, want.lse))
    entry.values += got.output.size


def cosine(actual: Array, expected: Array) -> float:
    """Return one minus the cosine between two outputs; 0 for two zeros."""
    norm = float(np.linalg.norm(actual) * np.linalg.norm(expected))
    if norm == 0.0:
        return 0.0 if np.array_equal(actual, expected) else 1.0
    return abs(1.0 - float((actual * expected).sum()) / norm)


def compare_lse(got: Array, want: Array) -> float:
    """Return the largest error of finite entries; infinite ones must be equal."""
    empty = np.isneginf(want)
    np.testing.assert_array_equal(np.isneginf(got), empty)
    error = np.abs(got[~empty].astype(np.float64) - want[~empty])
    absolute, relative = LSE_TOLERANCE
    # The dot products themselves are float32 sums: their error grows with the logits, not with the result.
    assert (error <= absolute + relative * (1.0 + np.abs(want[~empty]))).all(), error.max()
    return float(error.max(initial=0.0))


def assert_parity(
    group: str, problem: Problem, stream: Stream, *, kernels: tuple[str, ...] | None = None
) -> None:
    """Run every path that takes the problem and compare each with the oracle."""
    want = reference(problem)
    if kernels:
        chosen = [(kernel, {"kernel": kernel}) for kernel in kernels]
    else:
        chosen = list(variations(problem, call_of(problem), stream.device))
    for label, options in chosen:
        got = run(problem, stream, **options)
        if rounds_weights(problem, **options):
            assert_close_but_for_weights(group, label, got, want, problem.case.heads)
        else:
            assert_close(group, label, got, want)

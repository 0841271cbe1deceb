"""The check before the clock: rows of a step's output, and the cache rows it wrote, against the oracle.

Invariant: what the oracle is given is read back from the GPU, so no shared code can make both wrong alike.
Every output value is looked at for being finite; values are compared for a sample of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from paged_cuda import DeviceArray
from paged_oracle import paged_attention

from paged_bench.measure.bench import Bench
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.step import attributes_of
from paged_bench.measure.suite import CaseSpec
from paged_bench.record import Correctness

TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
_MOST_HEADS = 16
_KEYS_TIMES_HEADS = 1 << 20  # of one row: what a check may cost
Array = NDArray[np.generic]


class WrongOutput(Exception):  # noqa: N818 - an outcome, named for what happened
    """An output that must not be timed; the message says where and how far off."""


@dataclass(frozen=True)
class Row:
    """A row that is looked at.

    Attributes:
        sequence: Its sequence.
        token: Its token, over the whole step.
        keys: What it sees, the row of its own token included.
    """

    sequence: int
    token: int
    keys: int


def sampled_rows(spec: CaseSpec) -> list[Row]:
    """Return first, middle and last token of the first, middle, last, shortest and longest sequences."""
    lengths = spec.context_lens
    chosen = {0, spec.batch // 2, spec.batch - 1, int(np.argmin(lengths)), int(np.argmax(lengths))}
    chosen.add(int(np.argmax(spec.query_lens)))
    starts = [0, *np.cumsum(spec.query_lens).tolist()]
    rows = []
    for sequence in sorted(chosen):
        query = spec.query_lens[sequence]
        for index in sorted({0, query // 2, query - 1}):
            rows.append(Row(sequence, starts[sequence] + index, lengths[sequence] - query + index + 1))
    return rows


def sampled_heads(spec: CaseSpec, keys: int, most: int = _MOST_HEADS) -> list[int]:
    """Return heads from first to last, evenly, fewer where a row is long."""
    count = max(2, min(most, spec.heads, _KEYS_TIMES_HEADS // keys))
    return sorted({round(index) for index in np.linspace(0, spec.heads - 1, count)})


class Checker:
    """Compares what a step left on the GPU with the oracle.

    Args:
        bench: The instruments.
        spec: The case.
        most_heads: Heads of a row that are compared.
    """

    def __init__(self, bench: Bench, spec: CaseSpec, *, most_heads: int = _MOST_HEADS) -> None:
        self._bench = bench
        self._spec = spec
        self._most_heads = most_heads
        self._dtype = np.dtype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else np.float16)
        self._tables: dict[str, Array] = {}

    def rows(
        self,
        inputs: InputSet,
        output: DeviceArray | None = None,
        *,
        rotary: bool = True,
        rows: Sequence[Row] | None = None,
        factor: float = 1.0,
    ) -> Correctness:
        """Compare rows of an output; the queries are rotated by the oracle, or were before with `rotary` off.

        Args:
            inputs: The set that was run.
            output: The output; by default the set's own.
            rotary: Whether the operator rotated the queries.
            rows: Which rows; by default `sampled_rows`.
            factor: How much wider the tolerance is than ours.

        Raises:
            WrongOutput: A value is not finite, or a row is further off than the tolerance.
        """
        target = inputs.output if output is None else output
        _, wild = self._bench.digest(target)
        if wild:
            raise WrongOutput(f"{wild} of {target.nbytes // 2} output values are not finite")
        tolerance = factor * TOLERANCE[self._spec.dtype]
        worst = 0.0
        for row in sampled_rows(self._spec) if rows is None else rows:
            worst = max(worst, self._row(inputs, target, row, rotary, tolerance))
        return Correctness(
            reference=f"paged_oracle on {'sampled rows and heads' if rows is None else 'the rows given'}",
            relative_error=worst,
            tolerance=tolerance,
        )

    def appended(self, inputs: InputSet) -> None:
        """Compare the cache rows that the sampled tokens were written to, bit for bit.

        Raises:
            WrongOutput: A row differs.
        """
        spec, cache = self._spec, inputs.arrays["key_cache"]
        for row in sampled_rows(spec):
            key = self._read(inputs.arrays["key"], row.token, spec.head_size)
            wanted = self._oracle_row(inputs, key, row)
            got = self._read(cache, int(inputs.plan.slot_mapping[row.token]), spec.head_size)
            if not np.array_equal(got.view(np.uint16), wanted.view(np.uint16)):
                raise WrongOutput(f"the cache row of token {row.token} is not the one that the oracle writes")

    def _row(self, inputs: InputSet, output: DeviceArray, row: Row, rotary: bool, tolerance: float) -> float:
        spec, heads = self._spec, sampled_heads(self._spec, row.keys, self._most_heads)
        query = self._read(inputs.arrays["query"], row.token, spec.heads * spec.head_size)
        got = self._read(output, row.token, spec.heads * spec.v_head_size)
        wanted = paged_attention(
            attributes_of(spec, heads=len(heads), rotary=rotary),
            self._one_row(
                inputs,
                query.reshape(spec.heads, -1)[heads].reshape(1, -1),
                self._pages(inputs, row),
                row,
                rotary,
            ),
        ).output
        actual = got.reshape(spec.heads, -1)[heads].astype(np.float64)
        expected = wanted.reshape(len(heads), -1).astype(np.float64)
        # Each head by itself: one wrong head must not hide among the right ones.
        sizes = np.linalg.norm(expected, axis=1)
        errors = np.linalg.norm(actual - expected, axis=1) / np.where(sizes, sizes, 1.0)
        worst = int(np.argmax(errors))
        if not errors[worst] <= tolerance:
            where = f"sequence {row.sequence}, token {row.token}, head {heads[worst]}"
            raise WrongOutput(f"wrong output: relative error {errors[worst]:.2g} of {tolerance} at {where}")
        return float(errors[worst])

    def _pages(self, inputs: InputSet, row: Row) -> Array:
        """Read the pages of a row's sequence, (pages, block_size, 1, head_size)."""
        spec, cache = self._spec, inputs.arrays["key_cache"]
        count = -(-row.keys // spec.block_size)
        pages = np.empty((count, spec.block_size, 1, spec.head_size), self._dtype)
        with self._bench.device as device:
            for index, page in enumerate(inputs.plan.block_table[row.sequence, :count]):
                source = cache.pointer + int(page) * spec.page_bytes
                target = pages.ctypes.data + index * spec.page_bytes
                device.driver.copy_to_host(target, source, spec.page_bytes, self._bench.stream.handle)
            device.driver.synchronize(self._bench.stream.handle)
        return pages

    def _one_row(
        self, inputs: InputSet, query: Array, pages: Array, row: Row, rotary: bool
    ) -> dict[str, Array | None]:
        """Return a call of one token over a cache that already holds the token's own row."""
        width = np.zeros((1, self._spec.head_size), self._dtype)
        arrays: dict[str, Array | None] = {
            "query": query,
            "key": width,
            "key_cache": pages,
            "cumulative_sequence_length": np.array([0, 1], np.int32),
            "past_seqlens": np.array([row.keys - 1], np.int32),
            "block_table": np.arange(len(pages), dtype=np.int32)[None],
            "slot_mapping": np.array([-1], np.int32),  # the row is there, as the GPU wrote it
        }
        if rotary and self._spec.rotary_dim:
            if not self._tables:
                names = ("cos_cache", "sin_cache")
                self._tables = {name: inputs.arrays[name].to_numpy(self._bench.stream) for name in names}
            arrays |= self._tables
        return arrays

    def _oracle_row(self, inputs: InputSet, key: Array, row: Row) -> Array:
        """Return the cache row that the oracle writes for a key at a row's position."""
        spec, position = self._spec, row.keys - 1
        # A window of one key and a table without other pages: the attention beside it costs nothing.
        page = np.zeros((1, spec.block_size, 1, spec.head_size), self._dtype)
        table = np.full((1, position // spec.block_size + 1), -1, np.int32)
        table[0, -1] = 0
        arrays = self._one_row(inputs, np.zeros((1, spec.head_size), self._dtype), page, row, rotary=True)
        arrays |= {"key": key.reshape(1, -1), "block_table": table}
        arrays["slot_mapping"] = np.array([position % spec.block_size], np.int32)
        attributes = attributes_of(spec, heads=1).model_copy(update={"local_window_size": 1})
        paged_attention(attributes, arrays)
        written: Array = page.reshape(-1, spec.head_size)[position % spec.block_size]
        return written

    def _read(self, array: DeviceArray, row: int, width: int) -> Array:
        host = np.empty(width, self._dtype)
        with self._bench.device as device:
            device.driver.copy_to_host(
                host.ctypes.data, array.pointer + 2 * row * width, 2 * width, self._bench.stream.handle
            )
            device.driver.synchronize(self._bench.stream.handle)
        return host

"""What changes from run to run with arrays of one geometry: where they lie.

A wrong address is a fault on the device that takes the context along, so it is refused before the launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from paged_cuda.arrays import DeviceArray
from paged_cuda.errors import ArgumentMismatch

if TYPE_CHECKING:
    from paged_cuda.operands import Operands


class Reach(NamedTuple):
    """Bytes from the first to behind the last element; the same for every run of one geometry."""

    query: int
    key: int
    key_cache: int
    output: int
    lse: int = 0


def reach_of(operands: Operands) -> Reach:
    """Return what each array spans; the same for every run of one geometry."""
    lse = 0 if operands.lse is None else 2 * _span(operands.lse)
    return Reach(
        _span(operands.query), _span(operands.key), _span(operands.key_cache), _span(operands.output), lse
    )


def check_addresses(operands: Operands, reach: Reach) -> None:
    """Check what changes from run to run with the same geometry.

    Raises:
        ArgumentMismatch: A cache output is not the cache, an address is not aligned, or the output or the
            log-sum-exp lies over query, key, cache or the other.
    """
    cache, out = operands.key_cache, operands.key_cache_out
    query, key, output = operands.query.pointer, operands.key.pointer, operands.output.pointer
    if out is not None and (out.pointer != cache.pointer or out.geometry[:2] != cache.geometry[:2]):
        got, wanted = f"another buffer at {out.pointer:#x}", "the very buffer of key_cache, updated in place"
        raise ArgumentMismatch("alias", "key_cache_out", got, wanted)
    words = (
        operands.cumulative_sequence_length.pointer
        | operands.past_seqlens.pointer
        | operands.block_table.pointer
        | (operands.slot_mapping.pointer if operands.slot_mapping else 0)
        | (operands.lse.pointer if operands.lse else 0)
    )
    halves = output
    if operands.cos_cache and operands.sin_cache:
        halves |= operands.cos_cache.pointer | operands.sin_cache.pointer
    if (query | key | cache.pointer) & 15 or words & 3 or halves & 1:
        _refuse_alignment(operands)
    inputs = (
        ("query", query, reach.query),
        ("key", key, reach.key),
        ("key_cache", cache.pointer, reach.key_cache),
    )
    _refuse_overlap("output", output, reach.output, inputs)
    if operands.lse is not None:
        _refuse_overlap("lse", operands.lse.pointer, reach.lse, (*inputs, ("output", output, reach.output)))


def _refuse_overlap(subject: str, start: int, length: int, others: Iterable[tuple[str, int, int]]) -> None:
    end = start + length
    for name, first, nbytes in others:
        if start < first + nbytes and first < end:
            wanted = "memory that no other array of the call uses"
            raise ArgumentMismatch("overlap", subject, f"memory of {name}", wanted)


_ALIGNMENTS = {
    "query": 16,
    "key": 16,
    "key_cache": 16,
    "cumulative_sequence_length": 4,
    "past_seqlens": 4,
    "block_table": 4,
    "slot_mapping": 4,
    "cos_cache": 2,
    "sin_cache": 2,
    "output": 2,
    "lse": 4,
}


def _refuse_alignment(operands: Operands) -> None:
    for name, step in _ALIGNMENTS.items():
        array: DeviceArray | None = getattr(operands, name)
        if array is not None and array.pointer % step:
            raise ArgumentMismatch(
                "alignment", name, f"{array.pointer:#x}", f"an address that is a multiple of {step}"
            )


def _span(array: DeviceArray) -> int:
    """Return the bytes from the first element to behind the last."""
    if 0 in array.shape:
        return 0
    steps = zip(array.shape, array.strides, strict=True)
    return 2 * (1 + sum((extent - 1) * stride for extent, stride in steps))

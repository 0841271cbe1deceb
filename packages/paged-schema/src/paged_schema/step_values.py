"""The arrays of one step as the strict layer reads them: of the right rank and length, integers widened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from paged_schema.call import Call
from paged_schema.errors import InvalidArgument
from paged_schema.facts import known

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    AnyArray = NDArray[np.generic]

RANKS: Final = {
    "cumulative_sequence_length": 1,
    "past_seqlens": 1,
    "block_table": 2,
    "slot_mapping": 1,
    "attention_metadata": 1,
}


@dataclass(frozen=True, slots=True)
class Values:
    """The arrays of one step, as far as the caller has them; integers widened to 64 bits.

    Attributes:
        call: The checked call.
        cumulative: (batch + 1,).
        past: (batch,).
        table: (batch, max_blocks), in the caller's type.
        slots: (tokens,).
        metadata: (2,) or (3,).
        num_blocks: Blocks of the cache, if known.
        tokens: New tokens, if known.
    """

    call: Call
    cumulative: Ints | None
    past: Ints | None
    table: AnyArray | None
    slots: Ints | None
    metadata: Ints | None
    num_blocks: int | None
    tokens: int | None

    @property
    def lengths(self) -> Ints | None:
        """New tokens of each sequence."""
        return None if self.cumulative is None else self.cumulative[1:] - self.cumulative[:-1]

    @property
    def totals(self) -> Ints | None:
        """Past and new tokens of each sequence; 0 where there is nothing new, as nothing is read then."""
        lengths = self.lengths
        if lengths is None or self.past is None:
            return None
        return (self.past + lengths) * (lengths > 0)


def values_of(call: Call, arrays: Mapping[str, AnyArray | None]) -> Values:
    """Gather the arrays of one step, or raise S00."""
    cache, query, slots = (arrays.get(name) for name in ("key_cache", "query", "slot_mapping"))
    blocks = known(call.num_blocks) if cache is None else int(cache.shape[0])
    tokens = known(call.tokens)
    for counted in (query, slots):
        tokens = int(counted.shape[0]) if tokens is None and counted is not None and counted.ndim else tokens
    values = Values(
        call,
        cumulative=_integers("cumulative_sequence_length", arrays),
        past=_integers("past_seqlens", arrays),
        table=_checked("block_table", arrays),
        slots=_integers("slot_mapping", arrays),
        metadata=_integers("attention_metadata", arrays),
        num_blocks=blocks,
        tokens=tokens,
    )
    _check_lengths(values)
    return values


def _checked(name: str, arrays: Mapping[str, AnyArray | None]) -> AnyArray | None:
    array = arrays.get(name)
    if array is None:
        return None
    if array.ndim != RANKS[name] or array.dtype.kind not in "iu":
        got = f"{array.dtype} of rank {array.ndim}"
        raise InvalidArgument("run", "S00", name, got, f"integers of rank {RANKS[name]}")
    return array


def _integers(name: str, arrays: Mapping[str, AnyArray | None]) -> Ints | None:
    array = _checked(name, arrays)
    return None if array is None else array.astype("int64")


def _check_lengths(v: Values) -> None:
    batch = None if v.cumulative is None else len(v.cumulative) - 1
    if batch is not None and batch < 1:
        raise InvalidArgument(
            "run", "S00", "cumulative_sequence_length", batch + 1, "batch + 1 entries, at least 2"
        )
    for name, array in (("past_seqlens", v.past), ("block_table", v.table)):
        if batch is not None and array is not None and len(array) != batch:
            raise InvalidArgument("run", "S00", name, f"{len(array)} sequences", f"{batch}, the batch")
    if v.slots is not None and v.tokens is not None and len(v.slots) != v.tokens:
        raise InvalidArgument(
            "run", "S00", "slot_mapping", f"{len(v.slots)} slots", f"{v.tokens}, one a token"
        )
    if v.metadata is not None and len(v.metadata) not in (2, 3):
        raise InvalidArgument("run", "S00", "attention_metadata", len(v.metadata), "2 or 3 entries")

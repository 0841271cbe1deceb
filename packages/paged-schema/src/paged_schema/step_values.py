"""The arrays of one step as the strict layer reads them: of the right rank and length, integers widened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from paged_schema.call import Call
from paged_schema.errors import InvalidArgument
from paged_schema.facts import known
from paged_schema.inputs import INPUT_NAMES, OUTPUT_NAMES

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
        rotary_rows: Positions that both rotary tables hold, if known.
    """

    call: Call
    cumulative: Ints | None
    past: Ints | None
    table: AnyArray | None
    slots: Ints | None
    metadata: Ints | None
    num_blocks: int | None
    tokens: int | None
    rotary_rows: int | None

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
    _check_arrays(arrays)
    blocks = _rows("key_cache", arrays)
    counted = (known(call.tokens), _rows("query", arrays), _rows("slot_mapping", arrays))
    tables = (_rows("cos_cache", arrays), _rows("sin_cache", arrays), known(call.rotary_rows))
    values = Values(
        call,
        cumulative=_integers("cumulative_sequence_length", arrays),
        past=_integers("past_seqlens", arrays),
        table=_checked("block_table", arrays),
        slots=_integers("slot_mapping", arrays),
        metadata=_integers("attention_metadata", arrays),
        num_blocks=known(call.num_blocks) if blocks is None else blocks,
        tokens=next((count for count in counted if count is not None), None),
        rotary_rows=min((rows for rows in tables if rows is not None), default=None),
    )
    _check_lengths(values)
    return values


def _check_arrays(arrays: Mapping[str, AnyArray | None]) -> None:
    import numpy as np

    if not isinstance(arrays, Mapping):
        raise InvalidArgument("run", "S00", "strict", arrays, "a mapping of schema names to NumPy arrays")
    for name, array in arrays.items():
        if name not in INPUT_NAMES + OUTPUT_NAMES:
            raise InvalidArgument("run", "S00", str(name), "an unknown name", "a name of the schema")
        if array is not None and not isinstance(array, np.ndarray):
            raise InvalidArgument("run", "S00", name, type(array).__name__, "a NumPy array")


def _rows(name: str, arrays: Mapping[str, AnyArray | None]) -> int | None:
    array = arrays.get(name)
    if array is None:
        return None
    if array.ndim == 0:
        raise InvalidArgument("run", "S00", name, "rank 0", "an array with rows")
    return int(array.shape[0])


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
    if array is None:
        return None
    if array.dtype.itemsize > 4 and array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise InvalidArgument(
            "run", "S00", name, "a number of more than 32 bits", "int32, as the schema says"
        )
    return array.astype("int64")


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

"""Stricter than ORT: the values that ORT reads without checking, checked.

Nothing here is part of what ORT decides; `check` never applies it unless it is asked to. The checks run over
the caller's arrays, whole arrays at a time, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from paged_schema.call import Call
from paged_schema.errors import InvalidArgument
from paged_schema.facts import known
from paged_schema.step_values import Values, values_of

if TYPE_CHECKING:
    from paged_schema.step_values import AnyArray, Ints

STATEMENTS: Final = {
    "S00": "an array has the rank, the kind and the length that the call says",
    "S01": "cumulative_sequence_length starts at 0",
    "S02": "cumulative_sequence_length never decreases",
    "S03": "cumulative_sequence_length ends at the token count",
    "S04": "past_seqlens is never negative",
    "S05": "past and new tokens fit the block table",
    "S06": "every block that a sequence reads is one of the cache's",
    "S07": "the rotary tables hold every position",
    "S08": "scales are finite and above 0",
    "S09": "no two tokens are written to one slot",
    "S10": "no slot lies past the cache",
    "S11": "attention_metadata covers the call",
}
"""What each strict rule asks, by id."""

Fault = tuple[str, str, object, str]


def check_values(call: Call, arrays: Mapping[str, AnyArray | None]) -> None:
    """Check the values of one step.

    Args:
        call: A checked call.
        arrays: NumPy arrays by schema name; what is not given is not checked.

    Raises:
        InvalidArgument: The first of S00 to S11 that does not hold, with stage `run`.

    >>> import numpy as np
    >>> from paged_schema import PagedAttentionAttributes, PagedAttentionInputs, check
    >>> call = check(
    ...     PagedAttentionAttributes(num_heads=1, kv_num_heads=1, kv_cache_layout="LATENT"),
    ...     PagedAttentionInputs(
    ...         query="bf16[t, 64]", key="bf16[t, 64]", key_cache="bf16[8, 16, 1, 64]",
    ...         cumulative_sequence_length="i32[3]", past_seqlens="i32[2]", block_table="i32[2, 4]"))
    >>> try:
    ...     check_values(call, {"cumulative_sequence_length": np.array([0, 2, 1])})
    ... except InvalidArgument as error:
    ...     print(error.rule, error.got)
    S02 1 after 2
    """
    values = values_of(call, arrays)
    for test in TESTS:
        fault = test(values)
        if fault is not None:
            raise InvalidArgument("run", *fault)
    for name in ("k_scale", "v_scale"):
        scale = arrays.get(name)
        if scale is not None:
            _check_scale(name, scale)


def _starts(v: Values) -> Fault | None:
    if v.cumulative is None or v.cumulative[0] == 0:
        return None
    return "S01", "cumulative_sequence_length", int(v.cumulative[0]), "a first entry of 0"


def _never_decreases(v: Values) -> Fault | None:
    lengths = v.lengths
    if v.cumulative is None or lengths is None or (lengths >= 0).all():
        return None
    at = int((lengths < 0).argmax())
    got = f"{v.cumulative[at + 1]} after {v.cumulative[at]}"
    return "S02", "cumulative_sequence_length", got, "entries that never decrease"


def _ends(v: Values) -> Fault | None:
    if v.cumulative is None or v.tokens is None or v.cumulative[-1] == v.tokens:
        return None
    return (
        "S03",
        "cumulative_sequence_length",
        int(v.cumulative[-1]),
        f"a last entry of {v.tokens}, the tokens",
    )


def _past(v: Values) -> Fault | None:
    if v.past is None or (v.past >= 0).all():
        return None
    at = int((v.past < 0).argmax())
    return "S04", "past_seqlens", f"{v.past[at]} for sequence {at}", "0 or above"


def _fits(v: Values) -> Fault | None:
    size, totals = known(v.call.block_size), v.totals
    columns = known(v.call.max_blocks) if v.table is None else int(v.table.shape[1])
    if size is None or totals is None or columns is None or (totals <= columns * size).all():
        return None
    at = int((totals > columns * size).argmax())
    got = f"{totals[at]} tokens for sequence {at}"
    return "S05", "block_table", got, f"at most {columns} columns * {size} tokens = {columns * size}"


def _blocks(v: Values) -> Fault | None:
    import numpy as np

    size, totals, table = known(v.call.block_size), v.totals, v.table
    if size is None or totals is None or table is None or v.past is None or v.num_blocks is None:
        return None
    needed = np.minimum(-(-totals // size), table.shape[1]).astype(np.int32)
    table = table[:, : needed.max()]
    # Read as unsigned, a negative entry is a large one: one comparison finds both.
    bad = table.view(table.dtype.str.replace("i", "u")) >= v.num_blocks
    if not bad.any():
        return None
    column = np.arange(table.shape[1], dtype=np.int32)
    bad &= column < needed[:, None]
    window = v.call.local_window_size
    if window > 0:
        bad &= column >= (np.maximum(v.past - window + 1, 0) // size)[:, None]
    if not bad.any():
        return None
    row, at = divmod(int(bad.argmax()), table.shape[1])
    got = f"block {table[row, at]} at sequence {row}, column {at}"
    return "S06", "block_table", got, f"0 to {v.num_blocks - 1} wherever the sequence reads"


def _rotary(v: Values) -> Fault | None:
    rows, totals = v.rotary_rows, v.totals
    if not v.call.rotary or rows is None or totals is None or (totals <= rows).all():
        return None
    at = int((totals > rows).argmax())
    return "S07", "cos_cache", f"{rows} rows", f"at least {totals[at]}, the tokens of sequence {at}"


def _written(v: Values) -> Ints | None:
    import numpy as np

    if v.slots is not None:
        return v.slots
    size, lengths = known(v.call.block_size), v.lengths
    if v.table is None or v.past is None or lengths is None or size is None or v.cumulative is None:
        return None
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sequence)) - v.cumulative[:-1][sequence] + v.past[sequence]
    block = v.table[sequence, position // size].astype("int64")
    return np.where(block < 0, -1, block * size + position % size)


def _collisions(v: Values) -> Fault | None:
    import numpy as np

    slots = _written(v)
    if slots is None:
        return None
    slots = np.sort(slots[slots >= 0])
    same = slots[1:] == slots[:-1]
    if not same.any():
        return None
    name = "slot_mapping" if v.slots is not None else "block_table"
    return "S09", name, f"slot {slots[int(same.argmax())]} twice", "one token a slot"


def _range(v: Values) -> Fault | None:
    size = known(v.call.block_size)
    if v.slots is None or size is None or v.num_blocks is None or (v.slots < v.num_blocks * size).all():
        return None
    at = int((v.slots >= v.num_blocks * size).argmax())
    return (
        "S10",
        "slot_mapping",
        f"slot {v.slots[at]} for token {at}",
        f"below {v.num_blocks * size}, or negative",
    )


def _metadata(v: Values) -> Fault | None:
    lengths, totals = v.lengths, v.totals
    if v.metadata is None or lengths is None or totals is None:
        return None
    longest, largest = int(lengths.max()), int(totals.max())
    entries = [int(entry) for entry in v.metadata]
    if entries[0] and entries[0] < longest:
        return (
            "S11",
            "attention_metadata",
            entries,
            f"a first entry of 0 or at least {longest}, the longest query",
        )
    if entries[1] and entries[1] < largest:
        return (
            "S11",
            "attention_metadata",
            entries,
            f"a second entry of 0 or at least {largest}, the longest context",
        )
    if len(entries) == 3 and entries[2] > largest:
        return (
            "S11",
            "attention_metadata",
            entries,
            f"a third entry of at most {largest}, the longest context",
        )
    return None


TESTS: Final[tuple[Callable[[Values], Fault | None], ...]] = (
    _starts,
    _never_decreases,
    _ends,
    _past,
    _fits,
    _blocks,
    _rotary,
    _range,
    _collisions,
    _metadata,
)


def _check_scale(name: str, scale: AnyArray) -> None:
    import numpy as np

    if scale.dtype.kind not in "fiu":
        raise InvalidArgument("run", "S00", name, f"{scale.dtype}", "numbers")
    values = np.asarray(scale, dtype="float64")
    good = np.isfinite(values) & (values > 0)
    if not good.all():
        got = float(values[~good].flat[0])
        raise InvalidArgument("run", "S08", name, got, "finite scales above 0")

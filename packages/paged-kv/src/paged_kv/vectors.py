"""Turning what callers pass into int64 vectors, or a typed refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import InvalidLength, KvError, UnknownSequence
from .geometry import INT32_MAX

Int64Array = npt.NDArray[np.int64]
IntVector = Int64Array | npt.NDArray[np.integer] | Sequence[int]


def _integers(values: object, what: str, wrong: type[KvError]) -> npt.NDArray[np.integer]:
    """`values` as an array of at most one dimension and any integer type, or the refusal `wrong`."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise wrong(f"{what} must be a flat sequence of integers: {error}") from error
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise wrong(f"{what} must be a flat sequence of integers", dtype=str(array.dtype), ndim=array.ndim)
    return array


def as_handles(rows: IntVector | int) -> Int64Array:
    """Handles as a flat int64 array.

    Raises:
        UnknownSequence: not a flat sequence of integers.
    """
    if type(rows) is np.ndarray and rows.dtype == np.int64 and rows.ndim == 1:
        return np.asarray(rows, dtype=np.int64)
    return np.atleast_1d(_integers(rows, "handles", UnknownSequence)).astype(np.int64)


def as_count(value: int | np.integer, name: str) -> int:
    """One count in ``[0, 2**31)``.

    Raises:
        InvalidLength: not an integer, negative, or not an int32.
    """
    return value if type(value) is int and 0 <= value <= INT32_MAX else int(as_lengths(value, 1, name)[0])


class QueryLengths(NamedTuple):
    """Query lengths with their sum and maximum, which are free when every one is 1."""

    values: Int64Array
    total: int
    longest: int


def as_query_lengths(values: IntVector | int, count: int) -> QueryLengths:
    """Query lengths as an own copy; see `as_lengths`."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1 and len(values) == count:
        own = np.array(values, dtype=np.int64)
        if count and np.count_nonzero(own == 1) == count:
            return QueryLengths(own, count, 1)
    own = as_lengths(values, count, "query_lens").copy()
    return QueryLengths(own, int(own.sum()), int(own.max()) if count else 0)


def as_lengths(values: IntVector | int | np.integer, count: int, name: str) -> Int64Array:
    """`count` token counts in ``[0, 2**31)``; a single integer stands for all of them.

    Raises:
        InvalidLength: another number of values, not integers, negative, or not an int32.
    """
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1:
        array = np.asarray(values, dtype=np.int64)
    else:
        given = _integers(values, name, InvalidLength)
        if given.dtype == np.uint64 and given.size and int(given.max()) > INT32_MAX:
            raise InvalidLength(f"{name} has {int(given.max())}; at most {INT32_MAX}", given=int(given.max()))
        array = (
            np.broadcast_to(given, (count,)).astype(np.int64) if given.ndim == 0 else given.astype(np.int64)
        )
    if len(array) != count:
        raise InvalidLength(
            f"{name} has {len(array)} values for {count} rows", given=len(array), expected=count
        )
    # As unsigned numbers, negative ones are the largest: one maximum shows both kinds of bad length.
    if count and int(array.view(np.uint64).max()) > INT32_MAX:
        bad = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise InvalidLength(
            f"{name} has {bad}; lengths lie in [0, {INT32_MAX}]", given=bad, maximum=INT32_MAX
        )
    return array


def as_any_lengths(values: IntVector | int, name: str) -> Int64Array:
    """As `as_lengths`, for as many values as there are; a single integer is one."""
    given = _integers(values, name, InvalidLength)
    return as_lengths(given, given.size, name)

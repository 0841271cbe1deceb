"""How two results differ, in numbers and in a place.

Invariant: a comparison looks at values only. NaN equals NaN, and +0 equals -0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged_oracle.dtypes import BFLOAT16, Array, Float64, Int64, upcast
from paged_oracle.sequences import token_bounds


@dataclass(frozen=True)
class Coordinate:
    """Where in an attention output.

    Attributes:
        sequence: index in the batch, as `sequences` reads it; 0 when the batch was not given, -1 for a row of
            no sequence.
        token: index among the sequence's new tokens; the row when the batch was not given.
        head: query head.
        channel: channel of the head.
    """

    sequence: int
    token: int
    head: int
    channel: int


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured.

    Attributes:
        size: values compared.
        differing: values that are not equal.
        max_units: largest distance in representable values of the 16-bit type both share; None for other
            types.
        max_abs: largest absolute error; inf where one is NaN or infinite and the other differs.
        max_rel: largest absolute error relative to the expected value; inf where that is 0.
        rel_norm: norm of the error over norm of the expected result (of its finite values).
        cosine: 1 - cosine of the angle between the two where both are finite, 0 for equal directions.
        outside: values beyond the tolerance; without one, the same as `differing`.
        first: the first of those, in row order.
    """

    size: int
    differing: int
    max_units: int | None
    max_abs: float
    max_rel: float
    rel_norm: float
    cosine: float
    outside: int
    first: Coordinate | None

    def __str__(self) -> str:
        units = "" if self.max_units is None else f", {self.max_units} units"
        place = "" if self.first is None else f"; {self.outside} outside, first at {self.first}"
        return (
            f"{self.differing} of {self.size} differ; max error {self.max_abs:.3g} absolute, "
            f"{self.max_rel:.3g} relative{units}; norm {self.rel_norm:.3g}, "
            f"1 - cosine {self.cosine:.3g}{place}"
        )


def compare(
    actual: Array,
    expected: Array,
    *,
    num_heads: int = 1,
    cumulative: Array | None = None,
    tolerance: Float64 | float | None = None,
) -> Comparison:
    """Compare two attention outputs.

    Args:
        actual: (tokens, num_heads * channels).
        expected: the same shape.
        num_heads: query heads, to name a head and a channel.
        cumulative: (batch + 1,) cumulative_sequence_length, to name a sequence and a token in it.
        tolerance: absolute tolerance, one number or one for each value; see `tolerance`.

    Raises:
        ValueError: the shapes differ, are not (tokens, channels), or do not divide by `num_heads`.

    Example:
        >>> import numpy as np
        >>> result = compare(np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[1.0, 2.0, 3.5, 4.0]]), num_heads=2)
        >>> result.differing, result.max_abs, result.first
        (1, 0.5, Coordinate(sequence=0, token=0, head=1, channel=0))
    """
    if num_heads < 1 or actual.shape != expected.shape or actual.ndim != 2 or actual.shape[1] % num_heads:
        raise ValueError(
            f"cannot compare {actual.shape} with {expected.shape}: both must be (tokens, {num_heads} * n)"
        )
    got, want = upcast(actual), upcast(expected)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        error = np.where(same, 0.0, np.abs(got - want))
        error[np.isnan(error)] = np.inf
        relative = np.where(same, 0.0, error / np.abs(want))
        relative[np.isnan(relative)] = np.inf
        rel_norm = _ratio(float(np.linalg.norm(error)), float(np.linalg.norm(want[np.isfinite(want)])))
        cosine = _cosine(got, want)
    beyond = ~same if tolerance is None else ~same & ~(error <= tolerance)
    return Comparison(
        size=got.size,
        differing=int((~same).sum()),
        max_units=_max_units(actual, expected, same),
        max_abs=float(error.max(initial=0.0)),
        max_rel=float(relative.max(initial=0.0)),
        rel_norm=rel_norm,
        cosine=cosine,
        outside=int(beyond.sum()),
        first=_first(beyond, num_heads, cumulative),
    )


def _ratio(error: float, size: float) -> float:
    return error / size if size else (0.0 if error == 0 else np.inf)


def _cosine(got: Float64, want: Float64) -> float:
    finite = np.isfinite(got) & np.isfinite(want)
    got, want = got[finite], want[finite]
    sizes = float(np.linalg.norm(got) * np.linalg.norm(want))
    if sizes == 0:
        return 0.0 if np.array_equal(got, want) else 1.0
    return 1.0 - float((got * want).sum()) / sizes


def _max_units(actual: Array, expected: Array, same: Array) -> int | None:
    if actual.dtype != expected.dtype or actual.dtype not in (np.float16, BFLOAT16):
        return None
    distance = np.abs(_order(actual) - _order(expected))
    return int(np.where(same, 0, distance).max(initial=0))


def _order(values: Array) -> Int64:
    """Number the representable values in ascending order."""
    bits = np.ascontiguousarray(values).view(np.uint16).astype(np.int64)
    return np.where(bits >= 0x8000, 0x8000 - bits, bits)


def _first(beyond: Array, num_heads: int, cumulative: Array | None) -> Coordinate | None:
    places = np.flatnonzero(beyond)
    if len(places) == 0:
        return None
    row, column = divmod(int(places[0]), beyond.shape[1])
    head, channel = divmod(column, beyond.shape[1] // num_heads)
    if cumulative is None:
        return Coordinate(0, row, head, channel)
    bounds = token_bounds(cumulative, beyond.shape[0])
    sequence = int(np.searchsorted(bounds, row, side="right")) - 1
    if not 0 <= sequence < len(bounds) - 1:
        return Coordinate(-1, row, head, channel)
    return Coordinate(sequence, row - int(bounds[sequence]), head, channel)

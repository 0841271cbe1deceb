"""How far to grow: by doubling where growing moves bytes, by an even stride where it does not."""

from __future__ import annotations

from paged_kv.errors import CommitOutOfRange
from paged_kv.geometry import INT64_MAX, as_size

DEFAULT_MIN_BUCKET = 256


def capacity_bucket(length: int, hard_max: int, min_bucket: int = DEFAULT_MIN_BUCKET) -> int:
    """The capacity in tokens that holds `length`: ``min(max(next_pow2(length), min_bucket), hard_max)``.

    Example:
        >>> [capacity_bucket(length, 32_768) for length in (0, 256, 257, 5_000)]
        [256, 256, 512, 8192]
        >>> capacity_bucket(100, 128)
        128

    Raises:
        InvalidGeometry: a negative number, or no integer.
        CommitOutOfRange: `length` is more than `hard_max`.
    """
    length, hard_max = _require_room(length, hard_max)
    least = as_size("min_bucket", min_bucket, 0, INT64_MAX)
    return min(max(1 << (length - 1).bit_length() if length else 0, least), hard_max)


def stride_bucket(length: int, hard_max: int, stride: int) -> int:
    """The least multiple of `stride` that holds `length`, but not more than `hard_max`.

    Example:
        >>> [stride_bucket(length, 10_000, 1_024) for length in (0, 1, 1_024, 1_025, 9_999)]
        [0, 1024, 1024, 2048, 10000]

    Raises:
        InvalidGeometry: a negative number, or no integer; or a stride of 0.
        CommitOutOfRange: `length` is more than `hard_max`.
    """
    length, hard_max = _require_room(length, hard_max)
    step = as_size("stride", stride, 1, INT64_MAX)
    return min(-(-length // step) * step, hard_max)


def _require_room(length: int, hard_max: int) -> tuple[int, int]:
    """Both as sizes, the first within the second."""
    length = as_size("length", length, 0, INT64_MAX)
    hard_max = as_size("hard_max", hard_max, 0, INT64_MAX)
    if length > hard_max:
        raise CommitOutOfRange(
            f"{length} tokens asked for, {hard_max} are reserved; end the sequence, or reserve more",
            needed=length,
            maximum=hard_max,
        )
    return length, hard_max

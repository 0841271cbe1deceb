"""Where the live bytes of a cache lie: one formula, used by the planner, the tests and every measurement.

A binding is one cache tensor: the keys or the values of one layer, or the whole model in the token-major
layout. Its addresses are reserved for the largest context at once; only the live prefix of each row needs
memory. Offsets are Python integers or int64, and the size of every binding is checked when it is described,
so that none of them can overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from paged_kv.errors import CommitOutOfRange, InvalidGeometry, LayoutRefused
from paged_kv.geometry import INT64_MAX, as_size

Int64Array = npt.NDArray[np.int64]
MAX_BYTES = 1 << 56
MAX_FRAGMENTS = 1 << 24
MAX_LAYERS = 1 << 20


class KvLayout(StrEnum):
    """The order of batch, sequence and head in a binding, and whether its strides grow.

    SEQ_MAJOR and HEAD_MAJOR keep the stride of the reserved capacity for ever. The two BUCKET layouts are
    packed to the present capacity, which grows. TOKEN_MAJOR holds all layers' keys and values of a token
    side by side.
    """

    SEQ_MAJOR = "seq_major"
    HEAD_MAJOR = "head_major"
    SEQ_MAJOR_BUCKET = "seq_major_bucket"
    HEAD_MAJOR_BUCKET = "head_major_bucket"
    TOKEN_MAJOR = "token_major"

    @property
    def is_head_major(self) -> bool:
        """Whether a head's tokens lie together."""
        return self in (KvLayout.HEAD_MAJOR, KvLayout.HEAD_MAJOR_BUCKET)

    @property
    def grows(self) -> bool:
        """Whether the strides follow the present capacity."""
        return self in (KvLayout.SEQ_MAJOR_BUCKET, KvLayout.HEAD_MAJOR_BUCKET)


@dataclass(frozen=True, slots=True)
class BindingGeometry:
    """The shape of one cache tensor.

    Attributes:
        layout: see `KvLayout`.
        capacity: tokens a row that are reserved.
        kv_heads: key-value heads.
        head_dim: channels a head.
        element_size: bytes a channel.
        batch: rows.
        planes: what lies side by side in a token: layers times two for TOKEN_MAJOR, otherwise 1.

    Example:
        >>> binding = BindingGeometry(KvLayout.SEQ_MAJOR, capacity=512, kv_heads=2, head_dim=64)
        >>> binding.bytes_per_token, binding.reserved_bytes
        (256, 131072)

    Raises:
        InvalidGeometry: a size is out of range, or the binding is larger than 2**56 bytes or has more than
            2**24 contiguous fragments in all rows.
        LayoutRefused: several rows in a layout whose rows would move when it grows.
    """

    layout: KvLayout
    capacity: int
    kv_heads: int
    head_dim: int
    element_size: int = 2
    batch: int = 1
    planes: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.layout, KvLayout):
            raise InvalidGeometry(
                f"layout is {self.layout!r}; it must be a KvLayout", given=repr(self.layout)
            )
        for name in ("capacity", "kv_heads", "head_dim", "element_size", "batch", "planes"):
            object.__setattr__(self, name, as_size(name, getattr(self, name), 1, INT64_MAX))
        if self.planes > 1 and self.layout is not KvLayout.TOKEN_MAJOR:
            raise InvalidGeometry(
                f"planes is {self.planes}; only the token-major layout has more than 1", planes=self.planes
            )
        if self.batch > 1 and self.layout in (KvLayout.SEQ_MAJOR_BUCKET, KvLayout.TOKEN_MAJOR):
            raise LayoutRefused(
                f"{self.layout} with batch {self.batch}: growing moves its rows; use a fixed stride",
                layout=str(self.layout),
                batch=self.batch,
            )
        if self.reserved_bytes > MAX_BYTES:
            raise InvalidGeometry(
                f"the binding takes {self.reserved_bytes} bytes; at most {MAX_BYTES} can be addressed",
                given=self.reserved_bytes,
                maximum=MAX_BYTES,
            )
        if self.batch * self.fragments > MAX_FRAGMENTS:
            raise InvalidGeometry(
                f"{self.batch} rows have {self.batch * self.fragments} fragments; at most {MAX_FRAGMENTS} "
                "can be kept account of",
                given=self.batch * self.fragments,
                maximum=MAX_FRAGMENTS,
            )

    @property
    def bytes_per_head(self) -> int:
        """Bytes of one token in one head."""
        return self.head_dim * self.element_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all heads, and all planes."""
        return self.planes * self.kv_heads * self.bytes_per_head

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the whole capacity of all rows."""
        return self.batch * self.capacity * self.bytes_per_token

    @property
    def contiguous_bytes_per_token(self) -> int:
        """Bytes by which one more token lengthens a contiguous fragment."""
        return self.bytes_per_head if self.layout.is_head_major else self.bytes_per_token

    @property
    def fragments(self) -> int:
        """Contiguous fragments that the tokens of one row lie in."""
        return self.kv_heads if self.layout.is_head_major else 1

    def physical_shape(self, bucket: int) -> tuple[int, ...]:
        """The tensor's shape at a present capacity of `bucket` tokens."""
        tokens = bucket if self.layout.grows else self.capacity
        if self.layout.is_head_major:
            return (self.batch, self.kv_heads, tokens, self.head_dim)
        return (self.batch, tokens, self.planes * self.kv_heads, self.head_dim)


def live_prefix_ranges(geometry: BindingGeometry, valid: int, bucket: int | None = None) -> Int64Array:
    """The bytes of a binding that hold the first `valid` tokens of every row.

    With ``bph = head_dim * element_size``, ``bpt = kv_heads * bph``, stride ``cap`` and ``live =
    min(valid, cap)``: SEQ_MAJOR has ``[b*cap*bpt, b*cap*bpt + live*bpt)`` for each row, HEAD_MAJOR
    ``[(b*H+h)*cap*bph, ... + live*bph)`` for each row and head, TOKEN_MAJOR ``[0, live*bpt)``. A packed
    layout has its present capacity as its stride and is dense: ``[0, batch*bucket*bpt)``.

    Args:
        geometry: the binding.
        valid: tokens; more than the capacity count as the capacity.
        bucket: the present capacity of a growing layout; None for the reserved one.

    Returns:
        ``(n, 2)`` int64 of first byte and one past the last, ascending and disjoint; none when nothing lives.

    Example:
        >>> seq = BindingGeometry(KvLayout.SEQ_MAJOR, capacity=32, kv_heads=2, head_dim=4, batch=2)
        >>> live_prefix_ranges(seq, 3).tolist()
        [[0, 48], [512, 560]]
        >>> head = BindingGeometry(KvLayout.HEAD_MAJOR, capacity=32, kv_heads=2, head_dim=4)
        >>> live_prefix_ranges(head, 3).tolist()
        [[0, 24], [256, 280]]

    Raises:
        InvalidGeometry: not an integer, or negative.
        CommitOutOfRange: the bucket is larger than the capacity.
    """
    live = min(as_size("valid", valid, 0, INT64_MAX), geometry.capacity)
    if live == 0:
        return np.empty((0, 2), dtype=np.int64)
    if geometry.layout.grows:
        tokens = require_bucket(geometry, bucket, live)
        return np.array([[0, geometry.batch * tokens * geometry.bytes_per_token]], dtype=np.int64)
    per_row = geometry.fragments
    unit = geometry.contiguous_bytes_per_token
    starts = np.arange(geometry.batch * per_row, dtype=np.int64) * (geometry.capacity * unit)
    return np.stack((starts, starts + live * unit), axis=1)


def require_bucket(geometry: BindingGeometry, bucket: int | None, live: int) -> int:
    """The present capacity in tokens, at least `live` and at most what is reserved."""
    if bucket is None:
        return geometry.capacity
    tokens = as_size("bucket", bucket, 0, INT64_MAX)
    if not live <= tokens <= geometry.capacity:
        raise CommitOutOfRange(
            f"a bucket of {tokens} tokens for {live} live ones; {geometry.capacity} are reserved",
            needed=tokens,
            live=live,
            maximum=geometry.capacity,
        )
    return tokens


@dataclass(frozen=True, slots=True)
class KvCacheGeometry:
    """All bindings of one model's cache.

    Attributes:
        bindings: one geometry a tensor, in the order of the model.

    Raises:
        InvalidGeometry: there is no binding.
    """

    bindings: tuple[BindingGeometry, ...]

    def __post_init__(self) -> None:
        if not self.bindings:
            raise InvalidGeometry("a cache without bindings has nothing to commit", bindings=0)

    @classmethod
    def uniform(
        cls,
        layout: KvLayout,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        element_size: int = 2,
        batch: int = 1,
    ) -> KvCacheGeometry:
        """Keys and values of `layers` equal layers: two bindings a layer, or one in all if TOKEN_MAJOR.

        Example:
            >>> small = KvCacheGeometry.uniform(
            ...     KvLayout.SEQ_MAJOR, layers=24, kv_heads=2, head_dim=64, capacity=512)
            >>> len(small.bindings), small.bytes_per_token
            (48, 12288)

        Raises:
            InvalidGeometry, LayoutRefused: see `BindingGeometry`; or more than 2**20 layers.
        """
        count = 2 * as_size("layers", layers, 1, MAX_LAYERS)
        together = layout is KvLayout.TOKEN_MAJOR
        binding = BindingGeometry(
            layout, capacity, kv_heads, head_dim, element_size, batch, count if together else 1
        )
        return cls((binding,) if together else (binding,) * count)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one row in all bindings."""
        return sum(binding.bytes_per_token for binding in self.bindings)

    @property
    def capacity(self) -> int:
        """Tokens a row that every binding has reserved."""
        return min(binding.capacity for binding in self.bindings)

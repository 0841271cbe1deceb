"""The shape of a paged cache, checked once, so that nothing later can overflow int32.

Page ids are dense in ``[first_page, num_blocks)`` and fixed for life: a physical block id is the page id.
Page 0 is the
null page unless it is switched off: never allocated, never written, the one page that padding may read.
    Element offsets
of a real cache pass int32 early (64 Ki blocks of 64 tokens and 576 channels do), so the two offset formulas,
written here once, count in 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard, overload

import numpy as np
import numpy.typing as npt

from .errors import InvalidGeometry, PagedBlockIdOverflow, PagedInvalidBlockSize, PagedSlotOverflow

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MIN_BLOCK_SIZE = 16

Int64Array = npt.NDArray[np.int64]


def is_integer(value: object) -> TypeGuard[int | np.integer]:
    """Whether `value` is an integer; a bool is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_size(name: str, value: object, low: int, high: int) -> int:
    """A size in ``[low, high]`` as a Python integer, whose products cannot overflow.

    Raises:
        InvalidGeometry: not an integer, or out of range.
    """
    if not is_integer(value) or not low <= value <= high:
        raise InvalidGeometry(
            f"{name} is {value!r}; it must be an integer in [{low}, {high}]", name=name, given=repr(value)
        )
    return int(value)


def check_block_size(block_size: int) -> None:
    """Refuse a block size that ORT refuses: it must be a power of two of at least 16."""
    _require_int("block_size", block_size)
    if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
        raise PagedInvalidBlockSize(
            f"block_size is {block_size}; it must be a power of two of at least {MIN_BLOCK_SIZE}",
            block_size=block_size,
            minimum=MIN_BLOCK_SIZE,
        )


def _require_int(name: str, value: object) -> None:
    if not is_integer(value):
        raise InvalidGeometry(f"{name} is {value!r}; it must be an integer", name=name, given=repr(value))


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """A pool of `num_blocks` pages of `block_size` tokens.

    Attributes:
        num_blocks: pages, the null page included.
        block_size: tokens a page.
        null_page: whether page 0 is kept for padding.
        block_shift: ``log2(block_size)``.

    Example:
        >>> PageGeometry(num_blocks=64, block_size=16).usable_blocks
        63

    Raises:
        InvalidGeometry: no usable page, or not an integer.
        PagedInvalidBlockSize: `block_size` is not a power of two of at least 16.
        PagedBlockIdOverflow: a block id would not fit in int32.
        PagedSlotOverflow: a slot would not fit in int32.
    """

    num_blocks: int
    block_size: int
    null_page: bool = True
    block_shift: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require_int("num_blocks", self.num_blocks)
        check_block_size(self.block_size)
        for name in ("num_blocks", "block_size"):  # NumPy's narrow integers would overflow below
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "block_shift", self.block_size.bit_length() - 1)
        if self.usable_blocks < 1:
            raise InvalidGeometry(
                f"num_blocks is {self.num_blocks}; with null_page={self.null_page} the pool needs at least "
                f"{self.first_page + 1}, so that one page can be used",
                num_blocks=self.num_blocks,
                minimum=self.first_page + 1,
            )
        if self.num_blocks > INT32_MAX:
            raise PagedBlockIdOverflow(
                f"num_blocks is {self.num_blocks}; block ids are int32, so at most {INT32_MAX} blocks",
                num_blocks=self.num_blocks,
                maximum=INT32_MAX,
            )
        if self.num_slots > INT32_MAX:
            raise PagedSlotOverflow(
                f"{self.num_blocks} blocks of {self.block_size} tokens are {self.num_slots} slots; slots are "
                f"int32, so at most {INT32_MAX // self.block_size} blocks of this size",
                num_slots=self.num_slots,
                maximum=INT32_MAX,
            )

    @property
    def first_page(self) -> int:
        """The lowest page id that can be allocated."""
        return 1 if self.null_page else 0

    @property
    def usable_blocks(self) -> int:
        """Pages that can hold tokens: all but the null page."""
        return self.num_blocks - self.first_page

    @property
    def num_slots(self) -> int:
        """Token positions in the cache, the null page's included."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens need: ``ceil(num_tokens / block_size)``."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class LatentCacheGeometry:
    """The shape of a LATENT key cache, ``(num_blocks, block_size, 1, latent_dim)``.

    A row is the compressed value part of `v_head_size` channels and whatever the keys add to it; rotary turns
    `rotary_dim` channels from `rotary_offset` on.

    Example:
        >>> mla = LatentCacheGeometry(64, 16, latent_dim=576, v_head_size=512)
        >>> mla.latent_element_offset(block_id=2, offset_in_block=3, channel=512)
        20672
    """

    num_blocks: int
    block_size: int
    latent_dim: int
    v_head_size: int = 0
    rotary_dim: int = 0
    rotary_offset: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Refuse what the operator refuses later.

        Raises:
            InvalidGeometry: ``latent_dim % 8``, ``rotary_offset % 8``, ``rotary_dim % 16``, a part that does
                not lie inside the row, or a cache whose element count does not fit in int64.
            PagedInvalidBlockSize: `block_size` is not a power of two of at least 16.
        """
        names = ("num_blocks", "latent_dim", "v_head_size", "rotary_dim", "rotary_offset")
        for name in names:
            _require_int(name, getattr(self, name))
        check_block_size(self.block_size)
        for name in (*names, "block_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        for name, multiple in (("latent_dim", 8), ("rotary_offset", 8), ("rotary_dim", 16)):
            value = getattr(self, name)
            if value < 0 or value % multiple:
                raise InvalidGeometry(
                    f"{name} is {value}; it must be a non-negative multiple of {multiple}",
                    name=name,
                    given=value,
                )
        if self.num_blocks < 1 or self.latent_dim < 1:
            raise InvalidGeometry(
                f"num_blocks is {self.num_blocks} and latent_dim is {self.latent_dim}; both must be positive",
                num_blocks=self.num_blocks,
                latent_dim=self.latent_dim,
            )
        for name, end in (("v_head_size", self.v_head_size), ("rotary_offset + rotary_dim", self.rotary_end)):
            if not 0 <= end <= self.latent_dim:
                raise InvalidGeometry(
                    f"{name} is {end}; it must lie in [0, latent_dim = {self.latent_dim}]",
                    name=name,
                    given=end,
                )
        if self.num_elements > INT64_MAX:
            raise InvalidGeometry(
                f"the cache has {self.num_elements} elements; offsets are int64",
                num_elements=self.num_elements,
            )

    @property
    def rotary_end(self) -> int:
        """One past the last channel that rotary turns."""
        return self.rotary_offset + self.rotary_dim

    @property
    def num_elements(self) -> int:
        """Elements of the whole cache tensor."""
        return self.num_blocks * self.block_size * self.latent_dim

    @property
    def needs_64_bit_offsets(self) -> bool:
        """Whether an int32 element offset would overflow somewhere in this cache."""
        return self.num_elements - 1 > INT32_MAX

    def latent_element_offset(self, block_id: int, offset_in_block: int, channel: int) -> int:
        """The element offset of one channel: `latent_element_offset` with bounds checked.

        Raises:
            InvalidGeometry: an index lies outside the cache.
        """
        for name, value, bound in (
            ("block_id", block_id, self.num_blocks),
            ("offset_in_block", offset_in_block, self.block_size),
            ("channel", channel, self.latent_dim),
        ):
            if not is_integer(value) or not 0 <= value < bound:
                raise InvalidGeometry(
                    f"{name} is {value!r}; it must be an integer in [0, {bound})",
                    name=name,
                    given=repr(value),
                )
        return latent_element_offset(
            int(block_id) * self.block_size + int(offset_in_block), int(channel), latent_dim=self.latent_dim
        )


@overload
def token_major_element_offset(
    slot: int, head: int, channel: int, *, kv_num_heads: int, head_size: int
) -> int: ...
@overload
def token_major_element_offset(
    slot: Int64Array, head: int | Int64Array, channel: int | Int64Array, *, kv_num_heads: int, head_size: int
) -> Int64Array: ...
def token_major_element_offset(
    slot: int | Int64Array,
    head: int | Int64Array,
    channel: int | Int64Array,
    *,
    kv_num_heads: int,
    head_size: int,
) -> int | Int64Array:
    """Element offset in a cache ``(num_blocks, block_size, kv_num_heads, head_size)``, in 64 bits.

    ``((block_id * block_size + offset_in_block) * kv_num_heads + head) * head_size + channel``, where the
    inner bracket is the slot. Arrays of any integer type are widened to int64 first.
    """
    kv_num_heads, head_size = int(kv_num_heads), int(head_size)
    if isinstance(slot, np.ndarray):
        wide = slot.astype(np.int64)
        return np.asarray((wide * kv_num_heads + head) * head_size + channel, dtype=np.int64)
    return int((int(slot) * kv_num_heads + int(head)) * head_size + int(channel))


@overload
def latent_element_offset(slot: int, channel: int, *, latent_dim: int) -> int: ...
@overload
def latent_element_offset(slot: Int64Array, channel: int | Int64Array, *, latent_dim: int) -> Int64Array: ...
def latent_element_offset(
    slot: int | Int64Array, channel: int | Int64Array, *, latent_dim: int
) -> int | Int64Array:
    """Element offset in a cache ``(num_blocks, block_size, 1, latent_dim)``: token-major with one head."""
    if isinstance(slot, np.ndarray):
        return token_major_element_offset(slot, 0, channel, kv_num_heads=1, head_size=latent_dim)
    return token_major_element_offset(slot, 0, int(channel), kv_num_heads=1, head_size=latent_dim)

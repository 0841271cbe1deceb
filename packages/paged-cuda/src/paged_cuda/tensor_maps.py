"""What the copy engine of sm_90 is told of an operator's arrays, encoded on the host for each set of them.

Mirrors `kernels/layout/tensor_maps.cuh`; a CPU test compares the two layouts. Rows are fetched in slabs of
64 channels, all at once where the channels divide and a box fills its tile. Nothing is fetched outside a
tensor: such channels, rows and pages arrive as zeros.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from paged_cuda._driver import Driver, TensorMapGeometry
from paged_cuda.params import AttentionParams

SLAB_CHANNELS = 64
_MAP_BYTES = 128
_ALIGNMENT = 64
_INTEGERS = (
    "cache_slabs",
    "single_slabs",
    "query_box",
    "query_rows",
    "rotary_slab",
    "rotary_slabs",
)


class TensorMaps(ctypes.Structure):
    """The second argument of the sm_90 kernel."""

    _fields_ = (
        *((name, ctypes.c_uint8 * _MAP_BYTES) for name in ("key_cache", "query", "query_rotary")),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        ("pad_to_64", ctypes.c_int32 * (-len(_INTEGERS) % 16)),
    )


def aligned_maps() -> TensorMaps:
    """Return zeroed maps at an address that the driver's encoder accepts."""
    memory = (ctypes.c_uint8 * (ctypes.sizeof(TensorMaps) + _ALIGNMENT))()
    return TensorMaps.from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class MapPlan:
    """What is fixed about an operator's maps.

    Attributes:
        kv_tile: KV rows of a tile of the kernel, and rows of a stage that carries a query.
        cache_slabs: 64-channel slabs of a row in shared memory.
        rotary_first: First channel that append writes to its own rows of rotated channels.
        rotary_width: How many; 0: none.
    """

    kv_tile: int
    cache_slabs: int
    rotary_first: int
    rotary_width: int

    def encode(self, maps: TensorMaps, driver: Driver, params: AttentionParams) -> None:
        """Describe the arrays of a run, whose extents and addresses `params` holds already."""
        at = ctypes.addressof(maps)
        self._encode_cache(maps, at, driver, params)
        heads, tokens, first, width = params.num_heads, params.tokens, self.rotary_first, self.rotary_width
        slabs, rotated = -(-params.head_size // SLAB_CHANNELS), -(-width // SLAB_CHANNELS)
        # Dense queries are one list of rows. Otherwise a box may not pass from one token to the next.
        dense = tokens == 1 or params.query_stride == heads * params.head_size
        box = self.kv_tile if dense else math.gcd(heads, self.kv_tile)
        rows, planes = (tokens * heads, 1) if dense else (heads, tokens)
        # One copy for all plain slabs and one for all rotated ones, where the latter come last.
        ends = rotated == 0 or first // SLAB_CHANNELS + rotated == slabs
        single = params.head_size % SLAB_CHANNELS > 0 or box < self.kv_tile or not ends

        plane = 2 * (params.query_stride if planes > 1 else params.head_size)

        def query_map(address: int, channels: int, token_stride: int) -> TensorMapGeometry:
            return _rows(address, channels, (rows, planes), (channels, token_stride), box, single=single)

        driver.encode_tensor_map(
            at + _MAP_BYTES,
            query_map(params.query, params.head_size, params.query_stride)
            if single or rotated in (0, slabs)
            else query_map(params.query, first, params.query_stride)._replace(
                strides=(2 * params.head_size, 2 * SLAB_CHANNELS, plane)
            ),
        )
        if rotated:
            driver.encode_tensor_map(
                at + 2 * _MAP_BYTES, query_map(params.query_rotary, width, heads * width)
            )
        maps.single_slabs, maps.query_box, maps.query_rows = int(single), box, rows
        maps.rotary_slab, maps.rotary_slabs = first // SLAB_CHANNELS, rotated

    def _encode_cache(self, maps: TensorMaps, at: int, driver: Driver, params: AttentionParams) -> None:
        block_size, blocks = 1 << params.block_shift, params.num_blocks
        box = min(block_size, self.kv_tile)
        single = params.head_size % SLAB_CHANNELS > 0 or box < self.kv_tile
        # A cache of no block has no address, and the stride of a single block says nothing. No box lies in
        # the one, or crosses the other.
        page_stride = params.page_stride if blocks > 1 else block_size * params.row_stride
        geometry = _rows(
            params.key_cache if blocks else params.query,
            params.head_size,
            (block_size, max(1, blocks)),
            (params.row_stride, page_stride),
            box,
            single=single,
        )
        if (
            not single
        ):  # the kernel's rows hold whole groups of value columns, which may be wider than the key
            geometry = geometry._replace(box=(*geometry.box[:2], self.cache_slabs, 1))
        driver.encode_tensor_map(at, geometry)
        maps.cache_slabs = 1 if single else self.cache_slabs


_MOST_ENCODED = 1024  # sets of arrays whose maps are kept; a model has one a layer
_KEY = (
    "query",
    "key_cache",
    "query_rotary",
    "tokens",
    "num_blocks",
    "block_shift",
    "query_stride",
    "page_stride",
    "row_stride",
)


class MapEncoder:
    """The maps of one operator, encoded anew only for arrays that it has not seen.

    Attributes:
        maps: What the kernel is given.
    """

    def __init__(self, plan: MapPlan) -> None:
        self.maps = aligned_maps()
        self._plan = plan
        self._encoded: dict[tuple[int, ...], bytes] = {}

    def update(self, driver: Driver, params: AttentionParams) -> None:
        """Make `maps` those of the arrays in `params`.

        Raises:
            DriverError: The driver refuses a geometry; the next update starts anew.
        """
        key = tuple([getattr(params, name) for name in _KEY])
        known = self._encoded.get(key)
        if known is not None:
            ctypes.memmove(ctypes.addressof(self.maps), known, len(known))
            return
        self._plan.encode(self.maps, driver, params)
        if len(self._encoded) >= _MOST_ENCODED:
            self._encoded.clear()
        self._encoded[key] = bytes(self.maps)


def _rows(
    address: int, channels: int, extents: tuple[int, int], strides: tuple[int, int], box: int, *, single: bool
) -> TensorMapGeometry:
    """Describe rows in planes; strides in elements. That of a single plane says nothing and is not used."""
    slabs = channels // SLAB_CHANNELS
    return TensorMapGeometry(
        address,
        (channels if single else SLAB_CHANNELS, extents[0], 1 if single else slabs, extents[1]),
        (2 * strides[0], 2 * SLAB_CHANNELS, 2 * strides[extents[1] > 1]),
        (SLAB_CHANNELS, box, 1 if single else slabs, 1),
    )

"""What the copy engine of sm_90 is told of an operator's arrays, encoded on the host for each set of them.

Mirrors `kernels/layout/tensor_maps.cuh`; a CPU test compares the two layouts. Rows are fetched as boxes of 64
channels. Nothing is fetched outside a tensor: such channels, rows and pages arrive as zeros.
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
_QUERY_BOX_ROWS = 32


class TensorMaps(ctypes.Structure):
    """The second argument of the sm_90 kernel."""

    _fields_ = (
        ("key_cache", ctypes.c_uint8 * _MAP_BYTES),
        ("query", ctypes.c_uint8 * _MAP_BYTES),
        ("query_rotary", ctypes.c_uint8 * _MAP_BYTES),
        ("query_box", ctypes.c_int32),
        ("query_rows", ctypes.c_int32),
        ("rotary_slab", ctypes.c_int32),
        ("rotary_slabs", ctypes.c_int32),
        ("two_term_keys", ctypes.c_int32),
        ("pad_to_64", ctypes.c_int32 * 11),
    )


def aligned_maps() -> TensorMaps:
    """Return zeroed maps at an address that the driver's encoder accepts."""
    memory = (ctypes.c_uint8 * (ctypes.sizeof(TensorMaps) + _ALIGNMENT))()
    return TensorMaps.from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class MapPlan:
    """What is fixed about an operator's maps.

    Attributes:
        kv_tile: KV rows of a tile of the kernel.
        rotary_first: First channel that append writes to its own rows of rotated channels.
        rotary_width: How many; 0: none.
        two_term_keys: Items with at most so many keys use two-term weights.
    """

    kv_tile: int
    rotary_first: int
    rotary_width: int
    two_term_keys: int

    def encode(self, maps: TensorMaps, driver: Driver, params: AttentionParams) -> None:
        """Describe the arrays of a run, whose extents and addresses `params` holds already."""
        heads, head_size, tokens = params.num_heads, params.head_size, params.tokens
        block_size, blocks = 1 << params.block_shift, params.num_blocks
        row_bytes = 2 * params.row_stride
        # A cache of no block has no address, and the stride of a single block says nothing. No box lies in
        # the one, or crosses the other.
        cache = TensorMapGeometry(
            params.key_cache if blocks else params.query,
            (head_size, block_size, max(1, blocks)),
            (row_bytes, 2 * params.page_stride if blocks > 1 else block_size * row_bytes),
            (SLAB_CHANNELS, min(block_size, self.kv_tile), 1),
        )
        # Dense queries are one list of rows. Otherwise a box may not pass from one token to the next.
        dense = tokens == 1 or params.query_stride == heads * head_size
        box = _QUERY_BOX_ROWS if dense else math.gcd(heads, _QUERY_BOX_ROWS)
        rows, planes = (tokens * heads, 1) if dense else (heads, tokens)

        def query_map(address: int, width: int, token_stride: int) -> TensorMapGeometry:
            stride = 2 * (rows * width if dense else token_stride)
            return TensorMapGeometry(
                address, (width, rows, planes), (2 * width, stride), (SLAB_CHANNELS, box, 1)
            )

        driver.encode_tensor_map(ctypes.addressof(maps), cache)
        driver.encode_tensor_map(
            ctypes.addressof(maps) + _MAP_BYTES, query_map(params.query, head_size, params.query_stride)
        )
        if self.rotary_width:
            driver.encode_tensor_map(
                ctypes.addressof(maps) + 2 * _MAP_BYTES,
                query_map(params.query_rotary, self.rotary_width, heads * self.rotary_width),
            )
        maps.query_box, maps.query_rows = box, rows
        maps.rotary_slab = self.rotary_first // SLAB_CHANNELS
        maps.rotary_slabs = -(-self.rotary_width // SLAB_CHANNELS)
        maps.two_term_keys = self.two_term_keys

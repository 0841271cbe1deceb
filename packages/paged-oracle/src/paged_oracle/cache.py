"""Reading and writing a block cache.

Invariant: the caller's array is updated in place, whatever its strides, and only at the slots named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from paged_oracle.dtypes import Array, Float64, Int64
from paged_oracle.quantization import Codec


@dataclass(frozen=True, eq=False)
class BlockCache:
    """One cache with the codec of its rows.

    Attributes:
        array: (num_blocks, block_size, kv_num_heads, stored width); the caller's own.
        codec: how a row is stored.
    """

    array: Array
    codec: Codec

    def write(self, slots: Int64, rows: Array) -> Callable[[], None]:
        """Store rows at flat slots; -1 skips a row, and of rows with the same slot the last one stays.

        Args:
            slots: (tokens,) block * block_size + offset, or -1.
            rows: (tokens, kv_num_heads, stored width), encoded.

        Returns:
            A function that puts back what was there.
        """
        kept = slots >= 0
        block_size = self.array.shape[1]
        places = slots[kept] // block_size, slots[kept] % block_size
        before = self.array[places]
        self.array[places] = rows[kept]
        return partial(self.array.__setitem__, places, before)

    def read(self, block: Int64, offset: Int64, out: Float64) -> None:
        """Put decoded rows into `out`, zeros where the block is -1.

        Args:
            block: (positions,) physical block, or -1.
            offset: (positions,) offset in the block.
            out: (positions, kv_num_heads, head_size) float64.
        """
        mapped = np.flatnonzero(block >= 0)
        count = len(mapped)
        if count == 0 or mapped[-1] != count - 1:
            out[...] = 0
            values = np.empty((count, *out.shape[1:]))
            self.codec.decode(self.array[block[mapped], offset[mapped]], values)
            out[mapped] = values
        else:
            self.codec.decode(self.array[block[:count], offset[:count]], out[:count])
            out[count:] = 0

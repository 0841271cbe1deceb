"""Reading and writing a block cache.

Invariant: the caller's array is updated in place, whatever its strides, and only at the slots named.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def write(self, slots: Int64, rows: Array) -> None:
        """Store rows at flat slots; -1 skips a row, and of rows with the same slot the last one stays.

        Args:
            slots: (tokens,) block * block_size + offset, or -1.
            rows: (tokens, kv_num_heads, stored width), encoded.
        """
        kept = slots >= 0
        block_size = self.array.shape[1]
        self.array[slots[kept] // block_size, slots[kept] % block_size] = rows[kept]

    def read(self, block: Int64, offset: Int64) -> Float64:
        """Return decoded rows, zero where the block is -1.

        Args:
            block: (positions,) physical block, or -1.
            offset: (positions,) offset in the block.

        Returns:
            (kv_num_heads, positions, head_size) float64.
        """
        mapped = block >= 0
        if mapped.all():
            return self.codec.decode(self.array[block, offset]).swapaxes(0, 1)
        found = self.codec.decode(self.array[block[mapped], offset[mapped]])
        rows = np.zeros((len(block), *found.shape[1:]))
        rows[mapped] = found
        return rows.swapaxes(0, 1)

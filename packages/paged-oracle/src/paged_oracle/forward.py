"""One call in two steps: write the new tokens, then attend tile by tile.

Invariant: `append` comes first, and `attend` reads keys and values from the caches only. A token whose write
was skipped therefore meets whatever its place in the cache held.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from paged_oracle.backends import Backend
from paged_oracle.cache import BlockCache
from paged_oracle.dtypes import Array, Float64, upcast
from paged_oracle.prologue import Rounding, project
from paged_oracle.quantization import Codec, expand_scale
from paged_oracle.resolve import BoundCall
from paged_oracle.sequences import Sequences
from paged_oracle.softmax import RunningSoftmax
from paged_oracle.tiles import KEY_CHUNK, Tile, from_rows, mask_rows, to_rows


@dataclass(frozen=True, eq=False)
class Forward:
    """A call with its caches opened.

    Attributes:
        bound: the call and its arrays.
        sequences: its ragged batch.
        backend: what is rounded beyond what all of ONNX Runtime's kernels round.
        keys: the key cache.
        values: the value cache; None for LATENT.
        absolute: attend with the magnitudes of the values, for error bounds.
    """

    bound: BoundCall
    sequences: Sequences
    backend: Backend
    keys: BlockCache
    values: BlockCache | None
    absolute: bool = False

    @classmethod
    def open(cls, bound: BoundCall, backend: Backend, *, absolute: bool = False) -> Forward:
        """Prepare a call; nothing is written yet."""
        keys = _cache(bound, backend, "key_cache", "k_scale")
        latent = bound.call.layout == "LATENT"
        values = None if latent else _cache(bound, backend, "value_cache", "v_scale")
        return cls(bound, Sequences.build(bound), backend, keys, values, absolute)

    def append(self, rounding: Rounding, undo: ExitStack) -> Array:
        """Write the new tokens and return the query heads (tokens, num_heads, head_size).

        Args:
            rounding: which arithmetic.
            undo: told how to put back what was there.
        """
        query, key, value = project(self.bound, self.sequences.positions, rounding)
        key_rows = self.keys.codec.encode(key)
        value_rows = None if value is None or self.values is None else self.values.codec.encode(value)
        slots = self.sequences.write_slots(self.bound.arrays.get("slot_mapping"))
        undo.callback(self.keys.write(slots, key_rows))
        if self.values is not None and value_rows is not None:
            undo.callback(self.values.write(slots, value_rows))
        return query

    def attend(self, tile: Tile, query: Array) -> tuple[Float64, Float64]:
        """Attend with the tokens of one tile.

        Args:
            tile: which tokens.
            query: (tokens, num_heads, head_size), theirs.

        Returns:
            Output (tokens, num_heads, v_head_size) and log-sum-exp (tokens, num_heads).
        """
        bound, call = self.bound, self.bound.call
        softmax = self._softmax(query)
        rows = softmax.queries.shape[1]
        keys = np.empty((KEY_CHUNK, call.kv_num_heads, bound.head_size))
        values = keys[..., : bound.v_head_size] if self.values is None else np.empty_like(keys)
        for positions in tile.chunks():
            block, offset = self.sequences.place(tile.sequence, positions)
            block[positions >= tile.end] = -1
            mapped = positions < tile.end if self.backend.gathers else block >= 0
            if not mapped.any():
                continue
            self.keys.read(block, offset, keys)
            if self.values is not None:
                self.values.read(block, offset, values)
            visible = mask_rows(call, tile.visible(positions, mapped), rows)
            weighed = np.abs(values) if self.absolute else values
            softmax.add(keys.swapaxes(0, 1), weighed.swapaxes(0, 1), visible)
        output, lse = softmax.finish(self._sink(tile, rows))
        return from_rows(call, tile.count, output), from_rows(call, tile.count, lse)

    def _softmax(self, query: Array) -> RunningSoftmax:
        call, dtype = self.bound.call, self.bound.arrays["query"].dtype
        return RunningSoftmax(
            to_rows(call, query),
            self.bound.v_head_size,
            call.scale,
            call.softcap,
            weight_dtype=dtype if self.backend.weights else None,
            sink_dtype=dtype if self.backend.sink else None,
        )

    def _sink(self, tile: Tile, rows: int) -> Float64 | None:
        if "head_sink" not in self.bound.arrays:
            return None
        call = self.bound.call
        heads = upcast(self.bound.arrays["head_sink"]).reshape(call.kv_num_heads, call.group_size)
        sink = np.zeros((call.kv_num_heads, rows))
        sink[:, : tile.count * call.group_size] = np.tile(heads, tile.count)
        return sink


def _cache(bound: BoundCall, backend: Backend, name: str, scale: str) -> BlockCache:
    array = bound.arrays[name]
    if scale not in bound.arrays:
        return BlockCache(array, Codec(array.dtype))
    expanded = expand_scale(bound.arrays[scale], bound.call.kv_num_heads, bound.head_size)
    copy_dtype = bound.arrays["query"].dtype if backend.copies else None
    return BlockCache(array, Codec(array.dtype, expanded, bound.call.int4, copy_dtype))

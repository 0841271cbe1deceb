"""The operator: check, project, write the caches, attend.

Invariant: everything that can be refused is refused before the first write, and all writes of a call come
    before
its first attention read. A token whose write was skipped therefore meets whatever its place in the cache
held.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from paged_schema import PagedAttentionAttributes

from paged_oracle.cache import BlockCache
from paged_oracle.dtypes import Array, DType, Float64, round_to, upcast
from paged_oracle.prologue import Rounding, project
from paged_oracle.quantization import Codec, expand_scale
from paged_oracle.resolve import BoundCall, Inputs, resolve
from paged_oracle.sequences import Sequences
from paged_oracle.softmax import RunningSoftmax
from paged_oracle.strict import require_defined
from paged_oracle.tiles import KEY_CHUNK, Tile, from_rows, mask_rows, tiles, to_rows


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a call computes.

    Attributes:
        output: (tokens, num_heads * v_head_size) in T.
        key_cache: the caller's own array, updated in place.
        value_cache: the caller's own array, updated in place; None for LATENT.
        lse: (tokens, num_heads) natural logarithm of the softmax denominator, the sink's term included; -inf
            for a row that saw no key and has no sink. float32 for ``"ort"``, float64 for ``"exact"``.
    """

    output: Array
    key_cache: Array
    value_cache: Array | None
    lse: Array


def paged_attention(
    attributes: PagedAttentionAttributes,
    inputs: Inputs,
    *,
    rounding: Rounding = "ort",
    ort: str = "1.31",
    extensions: frozenset[str] = frozenset(),
    strict: bool = False,
) -> Outputs:
    """Compute ``com.microsoft::PagedAttention`` as ONNX Runtime's CUDA kernels do.

    Two arithmetics. ``"ort"`` makes every rounding to T that ONNX Runtime makes (after the norm, inside the
    rotary embedding, at the cache write, at the output by way of float32) and works in float64 between them.
    ``"exact"`` is float64 from the inputs to the output, which is rounded once; what a cache stores is
    rounded to what it can hold.

    Memory beyond inputs and outputs is a constant number of copies of the new tokens' rows, plus a tile of
    `tiles.ROW_TILE` query rows (tokens times heads) against `tiles.KEY_CHUNK` positions, whatever the
    context: ``8 * (ROW_TILE * (3 * KEY_CHUNK + head_size + 3 * v_head_size) + 3 * KEY_CHUNK * kv_num_heads *
    head_size)`` bytes, 24 MB for 16 heads at 576/512. A single token with more heads than `ROW_TILE` is one
    tile.

    Args:
        attributes: the node's attributes.
        inputs: arrays by schema name; a missing name or None is an absent input. bfloat16 and float8e4m3fn
            are ml_dtypes arrays. `key_cache` and `value_cache` are updated in place.
        rounding: which arithmetic.
        ort: the ONNX Runtime release whose rules apply.
        extensions: things that ONNX Runtime has no kernel for, asked for by name; only ``"float32"`` exists.
        strict: refuse what ONNX Runtime leaves undefined, instead of masking or skipping it.

    Raises:
        paged_schema.InvalidArgument: a call that ONNX Runtime refuses, with the stage and the rule.
        paged_schema.NotImplementedMode: a call that it has no kernel for.
        UnusableArrayError: an input that is no NumPy array, or a cache that cannot be written.
        UndefinedInputError: only with `strict`.
    """
    bound = resolve(attributes, inputs, ort, extensions)
    if strict:
        require_defined(bound)
    sequences = Sequences.build(bound)
    num_heads, v_head_size = bound.call.num_heads, bound.v_head_size
    output = np.zeros((bound.tokens, num_heads, v_head_size), bound.arrays["query"].dtype)
    lse = np.full((bound.tokens, num_heads), -np.inf, np.float64 if rounding == "exact" else np.float32)
    keys, values = _caches(bound)
    with np.errstate(all="ignore"):
        query = _append(bound, sequences, keys, values, rounding)
        for tile in tiles(bound.call, sequences):
            result, denominator = _attend(bound, sequences, tile, query[tile.tokens], keys, values)
            output[tile.tokens] = _rounded(result, output.dtype, rounding)
            lse[tile.tokens] = denominator
    output[sequences.idle] = 0
    lse[sequences.idle] = -np.inf
    flat = output.reshape(bound.tokens, num_heads * v_head_size)
    return Outputs(flat, keys.array, None if values is None else values.array, lse)


def _caches(bound: BoundCall) -> tuple[BlockCache, BlockCache | None]:
    keys = BlockCache(bound.arrays["key_cache"], _codec(bound, "key_cache", "k_scale"))
    if bound.call.layout == "LATENT":
        return keys, None
    return keys, BlockCache(bound.arrays["value_cache"], _codec(bound, "value_cache", "v_scale"))


def _codec(bound: BoundCall, cache: str, scale: str) -> Codec:
    dtype = bound.arrays[cache].dtype
    if scale not in bound.arrays:
        return Codec(dtype)
    expanded = expand_scale(bound.arrays[scale], bound.call.kv_num_heads, bound.head_size)
    return Codec(dtype, expanded, bound.call.int4)


def _append(
    bound: BoundCall, sequences: Sequences, keys: BlockCache, values: BlockCache | None, rounding: Rounding
) -> Array:
    """Write the new tokens and return the query heads (tokens, num_heads, head_size)."""
    query, key, value = project(bound, sequences.positions, rounding)
    key_rows = keys.codec.encode(key)
    value_rows = None if values is None or value is None else values.codec.encode(value)
    slots = sequences.write_slots(bound.arrays.get("slot_mapping"))
    keys.write(slots, key_rows)
    if values is not None and value_rows is not None:
        values.write(slots, value_rows)
    return query


def _attend(
    bound: BoundCall,
    sequences: Sequences,
    tile: Tile,
    query: Array,
    keys: BlockCache,
    values: BlockCache | None,
) -> tuple[Float64, Float64]:
    """Return output (tokens, num_heads, v_head_size) and lse (tokens, num_heads) of one tile."""
    call = bound.call
    softmax = RunningSoftmax(to_rows(call, query), bound.v_head_size, call.scale, call.softcap)
    rows = softmax.queries.shape[1]
    chunk = np.empty((KEY_CHUNK, call.kv_num_heads, bound.head_size))
    chunk_values = chunk[..., : bound.v_head_size] if values is None else np.empty_like(chunk)
    for positions in tile.chunks():
        block, offset = sequences.place(tile.sequence, positions)
        block[positions >= tile.end] = -1
        mapped = block >= 0
        if not mapped.any():
            continue
        keys.read(block, offset, chunk)
        if values is not None:
            values.read(block, offset, chunk_values)
        visible = mask_rows(call, tile.visible(positions, mapped), rows)
        softmax.add(chunk.swapaxes(0, 1), chunk_values.swapaxes(0, 1), visible)
    output, lse = softmax.finish(_sink(bound, tile, rows))
    return from_rows(call, tile.count, output), from_rows(call, tile.count, lse)


def _rounded(result: Float64, dtype: DType, rounding: Rounding) -> Array:
    # A kernel holds its result in float32 before it rounds to T: near a tie that is a rounding of its own.
    return round_to(result.astype(np.float32) if rounding == "ort" else result, dtype)


def _sink(bound: BoundCall, tile: Tile, rows: int) -> Float64 | None:
    if "head_sink" not in bound.arrays:
        return None
    heads = upcast(bound.arrays["head_sink"]).reshape(bound.call.kv_num_heads, bound.call.group_size)
    sink = np.zeros((bound.call.kv_num_heads, rows))
    sink[:, : tile.count * bound.call.group_size] = np.tile(heads, tile.count)
    return sink

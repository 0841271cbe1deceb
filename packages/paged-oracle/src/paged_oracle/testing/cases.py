"""Synthetic calls: a ragged batch in a scattered cache, of any layout and type.

Invariant: the same arguments and seed give the same arrays, and no two sequences share a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from paged_schema import PagedAttentionAttributes

from paged_oracle.dtypes import Array, DType, numpy_dtype

# Scales at which normal numbers fill the codes of a type.
_UNITS = {"int8": 0.03, "uint8": 0.35, "float8e4m3fn": 0.9}


@dataclass(frozen=True, eq=False)
class Case:
    """A call that can be made more than once.

    Attributes:
        attributes: the node's attributes.
        inputs: arrays by schema name; take `fresh` for a call, as it changes the caches.
        extensions: what the call needs beyond ONNX Runtime.
    """

    attributes: PagedAttentionAttributes
    inputs: dict[str, Array] = field(repr=False)
    extensions: frozenset[str]

    def fresh(self) -> dict[str, Array]:
        """Return a copy of all inputs."""
        return {name: array.copy() for name, array in self.inputs.items()}


def make_case(
    *,
    new: Sequence[int],
    past: Sequence[int],
    num_heads: int = 4,
    kv_num_heads: int = 1,
    head_size: int = 64,
    v_head_size: int = 0,
    layout: str = "LATENT",
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    per_channel: bool = False,
    block_size: int = 16,
    rotary_dim: int = 0,
    packed: bool = False,
    sink: bool = False,
    norm: bool = False,
    seed: int = 0,
    **attributes: float | int | str,
) -> Case:
    """Make a call.

    Args:
        new: new tokens of each sequence.
        past: cached tokens of each sequence.
        num_heads: query heads.
        kv_num_heads: KV heads.
        head_size: channels of a key.
        v_head_size: channels of a value; 0 means `head_size`.
        layout: ``"LATENT"`` or ``"SEPARATE"``.
        dtype: T, a schema type name.
        cache_dtype: the caches' type; ``"uint8"`` means packed INT4, None means T.
        per_channel: quantisation scales for every channel instead of one.
        block_size: tokens a block.
        rotary_dim: channels to rotate; 0 for none.
        packed: query, key and value in one tensor.
        sink: with a head sink.
        norm: with query and key norms.
        seed: of the random numbers.
        **attributes: further attributes of the node.
    """
    rng = np.random.default_rng(seed)
    element, stored = numpy_dtype(dtype), cache_dtype or dtype
    table, num_blocks = _table(rng, new, past, block_size)
    names = ["key_cache"] if layout == "LATENT" else ["key_cache", "value_cache"]
    width = head_size // 2 if stored == "uint8" else head_size
    shape = (num_blocks, block_size, kv_num_heads, width)
    inputs = {name: _cache(rng, shape, numpy_dtype(stored)) for name in names}
    inputs |= _projections(rng, element, sum(new), (num_heads, kv_num_heads, head_size), layout, packed)
    inputs["cumulative_sequence_length"] = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    inputs["past_seqlens"] = np.array(past, np.int32)
    inputs["block_table"] = table
    extra: dict[str, float | int | str] = {"kv_cache_layout": layout, "v_head_size": v_head_size}
    if layout == "LATENT":
        extra["scale"] = head_size**-0.5
    if rotary_dim:
        inputs |= _rotary_tables(max(map(sum, zip(past, new, strict=True))) + 1, rotary_dim, element)
        extra["do_rotary"] = 1
    if sink:
        inputs["head_sink"] = _normal(rng, element, num_heads)
    if norm:
        for name in ("q_norm_weight", "k_norm_weight"):
            inputs[name] = (1 + 0.1 * rng.standard_normal(head_size)).astype(element)
    if stored in _UNITS:
        extra |= _quantise(rng, inputs, names, (kv_num_heads, head_size), stored, per_channel)
    node = PagedAttentionAttributes.model_validate(
        {"num_heads": num_heads, "kv_num_heads": kv_num_heads, **extra, **attributes}
    )
    return Case(node, inputs, frozenset({"float32"} if dtype == "float32" else ()))


def _normal(rng: np.random.Generator, dtype: DType, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def _projections(
    rng: np.random.Generator,
    dtype: DType,
    tokens: int,
    sizes: tuple[int, int, int],
    layout: str,
    packed: bool,
) -> dict[str, Array]:
    num_heads, kv_num_heads, head_size = sizes
    if packed:
        return {"query": _normal(rng, dtype, tokens, (num_heads + 2 * kv_num_heads) * head_size)}
    inputs = {"query": _normal(rng, dtype, tokens, num_heads * head_size)}
    for name in ["key"] if layout == "LATENT" else ["key", "value"]:
        inputs[name] = _normal(rng, dtype, tokens, kv_num_heads * head_size)
    return inputs


def _rotary_tables(positions: int, rotary_dim: int, dtype: DType) -> dict[str, Array]:
    frequencies = 10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.outer(np.arange(positions), frequencies)
    return {"cos_cache": np.cos(angles).astype(dtype), "sin_cache": np.sin(angles).astype(dtype)}


def _table(
    rng: np.random.Generator, new: Sequence[int], past: Sequence[int], block_size: int
) -> tuple[Array, int]:
    needed = [-(-(n + p) // block_size) for n, p in zip(new, past, strict=True)]
    num_blocks = sum(needed) + 2
    order = rng.permutation(num_blocks)
    table = np.full((len(new), max(needed)), -1, np.int32)
    first = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[first : first + count]
        first += count
    return table, num_blocks


def _cache(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    if dtype == np.uint8:
        return rng.integers(0, 256, shape).astype(np.uint8)
    values = rng.standard_normal(shape, dtype=np.float32)
    return (
        np.rint(np.clip(32 * values, -127, 127)).astype(dtype) if dtype == np.int8 else values.astype(dtype)
    )


def _quantise(
    rng: np.random.Generator,
    inputs: dict[str, Array],
    caches: list[str],
    shape: tuple[int, int],
    stored: str,
    per_channel: bool,
) -> dict[str, float | int | str]:
    attributes: dict[str, float | int | str] = {}
    for cache in caches:
        side = cache[0]
        spread = rng.random(shape if per_channel else (1,), dtype=np.float32)
        inputs[f"{side}_scale"] = np.float32(_UNITS[stored]) * (np.float32(0.75) + np.float32(0.5) * spread)
        attributes[f"{side}_quant_type"] = "PER_CHANNEL" if per_channel else "PER_TENSOR"
        if stored == "uint8":
            attributes[f"{side}_cache_dtype"] = "int4"
    return attributes

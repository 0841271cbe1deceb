"""A node that passed every rule, with everything resolved that a backend, an oracle or a planner asks for.

A `Call` is only made by `check`, and never changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paged_schema.attributes import PagedAttentionAttributes
from paged_schema.facts import Facts, float32, known
from paged_schema.inputs import Dim, PagedAttentionInputs


@dataclass(frozen=True, slots=True)
class Call:
    """A checked node. Sizes that the inputs leave symbolic or unknown stay so.

    Attributes:
        attributes: The attributes as given.
        inputs: The inputs as given.
        ort: ORT version, such as `1.31`.
        provider: Execution provider.
        layout: Cache organisation.
        mode: How keys and values come in.
        dtype: Element type of query and output.
        cache_dtype: Element type of the caches' storage.
        num_heads: Query heads.
        kv_num_heads: Key/value heads.
        group_size: Query heads a KV head.
        head_size: Channels of a query or key head; None when nothing fixes it.
        v_head_size: Channels of an output head; the head size where the attribute is 0.
        tokens: New tokens of the whole batch.
        batch: Sequences.
        num_blocks: Physical blocks of the cache.
        block_size: Tokens a block.
        max_blocks: Width of the block table.
        rotary: Whether rotary embedding is applied.
        rotary_dim: Rotated channels; None when the tables' width is not known.
        rotary_rows: Positions that both rotary tables hold.
        rotary_offset: First rotated channel.
        rotary_interleaved: Pairing style.
        scale: Logit multiplier in effect, a float32 value; 0.0 while a default waits for the head size.
        scale_source: Whether the node gives it.
        softcap: Cap in effect; 0.0 is off.
        local_window_size: Window in effect; -1 is unlimited.
        causal: Whether the causal mask applies.
        has_slot_mapping: Whether writes follow slot_mapping.
        has_head_sink: Whether the softmax has a sink.
        has_qk_norm: Whether queries and keys are normalised.
        has_metadata: Whether the host gives bounds.
        qk_norm_epsilon: Epsilon of the norm, a float32 value.
        k_quant_type: Upper case.
        v_quant_type: Upper case.
        int4: Whether a cache byte holds two channels.
        aliases: Pairs of input and output that must be one buffer.
    """

    attributes: PagedAttentionAttributes
    inputs: PagedAttentionInputs
    ort: str
    provider: str
    layout: Literal["SEPARATE", "LATENT"]
    mode: Literal["separate", "packed", "latent"]
    dtype: str
    cache_dtype: str
    num_heads: int
    kv_num_heads: int
    group_size: int
    head_size: int | None
    v_head_size: int | None
    tokens: Dim
    batch: Dim
    num_blocks: Dim
    block_size: Dim
    max_blocks: Dim
    rotary: bool
    rotary_dim: int | None
    rotary_rows: Dim
    rotary_offset: int
    rotary_interleaved: bool
    scale: float
    scale_source: Literal["attribute", "default"]
    softcap: float
    local_window_size: int
    causal: bool
    has_slot_mapping: bool
    has_head_sink: bool
    has_qk_norm: bool
    has_metadata: bool
    qk_norm_epsilon: float
    k_quant_type: str
    v_quant_type: str
    int4: bool
    aliases: tuple[tuple[str, str], ...]


def resolve(f: Facts, inputs: PagedAttentionInputs, ort: str, outputs_given: bool) -> Call:
    """Make the call of a node that passed."""
    head_size = f.hs if f.hs is not None else _head_size_elsewhere(f)
    scale, source = _scale(f, head_size)
    mode: Literal["separate", "packed", "latent"] = (
        "latent" if f.latent else "packed" if f.packed else "separate"
    )
    table = f.block_table
    return Call(
        attributes=f.attributes,
        inputs=inputs,
        ort=ort,
        provider=f.target.provider,
        layout="LATENT" if f.latent else "SEPARATE",
        mode=mode,
        dtype=f.dtype,
        cache_dtype=f.cache_dtype,
        num_heads=f.nh,
        kv_num_heads=f.kvh,
        group_size=f.nh // f.kvh,
        head_size=head_size,
        v_head_size=f.v_head_size or head_size,
        tokens=f.tokens,
        batch=f.batch,
        num_blocks=f.nb,
        block_size=f.bs,
        max_blocks=table.shape[1]
        if table is not None and table.shape is not None and len(table.shape) == 2
        else None,
        rotary=f.attributes.do_rotary == 1 and f.rd != 0,
        rotary_dim=f.rd,
        rotary_rows=_rotary_rows(f),
        rotary_offset=f.rotary_offset,
        rotary_interleaved=f.attributes.rotary_interleaved == 1,
        scale=scale,
        scale_source=source,
        softcap=f.softcap if f.softcap > 0 else 0.0,
        local_window_size=f.window if f.window > 0 else -1,
        causal=f.causal,
        has_slot_mapping=f.slot_mapping is not None,
        has_head_sink=f.head_sink is not None,
        has_qk_norm=f.q_norm_weight is not None,
        has_metadata=f.metadata_spec is not None,
        qk_norm_epsilon=f.epsilon,
        k_quant_type=f.k_quant,
        v_quant_type=f.v_quant,
        int4=f.int4,
        aliases=_aliases(f, outputs_given),
    )


def _scale(f: Facts, head_size: int | None) -> tuple[float, Literal["attribute", "default"]]:
    if f.scale != 0:
        return f.scale, "attribute"
    if head_size is None:
        return 0.0, "default"
    return (float32(1.0 / float32(math.sqrt(head_size))) if head_size else math.inf), "default"


def _rotary_rows(f: Facts) -> Dim:
    # Before 1.31 the tables may differ in length.
    shapes = (spec.shape for spec in (f.cos_cache, f.sin_cache) if spec is not None)
    rows = [shape[0] for shape in shapes if shape]
    sizes = [size for row in rows if (size := known(row)) is not None]
    return min(sizes) if sizes else next(iter(rows), None)


def _head_size_elsewhere(f: Facts) -> int | None:
    # A symbolic query width leaves ORT's rules undecided, but only one head size can still pass at run time.
    for spec, divisor in ((f.key, f.kvh), (f.value, f.kvh)):
        if spec is not None and spec.shape is not None and len(spec.shape) == 2:
            width = known(spec.shape[1])
            if width is not None and width % divisor == 0:
                return width // divisor
    cache = f.key_cache
    if f.int4 or cache is None or cache.shape is None or len(cache.shape) != 4:
        return None
    return known(cache.shape[3])


def _aliases(f: Facts, outputs_given: bool) -> tuple[tuple[str, str], ...]:
    if not outputs_given:
        pairs = (("key_cache", "key_cache_out"), ("value_cache", "value_cache_out"))
        return pairs[:1] if f.latent else pairs
    named = zip(
        f.outputs[1:], (("key_cache", "key_cache_out"), ("value_cache", "value_cache_out")), strict=False
    )
    return tuple(pair for spec, pair in named if spec is not None)

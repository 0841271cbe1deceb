"""Whether a model's attention fits the operator, and exactly how; or why not, and what would make it fit.

From geometry alone: every layer kind becomes a node, `check` judges the node, and the capabilities say who
serves it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from paged_schema import backends
from paged_schema.attributes import PagedAttentionAttributes
from paged_schema.call import Call
from paged_schema.capability import Capability
from paged_schema.check import check, target_of
from paged_schema.dtypes import ITEM_BYTES
from paged_schema.errors import PagedSchemaError
from paged_schema.facts import is_int, unknown
from paged_schema.geometry import Geometry, LayerKind, geometry_of, read_config
from paged_schema.inputs import PagedAttentionInputs
from paged_schema.report import table

SELECTS: Final = (
    "an indexer selects {k} keys for each query, and the operator attends to every key of the window; "
    "it fits as dense attention, which is the same up to {k} tokens of context"
)
COMPRESSES: Final = (
    "{r} tokens are folded into one cache entry, and the operator appends one row a token; "
    "nothing but another operator makes it fit"
)
SINK: Final = "LATENT has no head_sink; drop the sink, or append it as a key of its own"


@dataclass(frozen=True, slots=True)
class Plan:
    """How the model is to run, and what its configuration does not say.

    Attributes:
        tensor_parallel: Ranks that share the heads.
        block_size: Tokens a block.
        dtype: Element type in place of the configuration's.
        ort: ORT version to judge by.
        sm: Compute capability as major * 10 + minor.
        sink: Whether the layers have learned sinks.
        qk_norm: Whether query and key heads are normalised.
        dense: Whether to attend to every key although the model selects some.
    """

    tensor_parallel: int = 1
    block_size: int = 64
    dtype: str | None = None
    ort: str = "1.31"
    sm: int = 90
    sink: bool = False
    qk_norm: bool = False
    dense: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "block_size"):
            if not is_int(getattr(self, name)):
                raise unknown(name, getattr(self, name), "a whole number")
        target_of(self.ort, "cuda", (), self.sm)


@dataclass(frozen=True, slots=True)
class LayerFit:
    """One layer kind as a node.

    Attributes:
        layers: How many layers.
        layout: SEPARATE or LATENT.
        attributes: Attributes of the node, for one rank.
        inputs: Types and shapes of its inputs, as text.
        bytes_per_token: Cache bytes that one token takes in one layer of one rank.
        fits: Whether the operator can do it.
        reasons: Why not, and what would make it fit.
        served_by: Backends that serve it, decode and prefill apart for ORT.
        not_served_by: Backends that do not, with what they lack.
    """

    layers: int
    layout: str
    attributes: dict[str, int | float | str]
    inputs: dict[str, str]
    bytes_per_token: int
    fits: bool
    reasons: tuple[str, ...]
    served_by: tuple[str, ...]
    not_served_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """A model's answer.

    Attributes:
        fits: Whether every attention layer fits.
        bytes_per_token: Cache bytes that one token takes in all layers of one rank.
        table_factor: What the rotary tables are multiplied with.
        other_layers: Layers without attention over a cache.
        layers: One entry a layer kind.
    """

    fits: bool
    bytes_per_token: int
    table_factor: float
    other_layers: int
    layers: tuple[LayerFit, ...]


def fit_file(path: Path, plan: Plan | None = None) -> Fit:
    """Fit a configuration file.

    Raises:
        InvalidArgument: F02, when it is no usable configuration.
    """
    return fit(read_config(path), plan)


def fit(config: Mapping[str, Any], plan: Plan | None = None) -> Fit:
    """Fit a configuration.

    >>> found = fit({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    ...              "num_hidden_layers": 32, "torch_dtype": "bfloat16"})
    >>> found.fits, found.bytes_per_token, found.layers[0].attributes["kv_num_heads"]
    (True, 131072, 8)
    """
    plan = plan or Plan()
    geometry = geometry_of(config, plan.dtype)
    layers = tuple(_fit_kind(geometry, kind, plan) for kind in geometry.layers)
    total = sum(layer.layers * layer.bytes_per_token for layer in layers)
    return Fit(
        all(layer.fits for layer in layers), total, geometry.table_factor, geometry.other_layers, layers
    )


def _fit_kind(whole: Geometry, kind: LayerKind, plan: Plan) -> LayerFit:
    geometry, split = _per_rank(whole, plan.tensor_parallel)
    attributes = _attributes(geometry, kind)
    inputs = _inputs(geometry, plan)
    reasons = [*geometry.obstacles, *split, *_beyond(geometry, kind, plan)]
    call = None
    try:
        call = check(
            PagedAttentionAttributes(**attributes), PagedAttentionInputs.model_validate(inputs), ort=plan.ort
        )
    except PagedSchemaError as error:
        if not (geometry.latent and plan.sink):
            reasons.append(str(error))
    served, refused = _served(call, plan) if call is not None and not reasons else ((), ())
    return LayerFit(
        kind.count,
        "LATENT" if geometry.latent else "SEPARATE",
        attributes,
        inputs,
        _bytes(geometry),
        not reasons,
        tuple(reasons),
        served,
        refused,
    )


def _per_rank(geometry: Geometry, ranks: int) -> tuple[Geometry, list[str]]:
    heads, kv_heads = geometry.num_heads, geometry.kv_num_heads
    if ranks < 1 or heads % ranks:
        return geometry, [f"{heads} query heads do not divide over {ranks} ranks; use a divisor of {heads}"]
    if kv_heads % ranks == 0:
        return replace(geometry, num_heads=heads // ranks, kv_num_heads=kv_heads // ranks), []
    if ranks % kv_heads == 0:
        # Fewer KV heads than ranks: each rank keeps a copy of the one that its queries read.
        return replace(geometry, num_heads=heads // ranks, kv_num_heads=1), []
    return geometry, [f"{kv_heads} KV heads neither divide over {ranks} ranks nor the reverse"]


def _attributes(geometry: Geometry, kind: LayerKind) -> dict[str, Any]:
    found: dict[str, Any] = {"num_heads": geometry.num_heads, "kv_num_heads": geometry.kv_num_heads}
    optional = {
        "kv_cache_layout": "LATENT" if geometry.latent else None,
        "v_head_size": geometry.v_head_size if geometry.v_head_size != geometry.head_size else None,
        "scale": geometry.scale,
        "softcap": geometry.softcap or None,
        "local_window_size": kind.window,
        "do_rotary": 1 if geometry.rotary_dim else None,
        "rotary_interleaved": 1 if geometry.rotary_dim and geometry.rotary_interleaved else None,
        "rotary_offset": geometry.rotary_offset or None,
        "is_causal": None if geometry.causal else 0,
    }
    return found | {name: value for name, value in optional.items() if value is not None}


def _inputs(geometry: Geometry, plan: Plan) -> dict[str, str]:
    t, size = geometry.dtype, geometry.head_size
    row = f"{t}[tokens, {geometry.kv_num_heads * size}]"
    cache = f"{t}[blocks, {plan.block_size}, {geometry.kv_num_heads}, {size}]"
    found = {"query": f"{t}[tokens, {geometry.num_heads * size}]", "key": row, "key_cache": cache}
    if not geometry.latent:
        found |= {"value": row, "value_cache": cache}
    found |= {"cumulative_sequence_length": "int32[bounds]", "past_seqlens": "int32[batch]"}
    found["block_table"] = "int32[batch, columns]"
    if geometry.rotary_dim:
        rows = geometry.max_positions or "positions"
        found["cos_cache"] = found["sin_cache"] = f"{t}[{rows}, {geometry.rotary_dim // 2}]"
    if plan.sink:
        found["head_sink"] = f"{t}[{geometry.num_heads}]"
    if plan.qk_norm and not geometry.latent:
        found["q_norm_weight"] = found["k_norm_weight"] = f"{t}[{size}]"
    found["slot_mapping"] = "int32[tokens]"
    found["attention_metadata"] = "int32[2]"
    return found


def _beyond(geometry: Geometry, kind: LayerKind, plan: Plan) -> list[str]:
    reasons = []
    if kind.compression > 1:
        reasons.append(COMPRESSES.format(r=kind.compression))
    elif kind.selects is not None and not plan.dense:
        reasons.append(SELECTS.format(k=kind.selects))
    if geometry.latent and plan.sink:
        reasons.append(SINK)
    return reasons


def _served(call: Call, plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    served, refused = [], []
    for capability in (
        Capability.paged_cuda(),
        Capability.glm_dense_mla_latent(),
        Capability.webgpu_separate(plan.ort),
    ):
        missing = capability.unsupported(call)
        if missing:
            refused.append(f"{capability.name}: no {', '.join(missing)}")
        else:
            served.append(capability.name)
    for phase, tokens in (("decode", 1), ("prefill", 128)):
        verdicts = backends.explain(backends.problem_of(call, sm=plan.sm, tokens=tokens, batch=1))
        chosen = [verdict.backend for verdict in verdicts if verdict.serves]
        if chosen:
            served.append(f"ORT {call.ort} CUDA {phase}: {chosen[0]}")
        else:
            why = "; ".join(f"{verdict.backend}: {verdict.reasons[0]}" for verdict in verdicts)
            refused.append(f"ORT {call.ort} CUDA {phase}: {why}")
    return tuple(served), tuple(refused)


def _bytes(geometry: Geometry) -> int:
    caches = 1 if geometry.latent else 2
    return caches * geometry.kv_num_heads * geometry.head_size * ITEM_BYTES[geometry.dtype]


def as_json(found: Fit) -> str:
    """Return the answer as JSON."""
    return json.dumps(asdict(found), indent=2)


def as_table(found: Fit) -> str:
    """Return the answer as text: one block a layer kind, then the sums."""
    blocks = []
    for layer in found.layers:
        rows = [
            ["layers", str(layer.layers)],
            ["fits", "yes" if layer.fits else "no"],
            ["layout", layer.layout],
        ]
        rows += [
            [name, _shown(value)] for name, value in layer.attributes.items() if name != "kv_cache_layout"
        ]
        rows += [[name, spec] for name, spec in layer.inputs.items()]
        rows.append(["cache bytes a token and layer", str(layer.bytes_per_token)])
        rows += [["why not", reason] for reason in layer.reasons]
        rows += [["served by", name] for name in layer.served_by]
        rows += [["not by", name] for name in layer.not_served_by]
        blocks.append(table(rows, ["what", "value"]))
    total = f"cache bytes a token, all layers of one rank: {found.bytes_per_token}"
    notes = [total, f"rotary tables times {found.table_factor:.6g}"]
    if found.other_layers:
        notes.append(f"{found.other_layers} layers have no attention over a cache")
    return "\n\n".join([*blocks, "\n".join(notes)])


def _shown(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)

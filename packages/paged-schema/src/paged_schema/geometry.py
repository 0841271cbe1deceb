"""The attention geometry of a Hugging Face configuration: numbers and layer kinds, never the model's name.

What a configuration does not say (norm weights, learned sinks) is not guessed: the caller says it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paged_schema.errors import InvalidArgument

Config = Mapping[str, Any]
MAX_CONFIG_BYTES: Final = 16 * 2**20
MAX_LAYERS: Final = 10_000
MAX_NUMBER: Final = sys.float_info.max
NO_ATTENTION: Final = ("linear", "conv", "mamba", "recurrent", "ssm", "rwkv")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that attend alike.

    Attributes:
        count: How many.
        window: Left window in tokens, the current one counted; None is unlimited.
        compression: Tokens folded into one cache entry; 0 or 1 is none.
        selects: Keys picked for each query by an indexer; None is all.
    """

    count: int
    window: int | None = None
    compression: int = 0
    selects: int | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """What attention needs to know of a model.

    Attributes:
        num_heads: Query heads.
        kv_num_heads: Key/value heads; 1 when latent.
        head_size: Channels of a query or key head as cached.
        v_head_size: Channels of a value head as cached.
        latent: Whether a cache row is a latent that holds key and value.
        rotary_dim: Rotated channels of a head.
        rotary_offset: First of them.
        rotary_interleaved: Pairing style.
        scale: Logit multiplier, the YaRN factor included; None is `1/sqrt(head_size)`.
        table_factor: What the rotary tables are multiplied with.
        softcap: Cap on the logits; 0 is off.
        causal: Whether the mask is causal.
        dtype: `float16` or `bfloat16`.
        max_positions: Context length.
        layers: Kinds of attention layers.
        other_layers: Layers without attention over a cache.
        obstacles: What the operator has no means for, whatever the numbers.
    """

    num_heads: int
    kv_num_heads: int
    head_size: int
    v_head_size: int
    latent: bool
    rotary_dim: int
    rotary_offset: int
    rotary_interleaved: bool
    scale: float | None
    table_factor: float
    softcap: float
    causal: bool
    dtype: str
    max_positions: int
    layers: tuple[LayerKind, ...]
    other_layers: int = 0
    obstacles: tuple[str, ...] = field(default=())


def read_config(path: Path) -> Config:
    """Read a configuration file.

    Raises:
        InvalidArgument: F02, when it is no JSON object or too large.
    """
    try:
        # A device says nothing of its size before it is read.
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _bad(str(path), error.strerror or "unreadable", "a file that can be read") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise _bad(str(path), "a file above 16 MiB", "a model configuration")
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise _bad(str(path), "no JSON text", "a JSON object") from None
    if not isinstance(found, dict):
        raise _bad(str(path), f"JSON of type {type(found).__name__}", "a JSON object")
    return found


def geometry_of(config: Config, dtype: str | None = None) -> Geometry:
    """Work out the geometry.

    Args:
        config: A configuration; a multimodal one's `text_config` is used.
        dtype: Element type to use in place of the configuration's.

    Raises:
        InvalidArgument: F02, when a needed number is missing or makes no sense.
    """
    if not isinstance(config, Mapping):
        raise _bad("configuration", type(config).__name__, "a mapping of names to values")
    inner = config.get("text_config")
    text: Config = (
        {**config, **inner} if isinstance(inner, dict) and "num_attention_heads" not in config else config
    )
    heads = _integer(text, "num_attention_heads")
    rope = _rope(text)
    layers, other = _layers(text)
    common = {
        "num_heads": heads,
        "softcap": _number(text, "attn_logit_softcapping", 0.0),
        "causal": not text.get("use_bidirectional_attention", False),
        "dtype": _dtype(text, dtype),
        "max_positions": _integer(text, "max_position_embeddings", 0),
        "layers": layers,
        "other_layers": other,
        "obstacles": _obstacles(text),
    }
    if text.get("kv_lora_rank"):
        return Geometry(**common, **_latent(text, rope))  # type: ignore[arg-type]
    return Geometry(**common, **_separate(text, rope, heads))  # type: ignore[arg-type]


def _latent(text: Config, rope: Config) -> dict[str, object]:
    rank, rotated = _integer(text, "kv_lora_rank"), _integer(text, "qk_rope_head_dim")
    width = _integer(text, "qk_nope_head_dim") + rotated
    factor, every = _number(rope, "factor", 1.0), _number(rope, "mscale_all_dim", 0.0)
    return {
        "kv_num_heads": 1,
        "head_size": rank + rotated,
        "v_head_size": rank,
        "latent": True,
        "rotary_dim": rotated,
        "rotary_offset": rank,
        # The published latent-attention weights pair neighbours unless the configuration says otherwise.
        "rotary_interleaved": bool(text.get("rope_interleave", True)),
        "scale": width**-0.5 * yarn_mscale(factor, every) ** 2,
        "table_factor": yarn_mscale(factor, _number(rope, "mscale", 1.0)) / yarn_mscale(factor, every or 1.0)
        if _is_yarn(rope)
        else 1.0,
    }


def _separate(text: Config, rope: Config, heads: int) -> dict[str, object]:
    size = _integer(text, "head_dim", 0) or _integer(text, "hidden_size") // heads
    partial = _number(text, "partial_rotary_factor", _number(rope, "partial_rotary_factor", 1.0))
    rotated = _integer(text, "qk_rope_head_dim", 0) or int(size * partial)
    prescale = _number(text, "query_pre_attn_scalar", 0.0)
    given = _number(text, "attention_multiplier", prescale**-0.5 if prescale > 0 else 0.0)
    return {
        "kv_num_heads": _integer(text, "num_key_value_heads", heads),
        "head_size": size,
        "v_head_size": _integer(text, "v_head_dim", size),
        "latent": False,
        "rotary_dim": rotated,
        # A head that names its rotated part apart holds it last.
        "rotary_offset": size - rotated if "qk_rope_head_dim" in text else 0,
        "rotary_interleaved": bool(text.get("rope_interleave", False)),
        # Left out where it is what the operator defaults to.
        "scale": None if given == 0 or math.isclose(given, size**-0.5) else given,
        "table_factor": _number(rope, "attention_factor", yarn_mscale(_number(rope, "factor", 1.0), 1.0))
        if _is_yarn(rope)
        else 1.0,
    }


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's magnitude correction, `0.1 * mscale * ln(factor) + 1` for a factor above 1.

    >>> round(yarn_mscale(40, 1.0), 4), yarn_mscale(1.0, 1.0)
    (1.3689, 1.0)
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope(text: Config) -> Config:
    for name in ("rope_scaling", "rope_parameters"):
        rope = text.get(name)
        if isinstance(rope, dict):
            # Some keep one entry for each layer kind; the full-attention one holds the scaling.
            inner = rope.get("full_attention")
            return inner if isinstance(inner, dict) else rope
    return {}


def _is_yarn(rope: Config) -> bool:
    return "yarn" in (rope.get("rope_type"), rope.get("type"))


def _layers(text: Config) -> tuple[tuple[LayerKind, ...], int]:
    count = _integer(text, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise _bad("num_hidden_layers", count, f"at most {MAX_LAYERS}")
    kinds = [_kind(text, index, count) for index in range(count)]
    counted: dict[LayerKind, int] = {}
    for kind in kinds:
        if kind is not None:
            counted[kind] = counted.get(kind, 0) + 1
    layers = tuple(LayerKind(n, k.window, k.compression, k.selects) for k, n in counted.items())
    return layers, sum(kind is None for kind in kinds)


def _kind(text: Config, index: int, count: int) -> LayerKind | None:
    named = _entry(text.get("layer_types"), index)
    if isinstance(named, str) and any(word in named for word in NO_ATTENTION):
        return None
    ratio = _entry(text.get("compress_ratios"), index)
    window = text.get("sliding_window")
    windowed = _windowed(text, index, named, ratio)
    return LayerKind(
        1,
        window if windowed and isinstance(window, int) and window > 0 else None,
        ratio if isinstance(ratio, int) else 0,
        _integer(text, "index_topk") if text.get("index_topk") and ratio in (None, 4) else None,
    )


def _windowed(text: Config, index: int, named: object, ratio: object) -> bool:
    if isinstance(named, str):
        return "sliding" in named
    if isinstance(ratio, int):
        return True
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:
        return (index + 1) % pattern != 0
    if "use_sliding_window" in text:
        return bool(text["use_sliding_window"]) and index >= _integer(text, "max_window_layers", 0)
    return True


def _entry(values: object, index: int) -> object:
    if isinstance(values, Sequence) and not isinstance(values, str) and index < len(values):
        entry: object = values[index]
        return entry
    return None


def _obstacles(text: Config) -> tuple[str, ...]:
    found = []
    if text.get("alibi") or text.get("position_embedding_type") == "alibi":
        found.append("ALiBi adds a bias to the logits, and the operator has no attention bias")
    if text.get("attention_chunk_size"):
        found.append(
            "chunked attention restarts at chunk borders, and the operator has only a sliding window"
        )
    if text.get("is_encoder_decoder"):
        found.append("cross-attention reads another sequence's keys, and the operator appends its own")
    return tuple(found)


def _dtype(text: Config, dtype: str | None) -> str:
    from paged_schema.dtypes import canonical

    given = dtype or text.get("torch_dtype") or text.get("dtype") or "bfloat16"
    name = canonical(str(given).removeprefix("torch."))
    if name in ("float16", "bfloat16"):
        return name
    if name == "float32" and dtype is None:
        return "bfloat16"
    raise _bad("dtype", given, "float16 or bfloat16")


def _integer(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    lowest = 0 if default == 0 else 1
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value < 2**31:
        raise _bad(name, "nothing" if value is None else value, f"a whole number of at least {lowest}")
    return value


def _number(config: Config, name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    # Compared before it is converted: an integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise _bad(name, value, "a finite number of at least 0")
    return float(value)


def _bad(subject: str, got: object, expected: str) -> InvalidArgument:
    return InvalidArgument("load", "F02", subject, got, expected, "FAIL")

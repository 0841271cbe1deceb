"""The geometry of a llama model, read from its GGUF keys; an unknown feature is refused by its key."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from paged_bench.demo.gguf_file import GgufFile
from paged_bench.errors import ModelFileError

_ARCHITECTURE = "llama"


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that fix a llama model's shapes and its rotary embedding.

    Attributes:
        layers: Number of blocks.
        width: Channels of the residual stream.
        hidden: Channels inside the feed-forward part.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        head_size: Channels of a head.
        rotary_dim: Leading channels of a head that are rotated; even, at most `head_size`.
        rope_base: Base of the rotary frequencies.
        rope_factor: Positions are divided by this (linear scaling); 1.0 for none.
        epsilon: Added to the mean square in RMSNorm.
        context: Longest sequence the model was trained for, in tokens.
        vocabulary: Number of token ids.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    rotary_dim: int
    rope_base: float
    rope_factor: float
    epsilon: float
    context: int
    vocabulary: int

    @property
    def kv_width(self) -> int:
        """Channels of the keys (or the values) of one token."""
        return self.kv_heads * self.head_size

    @property
    def query_width(self) -> int:
        """Channels of the queries of one token."""
        return self.heads * self.head_size


def read_config(file: GgufFile) -> LlamaConfig:
    """Read and check the geometry.

    Raises:
        ModelFileError: Another architecture, a missing key, a feature this forward pass does not have,
            or numbers that cannot belong together.
    """
    architecture = file.key("general.architecture", str)
    if architecture != _ARCHITECTURE:
        raise ModelFileError(
            "key 'general.architecture'",
            f"is {architecture!r}, only {_ARCHITECTURE!r} can be run",
            "give another file with --model",
        )
    _refuse_features(file)
    heads = _positive(file, "llama.attention.head_count")
    width = _positive(file, "llama.embedding_length")
    head_size = _positive(file, "llama.attention.key_length", width // heads)
    config = LlamaConfig(
        layers=_positive(file, "llama.block_count"),
        width=width,
        hidden=_positive(file, "llama.feed_forward_length"),
        heads=heads,
        kv_heads=_positive(file, "llama.attention.head_count_kv", heads),
        head_size=head_size,
        rotary_dim=_positive(file, "llama.rope.dimension_count", head_size),
        rope_base=file.key("llama.rope.freq_base", float, 10_000.0),
        rope_factor=_rope_factor(file),
        epsilon=file.key("llama.attention.layer_norm_rms_epsilon", float),
        context=_positive(file, "llama.context_length"),
        vocabulary=len(file.strings("tokenizer.ggml.tokens")),
    )
    _check(config, file)
    return config


def _positive(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.key(key, int, default)
    if value <= 0:
        raise ModelFileError(f"key {key!r}", f"is {value}, a positive number is required")
    return value


def _rope_factor(file: GgufFile) -> float:
    kind = file.key("llama.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise ModelFileError("key 'llama.rope.scaling.type'", f"is {kind!r}, 'none' or 'linear' is required")
    if kind == "none":
        return file.key("llama.rope.scale_linear", float, 1.0)
    return file.key("llama.rope.scaling.factor", float)


def _refuse_features(file: GgufFile) -> None:
    if file.key("llama.expert_count", int, 0) > 0:
        raise ModelFileError("key 'llama.expert_count'", "a mixture of experts cannot be run")
    if not file.key("llama.attention.causal", bool, True):
        raise ModelFileError("key 'llama.attention.causal'", "only causal attention can be run")
    for key in (
        "llama.attention.sliding_window",
        "llama.attention.max_alibi_bias",
        "llama.attention.clamp_kqv",
    ):
        if file.has_key(key):
            raise ModelFileError(f"key {key!r}", "names a feature that this forward pass does not have")


def _check(config: LlamaConfig, file: GgufFile) -> None:
    value_size = file.key("llama.attention.value_length", int, config.head_size)
    rules = (
        (
            "llama.attention.head_count_kv",
            config.heads % config.kv_heads == 0,
            f"must divide {config.heads} heads",
        ),
        ("llama.attention.value_length", value_size == config.head_size, f"must equal {config.head_size}"),
        (
            "llama.rope.dimension_count",
            config.rotary_dim % 2 == 0 and config.rotary_dim <= config.head_size,
            f"must be even and at most the head size {config.head_size}",
        ),
        ("llama.rope.freq_base", 0.0 < config.rope_base < inf, "must be positive and finite"),
        ("llama.rope.scaling.factor", 0.0 < config.rope_factor < inf, "must be positive and finite"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0 < config.epsilon < inf, "must be positive and finite"),
    )
    for key, holds, requirement in rules:
        if not holds:
            raise ModelFileError(f"key {key!r}", requirement, f"{file.path.name} does not fit together")

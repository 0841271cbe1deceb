"""The two nodes that the recorded verdicts of the real operator start from; tests change one thing."""

from __future__ import annotations

from typing import Any

Parts = tuple[dict[str, Any], dict[str, str | None]]


def latent() -> Parts:
    """Return attributes and inputs of the LATENT base: 4 heads of 192, values of 128, rotary 64 at 128."""
    attributes = {
        "num_heads": 4,
        "kv_num_heads": 1,
        "kv_cache_layout": "LATENT",
        "v_head_size": 128,
        "rotary_offset": 128,
        "do_rotary": 1,
        "scale": 192**-0.5,
    }
    inputs: dict[str, str | None] = {
        "query": "bf16[3, 768]",
        "key": "bf16[3, 192]",
        "key_cache": "bf16[5, 16, 1, 192]",
        "cos_cache": "bf16[21, 32]",
        "sin_cache": "bf16[21, 32]",
    }
    return attributes, inputs | _sequences()


def separate() -> Parts:
    """Return attributes and inputs of the SEPARATE base: 8 query and 2 KV heads of 64, rotary 64 at 0."""
    attributes = {"num_heads": 8, "kv_num_heads": 2, "do_rotary": 1}
    inputs: dict[str, str | None] = {
        "query": "bf16[3, 512]",
        "key": "bf16[3, 128]",
        "value": "bf16[3, 128]",
        "key_cache": "bf16[5, 16, 2, 64]",
        "value_cache": "bf16[5, 16, 2, 64]",
        "cos_cache": "bf16[21, 32]",
        "sin_cache": "bf16[21, 32]",
    }
    return attributes, inputs | _sequences()


def _sequences() -> dict[str, str | None]:
    return {
        "cumulative_sequence_length": "i32[3]",
        "past_seqlens": "i32[2]",
        "block_table": "i32[2, 2]",
    }

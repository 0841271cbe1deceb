"""How a step reaches a cache: where its rows lie, by what kind of launch, and who attends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from paged_bench.residency.attention import Array, Half


class Access(Enum):
    """How a step reaches the cache."""

    LAUNCH = "launch"
    CAPTURE = "capture"
    REPLAY = "replay"


@dataclass(frozen=True)
class Rows:
    """Where a layer's rows lie.

    Attributes:
        layer: The layer.
        key_address: First byte of its keys, and `value_address` of its values.
        value_address: See `key_address`.
        token_stride: Elements from a token to the next, and `head_stride` from a head to the next.
        head_stride: See `token_stride`.
    """

    layer: int
    key_address: int
    value_address: int
    token_stride: int
    head_stride: int


class Reader(Protocol):
    """Stores a step's rows in a cache and attends over it."""

    def begin(self, past: int, tokens: int) -> None:
        """Start a step of `tokens` new tokens after `past` cached ones."""
        ...

    def attend(self, rows: Rows, access: Access, query: Array, key: Half, value: Half, past: int) -> Array:
        """Write the new rows and attend.

        Args:
            rows: Where the layer's rows lie; a replay uses those of its capture.
            access: Launch, capture and run, or replay.
            query: (tokens, heads, head_size), rotated.
            key: (tokens, kv_heads, head_size), rotated.
            value: (tokens, kv_heads, head_size).
            past: Tokens in the cache before these.

        Returns:
            (tokens, heads, head_size).
        """
        ...

    def close(self) -> None:
        """Let graphs and buffers go."""
        ...

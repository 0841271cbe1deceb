"""A grouped-query model as a LATENT cache, exactly.

Invariant: attention over the embedded rows has the logits and the value sums of the model's own heads.
Nothing is approximated: a query head is zero outside its own key slice, and reads its own value slice of the
output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paged_oracle.dtypes import Array, Int64


@dataclass(frozen=True)
class GqaLatent:
    """How the KV heads of a token share one latent row.

    A row is the value heads, then the key heads. The key channels are permuted so that one half-split
    rotation of the key part rotates every head: with ``half = rotary_dim / 2``, pair r of head h lies at ``h
    * half + r`` and ``(kv_num_heads + h) * half + r`` of the key part. Channels that are not rotated follow,
    head after head.

    A node over these rows has ``kv_num_heads=1``, `v_head_size`, `rotary_offset` and the model's own scale
    (it must be given: the default would be that of the wide row), and the tables that `tables` returns.

    Attributes:
        num_heads: query heads of the model.
        kv_num_heads: KV heads of the model.
        head_size: channels a head.
        rotary_dim: rotated channels at the start of each head, half-split; 0 means all.

    Example:
        >>> import numpy as np
        >>> latent = GqaLatent(num_heads=9, kv_num_heads=3, head_size=64)
        >>> latent.head_size_latent, latent.v_head_size, latent.rotary_offset
        (384, 192, 192)
        >>> latent.rows(np.ones((5, 192)), np.zeros((5, 192))).shape
        (5, 384)
    """

    num_heads: int
    kv_num_heads: int
    head_size: int
    rotary_dim: int = 0

    def __post_init__(self) -> None:
        if min(self.num_heads, self.kv_num_heads, self.head_size) < 1 or self.num_heads % self.kv_num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of kv_num_heads {self.kv_num_heads}, and all "
                f"sizes positive (head_size {self.head_size})"
            )
        if self.rotary_dim == 0:
            object.__setattr__(self, "rotary_dim", self.head_size)
        if not 0 < self.rotary_dim <= self.head_size or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} must be even and at most head_size {self.head_size}"
            )

    @property
    def head_size_latent(self) -> int:
        """Channels of a row: the operator's head_size."""
        return 2 * self.kv_num_heads * self.head_size

    @property
    def v_head_size(self) -> int:
        """Channels of the value part."""
        return self.kv_num_heads * self.head_size

    @property
    def rotary_offset(self) -> int:
        """First channel of the key part, where rotation starts."""
        return self.kv_num_heads * self.head_size

    @property
    def latent_rotary_dim(self) -> int:
        """Rotated channels of a row."""
        return self.kv_num_heads * self.rotary_dim

    def rows(self, key: Array, value: Array) -> Array:
        """Return latent rows: the operator's `key` input.

        Args:
            key: (tokens, kv_num_heads * head_size), not yet rotated.
            value: like `key`.

        Returns:
            (tokens, head_size_latent) in the type of `key`.

        Raises:
            ValueError: another shape; so for the other methods.
        """
        _require("key", key, (None, self.v_head_size))
        _require("value", value, key.shape)
        rows = np.empty((key.shape[0], self.head_size_latent), key.dtype)
        rows[:, : self.v_head_size] = value
        rows[:, self._places.reshape(-1)] = key
        return rows

    def queries(self, query: Array) -> Array:
        """Return latent queries: the operator's `query` input.

        Args:
            query: (tokens, num_heads * head_size), not yet rotated.

        Returns:
            (tokens, num_heads * head_size_latent) in the type of `query`, zero outside each head's key slice.
        """
        _require("query", query, (None, self.num_heads * self.head_size))
        tokens = query.shape[0]
        latent = np.zeros((tokens, self.num_heads, self.head_size_latent), query.dtype)
        heads = query.reshape(tokens, self.num_heads, self.head_size)
        latent[:, np.arange(self.num_heads)[:, None], self._places[self._kv_heads]] = heads
        return latent.reshape(tokens, self.num_heads * self.head_size_latent)

    def tables(self, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Return the rotary tables of a row: the model's own, once for each KV head.

        Args:
            cos: (positions, rotary_dim / 2).
            sin: like `cos`.

        Returns:
            Two arrays (positions, latent_rotary_dim / 2).
        """
        _require("cos", cos, (None, self.rotary_dim // 2))
        _require("sin", sin, cos.shape)
        return np.tile(cos, (1, self.kv_num_heads)), np.tile(sin, (1, self.kv_num_heads))

    def outputs(self, output: Array) -> Array:
        """Take each query head's own value slice.

        Args:
            output: (tokens, num_heads * v_head_size), the operator's output.

        Returns:
            (tokens, num_heads * head_size).
        """
        _require("output", output, (None, self.num_heads * self.v_head_size))
        tokens = output.shape[0]
        slices = output.reshape(tokens, self.num_heads, self.kv_num_heads, self.head_size)
        own = slices[:, np.arange(self.num_heads), self._kv_heads]
        return own.reshape(tokens, self.num_heads * self.head_size)

    @cached_property
    def _kv_heads(self) -> Int64:
        return np.arange(self.num_heads) // (self.num_heads // self.kv_num_heads)

    @cached_property
    def _places(self) -> Int64:
        """(kv_num_heads, head_size): where each key channel lies in a row."""
        half, plain = self.rotary_dim // 2, self.head_size - self.rotary_dim
        head = np.arange(self.kv_num_heads)[:, None]
        first = head * half + np.arange(half)
        second = first + self.kv_num_heads * half
        rest = self.latent_rotary_dim + head * plain + np.arange(plain)
        return self.rotary_offset + np.concatenate([first, second, rest], axis=1)


def _require(name: str, array: Array, shape: tuple[int | None, ...]) -> None:
    fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    if not fits:
        wanted = ", ".join("tokens" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} {array.shape} must be ({wanted})")

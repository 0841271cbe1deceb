"""Multi-head latent attention: the decomposed form, and its weights absorbed into queries and outputs.

Invariant: for every query, ``absorb(...)`` around a LATENT node gives what `decomposed_attention` gives, in
exact arithmetic. With a token's latent ``c``, head h has the key ``[W_UK[h] c, k_rope]`` and the value
``W_UV[h] c``, so

    ``q_nope . (W_UK[h] c) = (W_UK[h]^T q_nope) . c``   and   ``sum p (W_UV[h] c) = W_UV[h] (sum p c)``:

the same attention with one shared row ``[c, k_rope]`` a token, whose first channels are also its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged_oracle.dtypes import Array, Float64, upcast


@dataclass(frozen=True, eq=False)
class AbsorbedWeights:
    """Up-projections turned into maps of queries and outputs; build it with `absorb`.

    Attributes:
        w_uk: (num_heads, nope_size, rank) float64: a head's key is ``w_uk @ latent``.
        w_uv: (num_heads, value_size, rank) float64: a head's value is ``w_uv @ latent``.
    """

    w_uk: Float64
    w_uv: Float64

    @property
    def v_head_size(self) -> int:
        """The rank: the operator's `v_head_size`, and its `rotary_offset`."""
        return int(self.w_uk.shape[2])

    def queries(self, nope: Array, rope: Array) -> Float64:
        """Return the operator's `query`.

        Args:
            nope: (tokens, num_heads, nope_size), the part that is not rotated.
            rope: (tokens, num_heads, rope_size).

        Returns:
            (tokens, num_heads * (rank + rope_size)) float64.
        """
        latent = np.einsum("thn,hnr->thr", upcast(nope), self.w_uk, optimize=True)
        rows = np.concatenate([latent, upcast(rope)], axis=-1)
        return rows.reshape(rows.shape[0], rows.shape[1] * rows.shape[2])

    def outputs(self, output: Array) -> Float64:
        """Return the model's attention output (tokens, num_heads, value_size) float64.

        Args:
            output: (tokens, num_heads * rank), the operator's output.
        """
        heads, _, rank = self.w_uv.shape
        latent = upcast(output).reshape(output.shape[0], heads, rank)
        model: Float64 = np.einsum("thr,hvr->thv", latent, self.w_uv, optimize=True)
        return model


def absorb(w_uk: Array, w_uv: Array) -> AbsorbedWeights:
    """Absorb the up-projections of a latent-attention layer.

    Args:
        w_uk: (num_heads, nope_size, rank).
        w_uv: (num_heads, value_size, rank).

    Raises:
        ValueError: the two do not have the same heads and rank.
    """
    if w_uk.ndim != 3 or w_uv.ndim != 3 or w_uk.shape[::2] != w_uv.shape[::2]:
        raise ValueError(
            f"w_uk {w_uk.shape} and w_uv {w_uv.shape} must be (heads, size, rank), heads and rank equal"
        )
    return AbsorbedWeights(upcast(w_uk), upcast(w_uv))


def decomposed_attention(
    nope: Array, rope: Array, latent: Array, key_rope: Array, w_uk: Array, w_uv: Array, *, scale: float
) -> Float64:
    """Causal multi-head attention with every head's keys and values written out, in float64.

    One sequence; the new tokens are the last of the context.

    Args:
        nope: (tokens, num_heads, nope_size), the query part that is not rotated.
        rope: (tokens, num_heads, rope_size), rotated.
        latent: (context, rank), the cached latents.
        key_rope: (context, rope_size), rotated, shared by all heads.
        w_uk: (num_heads, nope_size, rank).
        w_uv: (num_heads, value_size, rank).
        scale: logit multiplier.

    Returns:
        (tokens, num_heads, value_size) float64.

    Raises:
        ValueError: more tokens than the context holds.
    """
    if nope.shape[0] > latent.shape[0]:
        raise ValueError(f"{nope.shape[0]} tokens are more than the context of {latent.shape[0]}")
    keys = np.einsum("hnr,cr->hcn", upcast(w_uk), upcast(latent), optimize=True)
    values = np.einsum("hvr,cr->hcv", upcast(w_uv), upcast(latent), optimize=True)
    logits = np.einsum("thn,hcn->htc", upcast(nope), keys, optimize=True)
    logits += np.einsum("thr,cr->htc", upcast(rope), upcast(key_rope), optimize=True)
    tokens, context = logits.shape[1:]
    future = np.arange(context) > np.arange(context - tokens, context)[:, None]
    logits = np.where(future, -np.inf, logits * scale)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    output: Float64 = np.einsum("htc,hcv->thv", weights, values, optimize=True)
    return output

"""The operator on arrays.

Invariant: everything that can be refused is refused before the first write to a cache, and a call that fails
later, for want of memory say, puts back what it wrote.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from paged_oracle.backends import BACKENDS, COMMON, Backend, BackendName
from paged_oracle.dtypes import Array, DType, Float64, round_to
from paged_oracle.errors import UnusableOptionError
from paged_oracle.forward import Forward
from paged_oracle.prologue import Rounding
from paged_oracle.resolve import Attributes, BoundCall, Inputs, resolve
from paged_oracle.spread import spread
from paged_oracle.strict import require_defined
from paged_oracle.tiles import Tile, tiles


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
    attributes: Attributes,
    inputs: Inputs,
    *,
    rounding: Rounding = "ort",
    backend: BackendName | None = None,
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
    query rows (tokens times heads) against `tiles.KEY_CHUNK` positions, whatever the context. With ``rows =
    ROW_TILE + ROWS * kv_num_heads`` (see `tiles` and `product`) a tile takes ``8 * (rows * (3 * KEY_CHUNK +
    head_size + 3 * v_head_size) + 3 * KEY_CHUNK * kv_num_heads * head_size)`` bytes, 23 MB for 16 heads over
    one KV head at 576/512, on each of at most 8 threads.

    Args:
        attributes: the node's attributes, or a mapping of them.
        inputs: arrays by schema name; a missing name or None is an absent input. bfloat16 and float8e4m3fn
            are ml_dtypes arrays. `key_cache` and `value_cache` are updated in place.
        rounding: which arithmetic.
        backend: also make the roundings of one of ONNX Runtime's SEPARATE kernels (see `backends`); None
            makes only those that all of them share.
        ort: the ONNX Runtime release whose rules apply.
        extensions: things that ONNX Runtime has no kernel for, asked for by name; only ``"float32"`` exists.
        strict: refuse what ONNX Runtime leaves undefined, instead of masking or skipping it.

    Raises:
        paged_schema.InvalidArgument: a call that ONNX Runtime refuses, with the stage and the rule.
        paged_schema.NotImplementedMode: a call that it has no kernel for.
        UnusableArrayError: an input that is no plain NumPy array in native byte order, a cache that cannot be
            written, or a query whose width is no multiple of `num_heads` (before 1.31 only).
        UndefinedInputError: only with `strict`.
        UnusableOptionError: an unknown `rounding` or `backend`, or a backend with LATENT or ``"exact"``.
    """
    bound = resolve(attributes, inputs, ort, extensions)
    emulated = _emulated(bound, rounding, backend)
    if strict:
        require_defined(bound)
    num_heads, v_head_size = bound.call.num_heads, bound.v_head_size
    output = np.zeros((bound.tokens, num_heads, v_head_size), bound.arrays["query"].dtype)
    lse = np.full((bound.tokens, num_heads), -np.inf, np.float64 if rounding == "exact" else np.float32)
    forward = Forward.open(bound, emulated)
    with ExitStack() as undo, np.errstate(all="ignore"):
        query = forward.append(rounding, undo)

        def attend(tile: Tile) -> None:
            with np.errstate(all="ignore"):
                result, denominator = forward.attend(tile, query[tile.tokens])
                output[tile.tokens] = _rounded(result, output.dtype, rounding)
                lse[tile.tokens] = denominator

        spread(attend, tiles(bound.call, forward.sequences), num_heads)
        undo.pop_all()
    output[forward.sequences.idle] = 0
    lse[forward.sequences.idle] = -np.inf
    flat = output.reshape(bound.tokens, num_heads * v_head_size)
    return Outputs(flat, forward.keys.array, None if forward.values is None else forward.values.array, lse)


def _emulated(bound: BoundCall, rounding: Rounding, backend: BackendName | None) -> Backend:
    if rounding not in ("ort", "exact"):
        raise UnusableOptionError("rounding", rounding, "'ort' or 'exact'")
    if backend is None:
        return COMMON
    if backend not in BACKENDS:
        raise UnusableOptionError("backend", backend, f"one of {', '.join(BACKENDS)}, or None")
    if rounding != "ort" or bound.call.layout == "LATENT":
        raise UnusableOptionError("backend", backend, "None, except for SEPARATE with rounding='ort'")
    if bound.call.has_head_sink and not BACKENDS[backend].takes_sink:
        raise UnusableOptionError("backend", backend, "one that has a head sink")
    return BACKENDS[backend]


def _rounded(result: Float64, dtype: DType, rounding: Rounding) -> Array:
    # A kernel holds its result in float32 before it rounds to T: near a tie that is a rounding of its own.
    return round_to(result.astype(np.float32) if rounding == "ort" else result, dtype)

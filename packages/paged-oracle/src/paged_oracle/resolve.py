"""From arrays to a checked call.

Invariant: every call is checked by `paged_schema.check`; the verdict on the same attributes, types and shapes
is remembered, never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from paged_schema import Call, PagedAttentionAttributes, PagedAttentionInputs, RunValues, TensorSpec, check

from paged_oracle.dtypes import Array, name_of
from paged_oracle.errors import UnusableArrayError

Attributes = PagedAttentionAttributes | Mapping[str, Any]
Inputs = Mapping[str, Array | None]
_Signature = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, eq=False)
class BoundCall:
    """A checked call together with its arrays.

    Attributes:
        call: the checked call; with arrays at hand, all of its sizes are numbers.
        arrays: the inputs that are present, by schema name.
        head_size: channels of a query or key head.
        v_head_size: channels of an output head.
    """

    call: Call
    arrays: Mapping[str, Array]
    head_size: int
    v_head_size: int

    @property
    def tokens(self) -> int:
        """Rows of the query."""
        return int(self.arrays["query"].shape[0])

    @property
    def rotary_rows(self) -> int:
        """Positions that both rotary tables have; ONNX Runtime before 1.31 takes tables of unequal length."""
        return min(len(self.arrays[name]) for name in ("cos_cache", "sin_cache"))

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return int(self.arrays["key_cache"].shape[0])

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return int(self.arrays["key_cache"].shape[1])


def resolve(attributes: Attributes, inputs: Inputs, ort: str, extensions: frozenset[str]) -> BoundCall:
    """Check a call with its arrays.

    Raises:
        paged_schema.InvalidArgument: ONNX Runtime refuses the call.
        paged_schema.NotImplementedMode: ONNX Runtime has no kernel for it.
        UnusableArrayError: not a plain array in native byte order, a cache that is read-only, or a query that
            ONNX Runtime before 1.31 takes and misreads.
    """
    arrays = {name: array for name, array in inputs.items() if array is not None}
    _require_plain(arrays)
    signature = tuple((name, name_of(array.dtype), array.shape) for name, array in arrays.items())
    extensions = frozenset(extensions)
    attributes = PagedAttentionAttributes.model_validate(attributes)
    call = _checked(attributes, signature, ort, extensions, None, None)
    metadata, kv_tokens = _noteworthy(arrays)
    if metadata is not None or kv_tokens is not None:
        _checked(attributes, signature, ort, extensions, metadata, kv_tokens)
    _require_usable(call, arrays)
    if call.head_size is None or call.v_head_size is None:
        raise AssertionError("the shapes of arrays fix every size")
    return BoundCall(call, arrays, call.head_size, call.v_head_size)


def _require_plain(arrays: Mapping[str, Array]) -> None:
    for name, array in arrays.items():
        # A mask would be ignored, and a matrix keeps two dimensions whatever is done to it.
        if type(array) not in (np.ndarray, np.memmap):
            raise UnusableArrayError(name, type(array).__name__, "a plain NumPy array")
        if not array.dtype.isnative:
            raise UnusableArrayError(name, f"byte order {array.dtype.byteorder}", "this machine's own")


def _require_usable(call: Call, arrays: Mapping[str, Array]) -> None:
    for name in ("key_cache", "value_cache"):
        if name in arrays and not arrays[name].flags.writeable:
            raise UnusableArrayError(name, "a read-only array", "a writable one, as it is updated in place")
    width = arrays["query"].shape[1]
    if call.mode == "separate" and width % call.num_heads:
        # ONNX Runtime before 1.31 rounds the head size down, and then reads rows that it misplaces.
        raise UnusableArrayError("query", f"width {width}", f"a multiple of num_heads {call.num_heads}")


def _noteworthy(arrays: Mapping[str, Array]) -> tuple[tuple[int, ...] | None, int | None]:
    """Host values that a rule may object to; None for what every rule accepts, so that verdicts stay few."""
    metadata = None
    if "attention_metadata" in arrays:
        entries = tuple(int(entry) for entry in arrays["attention_metadata"].astype(np.int64))
        if min(entries) < 0 or len(entries) == 3:
            metadata = entries
    cumulative = arrays["cumulative_sequence_length"]
    kv_tokens = int(arrays["past_seqlens"].sum(dtype=np.int64)) + int(cumulative[-1]) - int(cumulative[0])
    return metadata, kv_tokens if kv_tokens <= 0 else None


@lru_cache(maxsize=4096)
def _checked(
    attributes: PagedAttentionAttributes,
    signature: _Signature,
    ort: str,
    extensions: frozenset[str],
    metadata: tuple[int, ...] | None,
    kv_tokens: int | None,
) -> Call:
    specs = {name: TensorSpec(dtype=dtype, shape=shape) for name, dtype, shape in signature}
    values = None
    if metadata is not None or kv_tokens is not None:
        values = RunValues(metadata=metadata, kv_tokens=kv_tokens)
    return check(
        attributes, PagedAttentionInputs.model_validate(specs), ort=ort, extensions=extensions, values=values
    )

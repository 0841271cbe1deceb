"""The operator's attributes, exactly as a node may carry them.

A value that ONNX cannot hold never becomes a `PagedAttentionAttributes`; a value that ONNX holds but the
operator refuses does, and `check` says which rule refuses it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from paged_schema.errors import InvalidArgument
from paged_schema.models import TypedModel

Kind = Literal["INT", "FLOAT", "STRING"]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

KINDS: Final[dict[str, str]] = {
    "num_heads": "INT",
    "kv_num_heads": "INT",
    "scale": "FLOAT",
    "softcap": "FLOAT",
    "local_window_size": "INT",
    "do_rotary": "INT",
    "rotary_interleaved": "INT",
    "qk_norm_epsilon": "FLOAT",
    "k_quant_type": "STRING",
    "v_quant_type": "STRING",
    "k_cache_dtype": "STRING",
    "v_cache_dtype": "STRING",
    "kv_cache_layout": "STRING",
    "v_head_size": "INT",
    "rotary_offset": "INT",
    "is_causal": "INT",
}
"""Every attribute and its ONNX kind; `is_causal` exists from ORT 1.30."""

REQUIRED_ATTRIBUTES: Final = ("num_heads", "kv_num_heads")
MALFORMED: Final = "MALFORMED"
"""Kind of an attribute that has no type, or data that its type does not name."""


class PagedAttentionAttributes(TypedModel):
    """The 16 attributes of `com.microsoft::PagedAttention` (15 before ORT 1.30).

    Integers are 64-bit as in the model file; floats are rounded to float32 by `check`, as ORT stores them.

    Attributes:
        num_heads: Query heads.
        kv_num_heads: Key/value heads; 1 for LATENT.
        scale: Logit multiplier. None or 0.0 means `1/sqrt(head_size)` on CUDA.
        softcap: Cap on the logits by tanh when above 0.
        local_window_size: Tokens seen to the left, the current one counted; 0 or less is unlimited.
        do_rotary: Rotary embedding when exactly 1.
        rotary_interleaved: Interleaved pairs when exactly 1, half-split otherwise.
        qk_norm_epsilon: Epsilon of the query/key RMS norm.
        k_quant_type: `NONE`, `PER_TENSOR` or `PER_CHANNEL`, in any case.
        v_quant_type: The same for values.
        k_cache_dtype: Logical element type of the key cache; empty derives it from the storage.
        v_cache_dtype: The same for the value cache.
        kv_cache_layout: `SEPARATE` or `LATENT`, in upper case.
        v_head_size: Value channels of a latent row; 0 is the head size.
        rotary_offset: First rotated channel of a head.
        is_causal: Causal mask when exactly 1; None is "not given".

    Raises:
        InvalidArgument: Missing (L01), of the wrong kind (L02), unknown (L03), or wider than 64 bits (A04).

    >>> PagedAttentionAttributes(num_heads=8, kv_num_heads=2).kv_cache_layout
    'SEPARATE'
    """

    num_heads: Int64
    kv_num_heads: Int64
    scale: float | None = None
    softcap: float | None = None
    local_window_size: Int64 = -1
    do_rotary: Int64 = 0
    rotary_interleaved: Int64 = 0
    qk_norm_epsilon: float = 1e-6
    k_quant_type: str = "NONE"
    v_quant_type: str = "NONE"
    k_cache_dtype: str = ""
    v_cache_dtype: str = ""
    kv_cache_layout: str = "SEPARATE"
    v_head_size: Int64 = 0
    rotary_offset: Int64 = 0
    is_causal: Int64 | None = None

    @classmethod
    def _refusal(cls, error: ValidationError) -> InvalidArgument:
        return _translate(error)

    @classmethod
    def _foreign(cls, name: object) -> InvalidArgument:
        return unknown_attribute(repr(name))


def _translate(error: ValidationError) -> InvalidArgument:
    found = {"extra_forbidden": [], "kind": [], "wide": [], "missing": []}  # type: dict[str, list[InvalidArgument]]
    for detail in error.errors(include_url=False):
        inner = detail.get("ctx", {}).get("error")
        if isinstance(inner, InvalidArgument):
            return inner
        name = str(detail["loc"][0]) if detail["loc"] else "attributes"
        given = detail["input"]
        if detail["type"] == "extra_forbidden":
            found["extra_forbidden"].append(unknown_attribute(name))
        elif detail["type"] == "missing":
            found["missing"].append(missing_attribute(name))
        elif detail["type"] in ("greater_than_equal", "less_than_equal") or (
            isinstance(given, int) and not isinstance(given, bool) and abs(given) >= 2**63
        ):
            fault = InvalidArgument(
                "load", "A04", name, given, "an integer of 64 bits, as ONNX stores it", "INVALID_GRAPH"
            )
            found["wide"].append(fault)
        else:
            kind = KINDS.get(name, "a mapping of attribute names to values")
            found["kind"].append(wrong_kind(name, type(given).__name__, kind))
    return next(faults[0] for faults in found.values() if faults)


def missing_attribute(name: str) -> InvalidArgument:
    """L01."""
    return InvalidArgument("load", "L01", name, "nothing", "the attribute is present", "INVALID_GRAPH")


def wrong_kind(name: str, got: str, kind: str) -> InvalidArgument:
    """L02."""
    return InvalidArgument("load", "L02", name, got, f"an attribute of kind {kind}", "INVALID_GRAPH")


def unknown_attribute(name: str) -> InvalidArgument:
    """L03."""
    return InvalidArgument(
        "load", "L03", name, "an unknown attribute", "a name of the schema", "INVALID_GRAPH"
    )

"""What is bound to the operator: element types and shapes, never data.

A dimension is a number, a symbol or unknown, as in an ONNX file. Nothing here judges them; `check` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from paged_schema.dtypes import UNDEFINED, canonical
from paged_schema.errors import InvalidArgument
from paged_schema.models import TypedModel

Dim = int | str | None
StoredDim = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | str | None

INPUT_NAMES: Final = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "slot_mapping",
    "head_sink",
    "q_norm_weight",
    "k_norm_weight",
    "k_scale",
    "v_scale",
    "attention_metadata",
)
OUTPUT_NAMES: Final = ("output", "key_cache_out", "value_cache_out")
REQUIRED_INPUTS: Final = ("query", "key_cache", "cumulative_sequence_length", "past_seqlens", "block_table")
MIN_INPUT_SLOTS: Final = 8


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class TensorSpec(TypedModel):
    """Element type and shape of one tensor.

    Attributes:
        dtype: ONNX name (`bfloat16`) or a short one (`bf16`); `undefined` when the type is not known.
        shape: One entry a dimension: an int, a symbol, or None for unknown. None when the rank is unknown.

    Raises:
        InvalidArgument: A01, when this is no type or no shape.

    >>> TensorSpec.parse("bf16[tokens, 576]")
    TensorSpec(dtype='bfloat16', shape=('tokens', 576))
    >>> TensorSpec.parse("i32[?]").shape, TensorSpec.parse("fp16").shape, TensorSpec.parse("f32[]").shape
    ((None,), None, ())
    """

    dtype: str
    shape: Annotated[tuple[StoredDim, ...] | None, BeforeValidator(_tuple)] = None

    def __init__(
        self, dtype: str = "", shape: tuple[Dim, ...] | list[Dim] | None = None, **extra: Any
    ) -> None:
        super().__init__(dtype=dtype, shape=shape, **extra)

    @classmethod
    def _refusal(cls, error: ValidationError) -> InvalidArgument:
        return _translate(error)

    @classmethod
    def _foreign(cls, name: object) -> InvalidArgument:
        return _unknown_name(repr(name))

    @field_validator("dtype", mode="after")
    @classmethod
    def _canonical(cls, name: str) -> str:
        found = canonical(name)
        if found is None:
            raise ValueError("not an ONNX element type")
        return found

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `dtype[dim, dim, …]`; `?` is an unknown dimension, no brackets an unknown rank."""
        head, bracket, tail = text.partition("[")
        tail = tail.rstrip()
        if bracket and not tail.endswith("]"):
            raise InvalidArgument(
                "load", "A01", "tensor", text, "text of the form dtype[dim, dim]", "INVALID_GRAPH"
            )
        if not bracket or tail == "*]":
            return cls(head.strip())
        inner = tail[:-1].strip()
        return cls(
            head.strip(), tuple(_dim(part.strip(), text) for part in inner.split(",")) if inner else ()
        )

    def __str__(self) -> str:
        if self.shape is None:
            return self.dtype
        return f"{self.dtype}[{', '.join('?' if dim is None else str(dim) for dim in self.shape)}]"


def _dim(part: str, text: str) -> Dim:
    if part == "?":
        return None
    digits = part.removeprefix("-")
    if digits.isascii() and digits.isdigit():
        if len(digits) > 19:
            raise InvalidArgument(
                "load", "A01", "tensor", text, "dimensions of at most 64 bits", "INVALID_GRAPH"
            )
        return int(part)
    if not part or "[" in part or "]" in part:
        raise InvalidArgument(
            "load", "A01", "tensor", text, "a number, a symbol or ? for each dimension", "INVALID_GRAPH"
        )
    return part


def _spec(value: object) -> object:
    if isinstance(value, str):
        return TensorSpec.parse(value)
    return TensorSpec.model_validate(value) if isinstance(value, Mapping) else value


Spec = Annotated[
    TensorSpec | None,
    # The text form is read as well, so the exported schema admits it too.
    BeforeValidator(_spec, json_schema_input_type=TensorSpec | str | None),
]


class _Slots(TypedModel):
    """Named slots, each a `TensorSpec`, its text, or None for absent."""

    def __init__(self, **data: Any) -> None:
        # A text is parsed here, and not by pydantic, so that its error is the one that the user sees.
        super().__init__(**{name: _spec(value) for name, value in data.items()})

    @classmethod
    def _refusal(cls, error: ValidationError) -> InvalidArgument:
        return _translate(error)

    @classmethod
    def _foreign(cls, name: object) -> InvalidArgument:
        return _unknown_name(repr(name))


class PagedAttentionInputs(_Slots):
    """The 17 inputs, by schema name. T is the element type of `query`; C that of the caches.

    Attributes:
        query: T (tokens, num_heads * head_size); packed, (tokens, (num_heads + 2 * kv_num_heads) *
            head_size).
        key: T (tokens, kv_num_heads * head_size); absent when packed.
        value: As `key`; absent when packed or LATENT.
        key_cache: C (num_blocks, block_size, kv_num_heads, head_size).
        value_cache: As `key_cache`; absent when LATENT.
        cumulative_sequence_length: int32 (batch + 1).
        past_seqlens: int32 (batch).
        block_table: int32 (batch, max_blocks).
        cos_cache: T (rows, rotary_dim / 2).
        sin_cache: T (rows, rotary_dim / 2).
        slot_mapping: int32 (tokens).
        head_sink: T (num_heads).
        q_norm_weight: T (head_size).
        k_norm_weight: T (head_size).
        k_scale: float32, one element or kv_num_heads * head_size.
        v_scale: As `k_scale`.
        attention_metadata: int32 (2), or (3) from ORT 1.30; in host memory.

    Raises:
        InvalidArgument: A01 for a text that is no tensor, A02 for a name that is no input.

    >>> PagedAttentionInputs(query="bf16[tokens, 512]").query.shape
    ('tokens', 512)
    """

    query: Spec = None
    key: Spec = None
    value: Spec = None
    key_cache: Spec = None
    value_cache: Spec = None
    cumulative_sequence_length: Spec = None
    past_seqlens: Spec = None
    block_table: Spec = None
    cos_cache: Spec = None
    sin_cache: Spec = None
    slot_mapping: Spec = None
    head_sink: Spec = None
    q_norm_weight: Spec = None
    k_norm_weight: Spec = None
    k_scale: Spec = None
    v_scale: Spec = None
    attention_metadata: Spec = None

    def slots(self) -> tuple[TensorSpec | None, ...]:
        """Return the 17 slots in schema order."""
        return tuple(self.__dict__.values())


class PagedAttentionOutputs(_Slots):
    """The declared outputs.

    Attributes:
        output: T (tokens, num_heads * v_head_size).
        key_cache_out: The key cache, in place.
        value_cache_out: The value cache, in place; no slot at all when LATENT.
        slot_count: How many output slots the node lists; an empty name still takes a slot. None counts up to
            the last named one.
    """

    output: Spec = Field(default_factory=lambda: TensorSpec(UNDEFINED))
    key_cache_out: Spec = None
    value_cache_out: Spec = None
    slot_count: int | None = Field(default=None, ge=0)

    def slots(self) -> tuple[TensorSpec | None, ...]:
        """Return the listed slots in schema order."""
        named = (self.output, self.key_cache_out, self.value_cache_out)
        last = max((index + 1 for index, spec in enumerate(named) if spec is not None), default=1)
        count = max(last, self.slot_count or 0)
        return named[:count] + (None,) * (count - len(named))


def _translate(error: ValidationError) -> InvalidArgument:
    detail = error.errors(include_url=False)[0]
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, InvalidArgument):
        return inner
    name = str(detail["loc"][0]) if detail["loc"] else "tensor"
    if detail["type"] == "extra_forbidden":
        return _unknown_name(name)
    return _no_tensor(name, detail["input"])


def _unknown_name(name: str) -> InvalidArgument:
    return InvalidArgument("load", "A02", name, "an unknown name", "a name of the schema", "INVALID_GRAPH")


def _no_tensor(name: str, given: object) -> InvalidArgument:
    needed = "an ONNX element type and a shape of numbers, symbols and unknowns"
    return InvalidArgument("load", "A01", name, given, needed, "INVALID_GRAPH")

"""Find every PagedAttention node of a model and say what the contract makes of it.

A node counts once for each place where it runs: once in its graph or subgraph, and once for each call of the
function that holds it, with the types and attribute values of that call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx
from onnx import ModelProto

from paged_schema.call import Call
from paged_schema.declaration import Declaration, check_declaration
from paged_schema.dtypes import UNDEFINED
from paged_schema.errors import InvalidArgument, NotImplementedMode, PagedSchemaError
from paged_schema.inputs import INPUT_NAMES, Dim, TensorSpec
from paged_schema.places import Place, places
from paged_schema.reader import read_model

Verdict = Literal["valid", "rejected", "not implemented"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One node and what was decided.

    Attributes:
        node: Name of the node, or its place in the graph.
        path: Graph, subgraph or function that holds it.
        verdict: The decision.
        error: Why it is not valid.
        call: What it resolves to, when it is valid.
        undeclared: Inputs without a type, which leave rules undecided.
    """

    node: str
    path: str
    verdict: Verdict
    error: PagedSchemaError | None = None
    call: Call | None = None
    undeclared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """Whose contract to audit by.

    Attributes:
        ort: ORT version.
        provider: Execution provider.
        sm: Compute capability as major * 10 + minor.
        bind: Sizes for symbols.
    """

    ort: str = "1.31"
    provider: str = "cuda"
    sm: int = 80
    bind: Mapping[str, int] = field(default_factory=dict)


def audit(path: Path, settings: Settings | None = None) -> tuple[Finding, ...]:
    """Audit a model file.

    Raises:
        UnreadableModel: The file is no ONNX model, or too large to audit.
    """
    return audit_model(read_model(path), settings or Settings())


def audit_model(model: ModelProto, settings: Settings) -> tuple[Finding, ...]:
    """Audit a model in memory; inputs without a declared type are inferred if ONNX can."""
    found = list(places(model))
    if any(_undeclared(place.declaration()) for place in found):
        found = list(places(_inferred(model)))
    return tuple(_judge(place, settings) for place in found)


def _judge(place: Place, settings: Settings) -> Finding:
    declaration = _bound(place.declaration(), settings.bind)
    undeclared = _undeclared(declaration)
    try:
        call = check_declaration(declaration, ort=settings.ort, provider=settings.provider, sm=settings.sm)
    except InvalidArgument as error:
        return Finding(place.name, place.path, "rejected", error, undeclared=undeclared)
    except NotImplementedMode as error:
        return Finding(place.name, place.path, "not implemented", error, undeclared=undeclared)
    return Finding(place.name, place.path, "valid", call=call, undeclared=undeclared)


def _undeclared(declaration: Declaration) -> tuple[str, ...]:
    named = zip(INPUT_NAMES, declaration.inputs, strict=False)
    return tuple(name for name, spec in named if spec is not None and spec.dtype == UNDEFINED)


def _inferred(model: ModelProto) -> ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model)
    except Exception:
        # Inference is a help, not a judge: whatever it trips over, the declared types still stand.
        return model


def _bound(declaration: Declaration, bind: Mapping[str, int]) -> Declaration:
    if not bind:
        return declaration
    return Declaration(
        declaration.attributes,
        tuple(_bound_spec(spec, bind) for spec in declaration.inputs),
        tuple(_bound_spec(spec, bind) for spec in declaration.outputs),
    )


def _bound_spec(spec: TensorSpec | None, bind: Mapping[str, int]) -> TensorSpec | None:
    if spec is None or spec.shape is None:
        return spec
    return TensorSpec(spec.dtype, tuple(_bound_dim(dim, bind) for dim in spec.shape))


def _bound_dim(dim: Dim, bind: Mapping[str, int]) -> Dim:
    if not isinstance(dim, str):
        return dim
    offset = re.fullmatch(r"(.+?)\s*([+-])\s*(\d{1,18})", dim)
    if dim in bind or offset is None or offset[1] not in bind:
        return bind.get(dim, dim)
    return bind[offset[1]] + int(offset[2] + offset[3])

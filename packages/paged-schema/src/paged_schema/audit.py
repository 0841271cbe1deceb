"""Find every PagedAttention node of a model and say what the contract makes of it.

A node counts once for each place where it runs: once in its graph or subgraph, and once for each call of the
function that holds it, with the types and attribute values of that call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, helper

from paged_schema.call import Call
from paged_schema.declaration import Declaration, check_declaration
from paged_schema.dtypes import UNDEFINED
from paged_schema.errors import InvalidArgument, NotImplementedMode, PagedSchemaError
from paged_schema.inputs import INPUT_NAMES, Dim, TensorSpec
from paged_schema.onnx import DOMAIN, OP_TYPE, declare
from paged_schema.reader import read_model

Verdict = Literal["valid", "rejected", "not implemented"]
Types = Mapping[str, TypeProto]
MAX_CALL_DEPTH: Final = 8


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
    places = list(_places(model))
    if any(_undeclared(place.declaration()) for place in places):
        places = list(_places(_inferred(model)))
    return tuple(_judge(place, settings) for place in places)


@dataclass(frozen=True, slots=True)
class _Place:
    node: NodeProto
    name: str
    path: str
    types: Types

    def declaration(self) -> Declaration:
        return declare(self.node, self.types)


def _judge(place: _Place, settings: Settings) -> Finding:
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


def _places(model: ModelProto) -> Iterator[_Place]:
    functions = {(function.domain, function.name): function for function in model.functions}
    called: set[tuple[str, str]] = set()
    yield from _in_graph(model.graph, {}, "graph", functions, called)
    for key, function in functions.items():
        if key not in called:
            yield from _in_function(function, None, {}, functions, called, 0)


def _in_graph(
    graph: GraphProto,
    outer: Types,
    path: str,
    functions: Mapping[tuple[str, str], FunctionProto],
    called: set[tuple[str, str]],
) -> Iterator[_Place]:
    types = {**outer, **_declared(graph)}
    yield from _in_nodes(graph.node, types, path, functions, called, 0)


def _in_nodes(
    nodes: Iterator[NodeProto],
    types: Types,
    path: str,
    functions: Mapping[tuple[str, str], FunctionProto],
    called: set[tuple[str, str]],
    depth: int,
) -> Iterator[_Place]:
    for index, node in enumerate(nodes):
        name = node.name or f"{node.op_type}[{index}]"
        if node.op_type == OP_TYPE and node.domain == DOMAIN:
            yield _Place(node, name, path, types)
            continue
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _in_graph(graph, types, f"{path}/{name}.{attribute.name}", functions, called)
        function = functions.get((node.domain, node.op_type))
        if function is not None and depth < MAX_CALL_DEPTH:
            called.add((node.domain, node.op_type))
            yield from _in_function(function, node, types, functions, called, depth + 1, f"{path}/{name}")


def _in_function(
    function: FunctionProto,
    caller: NodeProto | None,
    outer: Types,
    functions: Mapping[tuple[str, str], FunctionProto],
    called: set[tuple[str, str]],
    depth: int,
    path: str = "function",
) -> Iterator[_Place]:
    types = {info.name: info.type for info in function.value_info if info.HasField("type")}
    given: dict[str, AttributeProto] = {attribute.name: attribute for attribute in function.attribute_proto}
    if caller is not None:
        pairs = zip(function.input, caller.input, strict=False)
        types |= {inner: outer[name] for inner, name in pairs if name in outer}
        given |= {attribute.name: attribute for attribute in caller.attribute}
    nodes = (_with_attributes(node, given) for node in function.node)
    where = f"{path}:{function.domain}::{function.name}"
    yield from _in_nodes(nodes, types, where, functions, called, depth)


def _with_attributes(node: NodeProto, given: Mapping[str, AttributeProto]) -> NodeProto:
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    bound = NodeProto()
    bound.CopyFrom(node)
    del bound.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            bound.attribute.append(attribute)
        elif attribute.ref_attr_name in given:
            value = AttributeProto()
            value.CopyFrom(given[attribute.ref_attr_name])
            value.name = attribute.name
            bound.attribute.append(value)
    return bound


def _declared(graph: GraphProto) -> dict[str, TypeProto]:
    types = {
        tensor.name: helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        for tensor in graph.initializer
    }
    for infos in (graph.value_info, graph.output, graph.input):
        types |= {info.name: info.type for info in infos if info.HasField("type")}
    return types


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

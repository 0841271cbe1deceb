"""Where a model runs PagedAttention: in its graph, in subgraphs, and in functions, once for each call.

The walk is bounded, for calls of calls multiply: a recursion is not followed, and too many calls are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, helper

from paged_schema.declaration import Declaration
from paged_schema.errors import UnreadableModel
from paged_schema.onnx import DOMAIN, OP_TYPE, declare

Types = Mapping[str, TypeProto]
Attributes = Mapping[str, AttributeProto]
Key = tuple[str, str]
MAX_CALL_DEPTH: Final = 32
MAX_CALLS: Final = 50_000
"""Function calls that are followed: far more than real models make, and few enough to walk in seconds."""


@dataclass(frozen=True, slots=True)
class Place:
    """One node where it runs.

    Attributes:
        node: The node, with the attribute values of the call.
        name: Its name, or its type and index.
        path: Graph, subgraph or function that holds it.
        types: Type of each value in sight.
    """

    node: NodeProto
    name: str
    path: str
    types: Types

    def declaration(self) -> Declaration:
        """Read the node."""
        return declare(self.node, self.types)


def places(model: ModelProto) -> Iterator[Place]:
    """Find every node.

    Raises:
        UnreadableModel: The functions call each other too often.
    """
    search = _Search(model)
    yield from search.graph(model.graph, _Scope({}, {}, "graph", ()))
    for key, function in search.functions.items():
        if key not in search.called:
            yield from search.function(function, None, _Scope({}, {}, "function", ()))


@dataclass(frozen=True, slots=True)
class _Scope:
    types: Types
    given: Attributes  # what the call of the innermost function gives
    path: str
    active: tuple[Key, ...]  # functions being called, outermost first


class _Search:
    def __init__(self, model: ModelProto) -> None:
        self.functions = {(function.domain, function.name): function for function in model.functions}
        self.called: set[Key] = set()
        self.calls = 0

    def graph(self, graph: GraphProto, scope: _Scope) -> Iterator[Place]:
        yield from self._nodes(graph.node, replace(scope, types={**scope.types, **_declared(graph)}))

    def function(self, function: FunctionProto, caller: NodeProto | None, outer: _Scope) -> Iterator[Place]:
        types = {info.name: info.type for info in function.value_info if info.HasField("type")}
        given = {attribute.name: attribute for attribute in function.attribute_proto}
        if caller is not None:
            pairs = zip(function.input, caller.input, strict=False)
            types |= {inner: outer.types[name] for inner, name in pairs if name in outer.types}
            given |= {attribute.name: attribute for attribute in caller.attribute}
        key = (function.domain, function.name)
        path = f"{outer.path}:{function.domain}::{function.name}"
        yield from self._nodes(function.node, _Scope(types, given, path, (*outer.active, key)))

    def _nodes(self, nodes: Iterable[NodeProto], scope: _Scope) -> Iterator[Place]:
        for index, node in enumerate(nodes):
            name = node.name or f"{node.op_type}[{index}]"
            bound = _with_attributes(node, scope.given) if scope.active else node
            if (node.domain, node.op_type) == (DOMAIN, OP_TYPE):
                yield Place(bound, name, scope.path, scope.types)
                continue
            for attribute in bound.attribute:
                inner = replace(scope, path=f"{scope.path}/{name}.{attribute.name}")
                for graph in _graphs(attribute):
                    yield from self.graph(graph, inner)
            if self._follows((node.domain, node.op_type), scope):
                function = self.functions[node.domain, node.op_type]
                yield from self.function(function, bound, replace(scope, path=f"{scope.path}/{name}"))

    def _follows(self, key: Key, scope: _Scope) -> bool:
        if key not in self.functions or key in scope.active or len(scope.active) >= MAX_CALL_DEPTH:
            return False
        self.called.add(key)
        self.calls += 1
        if self.calls > MAX_CALLS:
            got = f"more than {MAX_CALLS} function calls"
            raise UnreadableModel("load", "F01", "functions", got, "a model that calls fewer", "FAIL")
        return True


def _graphs(attribute: AttributeProto) -> tuple[GraphProto, ...]:
    return (attribute.g, *attribute.graphs) if attribute.HasField("g") else tuple(attribute.graphs)


def _with_attributes(node: NodeProto, given: Attributes) -> NodeProto:
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

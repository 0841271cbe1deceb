"""The way to and from ONNX: a node or one-node model from a call, and a declaration from a node.

Needs the extra `paged-schema[onnx]`; nothing else in the package imports it.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TypeProto, ValueInfoProto, helper

from paged_schema.attributes import KINDS, MALFORMED, PagedAttentionAttributes, wrong_kind
from paged_schema.call import Call
from paged_schema.declaration import Attribute, AttributeValue, Declaration, output_names
from paged_schema.dtypes import NAME_OF_NUMBER, ONNX_NUMBER, UNDEFINED
from paged_schema.inputs import INPUT_NAMES, Dim, PagedAttentionInputs, PagedAttentionOutputs, TensorSpec

DOMAIN = "com.microsoft"
OP_TYPE = "PagedAttention"
OPSET = 21
IR_VERSION = 10


def declare(node: NodeProto, types: Mapping[str, TypeProto]) -> Declaration:
    """Read a node.

    Args:
        node: A PagedAttention node.
        types: Type of each value that the graph declares or infers, by name.

    Returns:
        What the node declares; a value without a type is `undefined`.
    """
    return Declaration(
        tuple(_attribute(attribute) for attribute in node.attribute),
        tuple(_spec(name, types) for name in node.input),
        tuple(_spec(name, types) for name in node.output),
    )


def attributes_of(node: NodeProto) -> PagedAttentionAttributes:
    """Read a node's attributes.

    Raises:
        InvalidArgument: Missing (L01), of another kind (L02) or unknown (L03).
    """
    listed = declare(node, {}).attributes
    for attribute in listed:
        if KINDS.get(attribute.name, attribute.kind) != attribute.kind:
            raise wrong_kind(attribute.name, attribute.kind, KINDS[attribute.name])
    return PagedAttentionAttributes.model_validate({attribute.name: attribute.value for attribute in listed})


def inputs_of(node: NodeProto, types: Mapping[str, TypeProto]) -> PagedAttentionInputs:
    """Read the types and shapes of a node's inputs; `types` as for `declare`."""
    return PagedAttentionInputs.model_validate(
        dict(zip(INPUT_NAMES, declare(node, types).inputs, strict=False))
    )


def make_node(call: Call | Declaration, *, name: str = "", prefix: str = "") -> NodeProto:
    """Make the node of a call.

    Args:
        call: A checked call, or a declaration.
        name: Name of the node.
        prefix: Put before every value's schema name.

    Returns:
        A node whose values bear the schema's names; the call's aliased cache outputs are listed.
    """
    declaration = call if isinstance(call, Declaration) else declaration_of(call)
    names = INPUT_NAMES + tuple(f"input_{i}" for i in range(len(INPUT_NAMES), len(declaration.inputs)))
    inputs = [prefix + n if spec else "" for n, spec in zip(names, declaration.inputs, strict=False)]
    outputs = [
        prefix + n if spec else ""
        for n, spec in zip(output_names(len(declaration.outputs)), declaration.outputs, strict=True)
    ]
    node = helper.make_node(OP_TYPE, inputs, outputs, name=name, domain=DOMAIN)
    node.attribute.extend(_attribute_proto(attribute) for attribute in declaration.attributes)
    return node


def make_model(call: Call | Declaration, *, name: str = "paged_attention") -> ModelProto:
    """Make a model of the one node, its inputs and outputs being those of the graph."""
    declaration = call if isinstance(call, Declaration) else declaration_of(call)
    node = make_node(declaration, name=name)
    graph = helper.make_graph(
        [node],
        name,
        [_value(n, spec) for n, spec in zip(node.input, declaration.inputs, strict=True) if spec],
        [_value(n, spec) for n, spec in zip(node.output, declaration.outputs, strict=True) if spec],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="paged-schema")


def declaration_of(call: Call) -> Declaration:
    """Declare the node of a call, with its aliased cache outputs."""
    width = None if call.v_head_size is None else call.num_heads * call.v_head_size
    cache = call.inputs.key_cache
    # ORT loads no cache output whose cache has no shape, and updates the cache without one.
    shaped = cache is not None and cache.shape is not None
    aliased = {name: getattr(call.inputs, source) for source, name in call.aliases if shaped}
    outputs = PagedAttentionOutputs(output=TensorSpec(call.dtype, (call.tokens, width)), **aliased)
    return Declaration.of(call.attributes, call.inputs, outputs)


_DATA_FIELDS = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}
_DATA = frozenset(_DATA_FIELDS.values())


def _attribute(proto: AttributeProto) -> Attribute:
    kind = AttributeProto.AttributeType.Name(proto.type)
    given = {field.name for field, _ in proto.ListFields()} & _DATA
    if not proto.HasField("type") or given - {_DATA_FIELDS.get(proto.type)}:
        kind = MALFORMED
    value: AttributeValue = None
    if kind == "INT":
        value = proto.i
    elif kind == "FLOAT":
        value = proto.f
    elif kind == "STRING":
        value = proto.s.decode("utf-8", errors="replace")
    return Attribute(proto.name, kind, value)


def _attribute_proto(attribute: Attribute) -> AttributeProto:
    proto = AttributeProto(name=attribute.name)
    if attribute.kind != MALFORMED:
        proto.type = AttributeProto.AttributeType.Value(attribute.kind)
    if isinstance(attribute.value, str):
        proto.s = attribute.value.encode()
    elif isinstance(attribute.value, float) or attribute.kind == "FLOAT":
        proto.f = attribute.value or 0.0
    elif isinstance(attribute.value, int):
        proto.i = attribute.value
    return proto


def _spec(name: str, types: Mapping[str, TypeProto]) -> TensorSpec | None:
    if not name:
        return None
    found = types.get(name)
    if found is None or not found.HasField("tensor_type"):
        return TensorSpec(UNDEFINED)
    tensor = found.tensor_type
    shape = tuple(_dim(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
    return TensorSpec(NAME_OF_NUMBER.get(tensor.elem_type, UNDEFINED), shape)


def _dim(proto: onnx.TensorShapeProto.Dimension) -> Dim:
    if proto.HasField("dim_value"):
        return proto.dim_value
    return proto.dim_param or None


def _value(name: str, spec: TensorSpec) -> ValueInfoProto:
    if spec.dtype == UNDEFINED:
        return ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, ONNX_NUMBER[spec.dtype], spec.shape)

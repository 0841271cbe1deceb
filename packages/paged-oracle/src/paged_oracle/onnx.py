"""The operator for `onnx.reference.ReferenceEvaluator`: whole models with PagedAttention nodes on a CPU.

Needs the extra `paged-oracle[onnx]`; nothing else in the package imports it.

Invariant: a cache output *is* the array that came in as the cache, updated, as ONNX Runtime demands of its
caller. Feed a cache as a writable array and keep it for the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from paged_schema import (
    INPUT_NAMES,
    InvalidArgument,
    NotImplementedMode,
    PagedAttentionAttributes,
    TensorSpec,
)
from paged_schema.declaration import Attribute, Declaration, check_declaration
from paged_schema.dtypes import UNDEFINED
from paged_schema.onnx import DOMAIN, OP_TYPE, declare

from paged_oracle.attention import paged_attention
from paged_oracle.dtypes import Array, name_of
from paged_oracle.prologue import Rounding


def evaluator(
    model: ModelProto,
    *,
    rounding: Rounding = "ort",
    ort: str = "1.31",
    extensions: frozenset[str] = frozenset(),
    strict: bool = False,
    new_ops: Iterable[type[OpRun]] = (),
) -> ReferenceEvaluator:
    """Load a model as ONNX Runtime would, for execution on a CPU.

    Args:
        model: the model. Nodes in its graphs and functions are checked with the types that it declares; what
            hangs on a type that it does not declare is checked when they run.
        rounding: as for `paged_attention`.
        ort: the ONNX Runtime release whose rules apply.
        extensions: as for `paged_attention`.
        strict: as for `paged_attention`.
        new_ops: further operators for the evaluator.

    Raises:
        paged_schema.InvalidArgument: a node that ONNX Runtime refuses, with the stage and the rule.
        paged_schema.NotImplementedMode: a node that it has no kernel for.
    """
    if model.functions:
        # Nodes inside model-local functions never see new_ops; inlined, they do.
        model = inline_local_functions(model)
    for declaration in _declarations(model.graph, {}):
        _load(declaration, ort, extensions)
    own = operator(rounding=rounding, ort=ort, extensions=extensions, strict=strict)
    return ReferenceEvaluator(model, new_ops=[own, *new_ops])


def operator(
    *,
    rounding: Rounding = "ort",
    ort: str = "1.31",
    extensions: frozenset[str] = frozenset(),
    strict: bool = False,
) -> type[OpRun]:
    """Return the operator's class for ``ReferenceEvaluator(model, new_ops=[...])``.

    Args:
        rounding: as for `paged_attention`.
        ort: the ONNX Runtime release whose rules apply.
        extensions: as for `paged_attention`.
        strict: as for `paged_attention`.
    """

    class PagedAttention(OpRun):
        op_domain = DOMAIN

        def _run(self, *inputs: Array | None, **given: Any) -> tuple[Array, ...]:
            # The evaluator hands float attributes over as NumPy scalars.
            attributes = {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items()}
            _check_slots(self.onnx_node, inputs, attributes, ort, extensions)
            outputs = paged_attention(
                PagedAttentionAttributes.model_validate(attributes),
                dict(zip(INPUT_NAMES, inputs, strict=False)),
                rounding=rounding,
                ort=ort,
                extensions=extensions,
                strict=strict,
            )
            caches = [cache for cache in (outputs.key_cache, outputs.value_cache) if cache is not None]
            return (outputs.output, *caches)[: len(self.onnx_node.output)]

        def run(self, *inputs: Array | None, **context: Any) -> tuple[Array | None, ...]:
            results: tuple[Array, ...] = super().run(*inputs, **context)  # type: ignore[no-untyped-call]
            # The evaluator files every result under its name, and reads the empty name as an absent input.
            named = zip(self.onnx_node.output, results, strict=False)
            return tuple(result if name else None for name, result in named)

    return PagedAttention


def _declarations(graph: GraphProto, outer: Mapping[str, TypeProto]) -> Iterator[Declaration]:
    types = {**outer, **_types(graph)}
    for node in graph.node:
        if node.domain == DOMAIN and node.op_type == OP_TYPE:
            yield declare(node, types)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _declarations(inner, types)


def _load(declaration: Declaration, ort: str, extensions: frozenset[str]) -> None:
    try:
        check_declaration(declaration, ort=ort, extensions=extensions)
    except (InvalidArgument, NotImplementedMode) as error:
        # ONNX Runtime makes a session of a node that can only fail when run, and infers what is not declared.
        named = zip(INPUT_NAMES, declaration.inputs, strict=False)
        inferred = {name for name, spec in named if spec is not None and spec.dtype == UNDEFINED}
        if error.stage in ("load", "build") and error.subject not in inferred:
            raise


def _check_slots(
    node: NodeProto,
    inputs: tuple[Array | None, ...],
    attributes: Mapping[str, float | int | str],
    ort: str,
    extensions: frozenset[str],
) -> None:
    """Check what only a node has: its number of slots, and which outputs it names."""
    specs = [None if x is None else TensorSpec(name_of(x.dtype), x.shape) for x in inputs]
    outputs = [TensorSpec(UNDEFINED) if name else None for name in node.output]
    listed = tuple(Attribute(name, _kind(value), value) for name, value in attributes.items())
    declaration = Declaration(listed, tuple(specs), tuple(outputs))
    check_declaration(declaration, ort=ort, extensions=extensions)


def _kind(value: float | int | str) -> str:
    return {float: "FLOAT", int: "INT", str: "STRING"}.get(type(value), "another kind")


def _types(graph: GraphProto) -> dict[str, TypeProto]:
    types = {value.name: value.type for value in (*graph.output, *graph.value_info, *graph.input)}
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types


PagedAttention = operator()
"""The operator with the default options."""

__all__ = ["PagedAttention", "evaluator", "operator"]

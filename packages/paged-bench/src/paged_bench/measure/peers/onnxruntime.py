"""ONNX Runtime's own CUDA operator, by I/O binding over the same arrays.

It cannot leave out rotary and the cache write; the node gets no rotary here, and writes the rows that are
there already. It cannot be captured by us either, so its times are eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from paged_cuda import DeviceArray

from paged_bench.measure.bench import Bench, Launch
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.peers.base import PeerCalls, Unsuitable, module, refuse
from paged_bench.measure.step import SCALE
from paged_bench.measure.suite import CaseSpec

_SLOWEST_OPERATIONS = 1e12  # it computes about one TFLOP/s; above, a call takes seconds
_INPUTS = ("query", "key", "", "key_cache", "", "cumulative_sequence_length", "past_seqlens", "block_table")


class OnnxRuntime:
    """`com.microsoft::PagedAttention` of the CUDA execution provider."""

    name = "ort"
    title = "ONNX Runtime"
    modules = ("onnx", "onnxruntime")
    distribution = "onnxruntime-gpu"

    def prepare(self, bench: Bench, spec: CaseSpec, sets: Sequence[InputSet]) -> PeerCalls:
        """Build a model of the one node, and bind every set."""
        refuse(
            (spec.layers > 1, "stacks are measured for the operator alone"),
            (spec.work.operations > _SLOWEST_OPERATIONS, "takes seconds a call at this size"),
        )
        runtime = module("onnxruntime")
        if "CUDAExecutionProvider" not in runtime.get_available_providers():
            raise Unsuitable("this onnxruntime has no CUDA provider")
        provider = ("CUDAExecutionProvider", {"user_compute_stream": str(bench.stream.handle)})
        session = runtime.InferenceSession(_model(spec), providers=[provider])
        launches = []
        for inputs in sets:
            binding = _bound(session, spec, inputs)
            launches.append(_launch(session, binding))
        bench.launch(launches[0])
        bench.stream.synchronize()
        return PeerCalls(launches, sets[0].output, None)


def _launch(session: Any, binding: Any) -> Launch:
    def run(stream: int) -> None:
        session.run_with_iobinding(binding)

    return run


def _model(spec: CaseSpec) -> bytes:
    helper, kinds = module("onnx.helper"), module("onnx").TensorProto
    element = kinds.BFLOAT16 if spec.dtype == "bfloat16" else kinds.FLOAT16
    optional = ["", "", "slot_mapping"]  # no rotary tables
    names = [*_INPUTS, *optional]
    node = helper.make_node(
        "PagedAttention",
        names,
        ["output", "key_cache_out"],
        domain="com.microsoft",
        num_heads=spec.heads,
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=spec.v_head_size,
        scale=float(np.float32(SCALE)),
    )
    floats = {"query", "key", "key_cache", "output", "key_cache_out"}
    ranks = {"query": 2, "key": 2, "key_cache": 4, "block_table": 2, "output": 2, "key_cache_out": 4}

    def value(name: str) -> Any:
        kind = element if name in floats else kinds.INT32
        return helper.make_tensor_value_info(name, kind, [None] * ranks.get(name, 1))

    graph = helper.make_graph(
        [node], "step", [value(name) for name in names if name], [value("output"), value("key_cache_out")]
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    data: bytes = model.SerializeToString()
    return data


def _bound(session: Any, spec: CaseSpec, inputs: InputSet) -> Any:
    kinds = module("onnx").TensorProto
    element = kinds.BFLOAT16 if spec.dtype == "bfloat16" else kinds.FLOAT16
    binding = session.io_binding()

    def bind(method: Any, name: str, array: DeviceArray) -> None:
        kind = kinds.INT32 if array.dtype == "int32" else element
        method(name, "cuda", array.ordinal, kind, list(array.shape), array.pointer)

    for name in (*(name for name in _INPUTS if name), "slot_mapping"):
        bind(binding.bind_input, name, inputs.arrays[name])
    bind(binding.bind_output, "output", inputs.output)
    bind(binding.bind_output, "key_cache_out", inputs.arrays["key_cache"])
    return binding

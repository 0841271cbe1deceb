"""Attention by the CUDA op; caches, rotary tables and the index plan stay on the device.

The model around it runs on the host, so a call copies one block's queries and keys to the device and
its output back. One prepared op serves every block: they differ only in the caches they are given.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from paged_cuda import Bounds, Device, DeviceArray, DeviceIndexPlan, PagedAttention, Stream
from paged_kv import PagedIndexPlan
from paged_schema import Call, Capability, PagedAttentionInputs, TensorSpec, check, require

from paged_bench.demo.backend import NUMPY_DTYPES, Array, BackendSpec, cast


def cuda_call(spec: BackendSpec) -> Call:
    """The checked call of one block, with symbolic batch and token counts.

    Raises:
        NotImplementedMode: The CUDA op has no kernel for it.
    """
    attributes, layout = spec.layout.attributes, spec.layout
    kv_width = layout.row[0] * layout.row[1]
    tables = TensorSpec(spec.dtype, layout.tables(spec.cos, spec.sin)[0].shape)
    cache = TensorSpec(spec.dtype, spec.cache_shape)
    has_values = layout.has_value_cache
    inputs = PagedAttentionInputs(
        query=TensorSpec(spec.dtype, ("tokens", attributes.num_heads * layout.row[1])),
        key=TensorSpec(spec.dtype, ("tokens", kv_width)),
        value=TensorSpec(spec.dtype, ("tokens", kv_width)) if has_values else None,
        key_cache=cache,
        value_cache=cache if has_values else None,
        cumulative_sequence_length=TensorSpec.parse("int32[offsets]"),
        past_seqlens=TensorSpec.parse("int32[batch]"),
        block_table=TensorSpec.parse("int32[batch, columns]"),
        cos_cache=tables,
        sin_cache=tables,
        slot_mapping=TensorSpec.parse("int32[tokens]"),
        attention_metadata=TensorSpec.parse("int32[3]"),
    )
    call = check(attributes, inputs, provider="cuda")
    require(call, Capability.paged_cuda())
    return call


class CudaBackend:
    """Runs `paged_cuda.PagedAttention` on one GPU.

    Args:
        spec: What to build the caches for.
        call: What `cuda_call` made of it.
        device: A GPU, its ordinal, or None for the current one.

    Raises:
        PagedCudaError: No driver, no memory, or kernels that cannot be compiled.
    """

    name = "cuda"

    def __init__(self, spec: BackendSpec, call: Call, device: Device | int | None = None) -> None:
        self._layout = spec.layout
        self._dtype = NUMPY_DTYPES[spec.dtype]
        self._output_width = spec.layout.attributes.num_heads * (call.v_head_size or spec.layout.row[1])
        self._stream = Stream(device)
        bounds = Bounds(spec.max_sequences, spec.max_tokens, spec.max_context)
        self._op = PagedAttention(call, bounds, device=device)
        self._op.prepare()
        self._plan = DeviceIndexPlan(bounds, spec.geometry.block_size, device=device)
        self._cos, self._sin = (self._upload(table) for table in spec.layout.tables(spec.cos, spec.sin))
        empty = np.zeros(spec.cache_shape, np.float32)
        self._caches = [self._upload(empty) for _ in range(spec.layers)]

    @property
    def device(self) -> str:
        """The GPU's name."""
        return self._stream.device.properties.name

    def begin(self, plan: PagedIndexPlan) -> None:
        """Copy the step's plan to its fixed device addresses."""
        self._plan.upload(plan, self._stream)

    def attend(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        """Copy one block's operands over, run the op, and copy its output back."""
        operands = self._layout.operands(query, key, value)
        output = DeviceArray.empty((len(query), self._output_width), self._dtype.name, self._stream.device)
        self._op.run(
            query=self._upload(operands.query),
            key=self._upload(operands.key),
            key_cache=self._caches[layer],
            plan=self._plan,
            cos_cache=self._cos,
            sin_cache=self._sin,
            output=output,
            key_cache_out=self._caches[layer],
            stream=self._stream,
        )
        host: NDArray[np.generic] = output.to_numpy(self._stream)
        return self._layout.heads(host.astype(np.float32))

    def _upload(self, array: Array) -> DeviceArray:
        return DeviceArray.from_numpy(cast(array, self._dtype), self._stream, self._stream.device)

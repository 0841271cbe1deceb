"""One graph over all layers of a large cache, and the same launches over fresh allocations beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from paged_cuda import CapturedGraph, DeviceArray, Stream

from paged_bench.residency.kernel import Params, launcher, load_kernel
from paged_bench.residency.probe import Outputs
from paged_bench.residency.reader import Access, Rows
from paged_bench.residency.shapes import ELEMENT_SIZE, KvShape

GROUP = 5  # qwen2.5-14b has 40 query heads on 8 key-value heads
_SHIFT = 7


class CudaProbe:
    """Attends over every layer of one sequence's cache.

    Args:
        shape: Whose cache it is.
        tokens: Most tokens that are ever in it.
        stream: Where everything is queued.
    """

    def __init__(self, shape: KvShape, tokens: int, stream: Stream) -> None:
        self._shape, self._stream = shape, stream
        device = stream.device
        rng = np.random.default_rng(14)
        heads = shape.kv_heads * GROUP

        def upload(values: NDArray[np.generic]) -> DeviceArray:
            return DeviceArray.from_numpy(values, stream, device)

        row = (1, shape.kv_heads, shape.head_dim)
        self._query = upload(rng.standard_normal((1, heads, shape.head_dim)).astype(np.float32))
        self._key, self._value = (upload(rng.standard_normal(row).astype(np.float16)) for _ in range(2))
        self._extent = upload(np.array([0, 1], np.int32))
        self._outputs = [
            DeviceArray.empty((heads, shape.head_dim), "float32", device) for _ in range(shape.layers)
        ]
        self._function = load_kernel(device, shape.head_dim)
        # Every binding reads these rows from a place of its own.
        extents = (tokens + _SHIFT * 2 * shape.layers, shape.kv_heads, shape.head_dim)
        self._rows = rng.standard_normal(extents, np.float32).astype(np.float16)
        self._graph: CapturedGraph | None = None

    def fill(self, layers: Sequence[Rows], first: int, end: int) -> None:
        """As `Probe.fill`."""
        for binding, (address, rows) in enumerate(_bindings(layers)):
            values = self._values(binding, first, end)
            start = address + ELEMENT_SIZE * first * rows.token_stride
            if rows.head_stride == self._shape.head_dim:
                self._copy_in(start, values)
                continue
            for head in range(self._shape.kv_heads):
                self._copy_in(start + ELEMENT_SIZE * head * rows.head_stride, values[:, head])

    def run(self, layers: Sequence[Rows], access: Access, past: int) -> Outputs:
        """As `Probe.run`."""
        self._copy_in(self._extent.pointer, np.array([past, 1], np.int32))
        if access is Access.CAPTURE:
            self.close()
            with CapturedGraph(self._stream) as graph:
                self._launch(layers)
            self._graph = graph
        if access is Access.LAUNCH or self._graph is None:
            self._launch(layers)
        else:
            self._graph.replay()
        return self._read()

    def fresh(self, past: int) -> Outputs:
        """As `Probe.fresh`."""
        shape, device = self._shape, self._stream.device
        extents = (past + 1, shape.kv_heads, shape.head_dim)
        buffers = [DeviceArray.empty(extents, "float16", device) for _ in range(2 * shape.layers)]
        for binding, buffer in enumerate(buffers):
            self._copy_in(buffer.pointer, self._values(binding, 0, past))
        pairs = zip(buffers[::2], buffers[1::2], strict=True)
        strides = (shape.kv_heads * shape.head_dim, shape.head_dim)
        self._launch(
            [Rows(layer, key.pointer, value.pointer, *strides) for layer, (key, value) in enumerate(pairs)]
        )
        return self._read()

    def close(self) -> None:
        """Destroy the graph."""
        self._stream.synchronize()
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _values(self, binding: int, first: int, end: int) -> NDArray[np.float16]:
        start = binding * _SHIFT
        return self._rows[start + first : start + end]

    def _read(self) -> Outputs:
        return [output.to_numpy(self._stream) for output in self._outputs]

    def _launch(self, layers: Sequence[Rows]) -> None:
        device = self._stream.device
        with device:
            for rows, output in zip(layers, self._outputs, strict=True):
                params = Params(
                    query=self._query.pointer,
                    key=self._key.pointer,
                    value=self._value.pointer,
                    key_cache=rows.key_address,
                    value_cache=rows.value_address,
                    output=output.pointer,
                    extent=self._extent.pointer,
                    token_stride=rows.token_stride,
                    head_stride=rows.head_stride,
                    group=GROUP,
                    scale=self._shape.head_dim**-0.5,
                )
                launcher(device, self._function, self._shape.kv_heads, params)(self._stream.handle)

    def _copy_in(self, pointer: int, values: NDArray[np.generic]) -> None:
        source = np.ascontiguousarray(values)
        with self._stream.device as device:
            device.driver.copy_to_device(pointer, source.ctypes.data, source.nbytes, self._stream.handle)
            device.driver.synchronize(self._stream.handle)


def _bindings(layers: Sequence[Rows]) -> list[tuple[int, Rows]]:
    """Keys and values of layer after layer."""
    return [(address, rows) for rows in layers for address in (rows.key_address, rows.value_address)]

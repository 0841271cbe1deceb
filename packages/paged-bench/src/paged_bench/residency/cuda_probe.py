"""One graph over all layers of a large cache, and the same launches over a fresh allocation beside it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from paged_cuda import CapturedGraph, DeviceArray, Stream
from paged_cuda._driver import Launcher

from paged_bench.residency.kernel import Params, launcher, load_kernel
from paged_bench.residency.probe import Outputs
from paged_bench.residency.reader import Access
from paged_bench.residency.shapes import ELEMENT_SIZE, KvShape

GROUP = 5  # qwen2.5-14b has 40 query heads on 8 key-value heads
_SHIFT = 7


class CudaProbe:
    """Attends over every layer of a sequence-major cache, with random rows.

    Args:
        shape: Whose cache it is.
        addresses: First byte of each binding: keys and values of layer after layer.
        stream: Where everything is queued.
    """

    def __init__(self, shape: KvShape, addresses: list[int], stream: Stream) -> None:
        self._shape, self._addresses, self._stream = shape, addresses, stream
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
        self._rows = rng.standard_normal(
            (shape.capacity + _SHIFT * len(addresses), shape.kv_heads * shape.head_dim), np.float32
        ).astype(np.float16)
        self._graph: CapturedGraph | None = None

    def fill(self, first: int, end: int) -> None:
        """Write random rows for the tokens [first, end) of every binding."""
        token = self._rows.shape[1] * ELEMENT_SIZE
        for binding, address in enumerate(self._addresses):
            start = binding * _SHIFT
            rows = self._rows[start + first : start + end]
            self._copy_in(address + first * token, rows)

    def run(self, access: Access, past: int) -> Outputs:
        """Append one token to every binding, attend, and return each layer's output."""
        self._copy_in(self._extent.pointer, np.array([past, 1], np.int32))
        if access is Access.CAPTURE:
            with CapturedGraph(self._stream) as graph:
                self._launch(self._addresses)
            self._graph = graph
        if access is Access.LAUNCH or self._graph is None:
            self._launch(self._addresses)
        else:
            self._graph.replay()
        return [output.to_numpy(self._stream) for output in self._outputs]

    def fresh(self, past: int) -> Outputs:
        """The same over ordinary allocations that hold a copy of the rows."""
        nbytes = (past + 1) * self._rows.shape[1] * ELEMENT_SIZE
        device = self._stream.device
        copies = [DeviceArray.empty((nbytes,), "uint8", device) for _ in self._addresses]
        with device:
            for copy, address in zip(copies, self._addresses, strict=True):
                device.driver.copy_on_device(copy.pointer, address, nbytes, self._stream.handle)
        self._launch([copy.pointer for copy in copies])
        return [output.to_numpy(self._stream) for output in self._outputs]

    def close(self) -> None:
        """Destroy the graph."""
        self._stream.synchronize()
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _launch(self, addresses: list[int]) -> None:
        with self._stream.device:
            for layer in range(self._shape.layers):
                self._launcher(layer, *addresses[2 * layer : 2 * layer + 2])(self._stream.handle)

    def _launcher(self, layer: int, key: int, value: int) -> Launcher:
        params = Params(
            query=self._query.pointer,
            key=self._key.pointer,
            value=self._value.pointer,
            key_cache=key,
            value_cache=value,
            output=self._outputs[layer].pointer,
            extent=self._extent.pointer,
            token_stride=self._shape.kv_heads * self._shape.head_dim,
            head_stride=self._shape.head_dim,
            group=GROUP,
            scale=self._shape.head_dim**-0.5,
        )
        return launcher(self._stream.device, self._function, self._shape.kv_heads, params)

    def _copy_in(self, pointer: int, values: NDArray[np.generic]) -> None:
        source = np.ascontiguousarray(values)
        with self._stream.device as device:
            device.driver.copy_to_device(pointer, source.ctypes.data, source.nbytes, self._stream.handle)
            device.driver.synchronize(self._stream.handle)

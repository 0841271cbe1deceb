"""The model's attention over a cache on a GPU, launched or replayed from a graph that the growth may keep.

A layer's launch is a graph of its own, since the rest of the model runs on the host between two layers; a
step that captures makes one for each layer, and counts as one capture.
"""

from __future__ import annotations

import numpy as np
from paged_cuda import CapturedGraph, DeviceArray, Stream

from paged_bench.residency.attention import Array, Half
from paged_bench.residency.kernel import Params, launcher
from paged_bench.residency.reader import Access, Rows


class CudaReader:
    """Launches `contiguous_decode` for one sequence.

    Args:
        function: What `load_kernel` returned.
        stream: Where everything is queued.
        kv_heads: Key-value heads in the cache.
        group: Query heads of each.
        head_size: Channels of a head.
        max_tokens: Most new tokens of a step.
    """

    def __init__(
        self, function: int, stream: Stream, *, kv_heads: int, group: int, head_size: int, max_tokens: int
    ) -> None:
        self._stream, self._device = stream, stream.device
        self._heads, self._kv_heads, self._head_size = kv_heads * group, kv_heads, head_size
        self._graphs: dict[int, CapturedGraph] = {}
        row = (max_tokens, kv_heads, head_size)
        self._query = DeviceArray.empty((max_tokens, self._heads, head_size), "float32", self._device)
        self._output = DeviceArray.empty((max_tokens, self._heads, head_size), "float32", self._device)
        self._key = DeviceArray.empty(row, "float16", self._device)
        self._value = DeviceArray.empty(row, "float16", self._device)
        self._extent = DeviceArray.empty((2,), "int32", self._device)
        self._params = Params(
            query=self._query.pointer,
            key=self._key.pointer,
            value=self._value.pointer,
            output=self._output.pointer,
            extent=self._extent.pointer,
            group=group,
            scale=head_size**-0.5,
        )
        self._launch = launcher(self._device, function, kv_heads, self._params)

    def begin(self, past: int, tokens: int) -> None:
        """Put the step's lengths where every launch and replay reads them."""
        self._upload(self._extent, np.array([past, tokens], np.int32))

    def attend(self, rows: Rows, access: Access, query: Array, key: Half, value: Half, past: int) -> Array:
        """As `paged_bench.residency.reader.Reader`."""
        self._upload(self._query, query)
        self._upload(self._key, key)
        self._upload(self._value, value)
        if access is Access.CAPTURE:
            self._capture(rows)
        if access is Access.LAUNCH:
            with self._device:
                self._set(rows)
                self._launch(self._stream.handle)
        else:
            self._graphs[rows.layer].replay()
        return self._download(len(query))

    def close(self) -> None:
        """Destroy the graphs; the stream must be idle."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _capture(self, rows: Rows) -> None:
        old = self._graphs.pop(rows.layer, None)
        if old is not None:
            old.close()
        self._set(rows)
        with CapturedGraph(self._stream) as graph, self._device:
            self._launch(self._stream.handle)
        self._graphs[rows.layer] = graph

    def _set(self, rows: Rows) -> None:
        self._params.key_cache, self._params.value_cache = rows.key_address, rows.value_address
        self._params.token_stride, self._params.head_stride = rows.token_stride, rows.head_stride

    def _upload(self, target: DeviceArray, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        source = np.ascontiguousarray(values)
        with self._device as device:
            device.driver.copy_to_device(
                target.pointer, source.ctypes.data, source.nbytes, self._stream.handle
            )

    def _download(self, tokens: int) -> Array:
        host = np.empty((tokens, self._heads, self._head_size), np.float32)
        with self._device as device:
            device.driver.copy_to_host(
                host.ctypes.data, self._output.pointer, host.nbytes, self._stream.handle
            )
            device.driver.synchronize(self._stream.handle)
        return host

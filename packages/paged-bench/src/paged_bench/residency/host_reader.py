"""The model's attention over a cache in the fake driver's memory: only committed bytes can be touched."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided
from paged_kv.vmm import FakeVmmDriver

from paged_bench.residency.attention import Array, Half, attend
from paged_bench.residency.reader import Access, Rows


class HostReader:
    """Reads and writes bindings as NumPy views.

    Args:
        driver: A fake driver that is backed by memory.
        stream: What captures; the driver then refuses whatever maps or fills.
        scale: Factor of the scores.
    """

    def __init__(self, driver: FakeVmmDriver, stream: int, scale: float) -> None:
        self._driver = driver
        self._stream = stream
        self._scale = scale

    def begin(self, past: int, tokens: int) -> None:
        """Nothing is prepared for a step."""

    def attend(self, rows: Rows, access: Access, query: Array, key: Half, value: Half, past: int) -> Array:
        """As `paged_bench.residency.reader.Reader`; a replay runs the same code again."""
        if access is not Access.CAPTURE:
            return self._attend(rows, query, key, value, past)
        self._driver.begin_capture(self._stream)
        try:
            return self._attend(rows, query, key, value, past)
        finally:
            self._driver.end_capture(self._stream)

    def close(self) -> None:
        """Nothing is held."""

    def _attend(self, rows: Rows, query: Array, key: Half, value: Half, past: int) -> Array:
        length, kv_heads = past + len(query), key.shape[1]
        cached = []
        for address, new in ((rows.key_address, key), (rows.value_address, value)):
            heads = [self._head(address, rows, head, length, key.shape[2]) for head in range(kv_heads)]
            for head, view in enumerate(heads):
                view[past:] = new[:, head]
            cached.append(np.stack(heads))
        return attend(query, cached[0], cached[1], past, self._scale)

    def _head(self, address: int, rows: Rows, head: int, length: int, width: int) -> Half:
        """The first rows of a head, (length, width), over the cache's own bytes."""
        nbytes = 2 * ((length - 1) * rows.token_stride + width)
        data = self._driver.view(address + 2 * head * rows.head_stride, nbytes).view(np.float16)
        view: Half = as_strided(data, (length, width), (2 * rows.token_stride, 2))
        return view

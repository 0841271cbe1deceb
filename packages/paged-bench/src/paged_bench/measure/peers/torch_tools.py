"""What the peers that speak torch share: views of our arrays, a stream, a graph."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from paged_cuda import DeviceArray
from paged_cuda.views import device_view

from paged_bench.measure.bench import Bench, Launch
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.peers.base import module
from paged_bench.measure.suite import CaseSpec
from paged_bench.measure.timing import Replayable, Timer
from paged_bench.record import Ceiling

_SQUARE = 8192
Tensor = Any  # torch is never a dependency, so its types are not known here


class TorchStream:
    """The bench's stream as torch's current one.

    Args:
        bench: The instruments.
    """

    def __init__(self, bench: Bench) -> None:
        self.torch = module("torch")
        self.torch.cuda.set_device(bench.device.ordinal)
        self.stream = self.torch.cuda.ExternalStream(bench.stream.handle)

    def view(self, array: DeviceArray) -> Tensor:
        """Return the array as a tensor over the same memory."""
        return self.torch.from_dlpack(array)

    def launch(self, call: Callable[[], object]) -> Launch:
        """Return `call` as a launch in the bench's stream."""

        def run(stream: int) -> None:
            with self.torch.cuda.stream(self.stream):
                call()

        return run

    def capture(self, launches: Sequence[Launch]) -> Replayable:
        """Record launches into torch's graph, which has memory of its own."""
        graph = self.torch.cuda.CUDAGraph()
        self.stream.synchronize()
        with self.torch.cuda.graph(graph, stream=self.stream):
            for launch in launches:
                launch(self.stream.cuda_stream)
        return _OnStream(self.torch, self.stream, graph)

    def output(self, tensor: Tensor, spec: CaseSpec) -> DeviceArray:
        """Return a peer's output as our array, (tokens, heads * v_head_size)."""
        flat = tensor.reshape(spec.tokens, spec.heads * spec.v_head_size).contiguous()
        return device_view(flat, "output")


class _OnStream:
    def __init__(self, torch: Any, stream: Any, graph: Any) -> None:
        self._torch = torch
        self._stream = stream
        self._graph = graph

    def replay(self) -> None:
        with self._torch.cuda.stream(self._stream):
            self._graph.replay()


def gathered(stream: TorchStream, spec: CaseSpec, inputs: InputSet) -> Tensor:
    """Return the rows of all sequences, which are equally long, (batch, context, head_size)."""
    cache, table = (stream.view(inputs.arrays[name]) for name in ("key_cache", "block_table"))
    with stream.torch.cuda.stream(stream.stream):
        rows = cache[table.long()].reshape(spec.batch, -1, spec.head_size)
        return rows[:, : spec.context_lens[0]].contiguous()


def folded_query(stream: TorchStream, spec: CaseSpec, inputs: InputSet) -> Tensor:
    """Return the query for dense attention: (batch, 1, heads, D) of one token, or (1, heads, tokens, D)."""
    query = stream.view(inputs.arrays["query"])
    if spec.group == "prefill":
        return query.view(spec.tokens, spec.heads, spec.head_size).transpose(0, 1)[None]
    return query.view(spec.batch, 1, spec.heads, spec.head_size)


def unfolded(spec: CaseSpec, output: Tensor) -> Tensor:
    """Return dense attention's output with tokens first."""
    return output[0].transpose(0, 1) if spec.group == "prefill" else output


def torch_matmul(bench: Bench, dtype: str) -> Ceiling:
    """Return the rate of torch's product of two 8192 x 8192 matrices, beside that of our own kernel."""
    stream = TorchStream(bench)
    torch = stream.torch
    with torch.cuda.stream(stream.stream):
        a, b = (torch.randn(_SQUARE, _SQUARE, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(a)
    launch = stream.launch(lambda: torch.matmul(a, b, out=out))
    bench.launch(launch)  # the library makes its handle outside the capture
    series = Timer(bench).graph("matmul", [launch] * 2, capture=stream.capture)
    rates = tuple(2.0 * _SQUARE**3 / value * 1e6 for value in series.values)
    method = f"torch {torch.__version__}, {_SQUARE} cubed, random data, graph replay"
    return Ceiling(what="matmul", value=statistics.median(rates), dtype=dtype, method=method, samples=rates)


def release() -> None:
    """Give back the memory that torch keeps for itself, where torch is loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()

"""FlashMLA's dense decode kernel, its schedule made before it is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_bench.measure.bench import Bench
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.peers.base import PeerCalls, module, refuse
from paged_bench.measure.peers.torch_tools import TorchStream
from paged_bench.measure.step import SCALE
from paged_bench.measure.suite import CaseSpec


class FlashMla:
    """`flash_mla.flash_mla_with_kvcache`; both the interface with a schedule object and the one before it."""

    name = "flashmla"
    title = "FlashMLA"
    modules = ("torch", "flash_mla")
    distribution = "flash_mla"

    def prepare(self, bench: Bench, spec: CaseSpec, sets: Sequence[InputSet]) -> PeerCalls:
        """Make a schedule by one call for each set."""
        refuse(
            (spec.layers > 1, "stacks are measured for the operator alone"),
            ((spec.head_size, spec.v_head_size) != (576, 512), "has a kernel for 576/512 only"),
            (spec.block_size != 64, "pages are 64 tokens"),
            (len(set(spec.query_lens)) > 1, "all sequences bring the same number of new tokens"),
        )
        stream = TorchStream(bench)
        torch, flash_mla = stream.torch, module("flash_mla")
        lengths = torch.as_tensor(spec.context_lens, dtype=torch.int32, device="cuda")
        query_len = spec.query_lens[0]
        results, calls = [], []
        for inputs in sets:
            query, cache, table = (
                stream.view(inputs.arrays[name]) for name in ("query", "key_cache", "block_table")
            )
            query = query.view(spec.batch, query_len, spec.heads, spec.head_size)
            schedule = flash_mla.get_mla_metadata(lengths, query_len * spec.heads, 1)

            def call(query: Any = query, cache: Any = cache, table: Any = table, made: Any = schedule) -> Any:
                return flash_mla.flash_mla_with_kvcache(
                    query, cache, table, lengths, spec.v_head_size, *made, softmax_scale=SCALE, causal=True
                )

            with torch.cuda.stream(stream.stream):
                results.append(call()[0])  # the schedule of the newer interface is made by the first call
            calls.append(stream.launch(call))
        return PeerCalls(calls, stream.output(results[0], spec), stream.capture)

"""vLLM's Triton kernel for MLA decode, with splits as its TRITON_MLA backend picks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_bench.measure.bench import Bench
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.peers.base import PeerCalls, module, refuse
from paged_bench.measure.peers.torch_tools import TorchStream
from paged_bench.measure.step import SCALE
from paged_bench.measure.suite import CaseSpec

_KEYS_A_SPLIT = 512


class VllmTriton:
    """`vllm.v1.attention.ops.triton_decode_attention.decode_attention_fwd`."""

    name = "vllm-triton"
    title = "Triton (vLLM)"
    modules = ("torch", "triton", "vllm")
    distribution = "vllm"

    def prepare(self, bench: Bench, spec: CaseSpec, sets: Sequence[InputSet]) -> PeerCalls:
        """Allocate its partials."""
        refuse(
            (spec.layers > 1, "stacks are measured for the operator alone"),
            (max(spec.query_lens) > 1, "decodes one token a sequence"),
        )
        stream = TorchStream(bench)
        torch = stream.torch
        try:
            attention = module("vllm.v1.attention.ops.triton_decode_attention")
        except ModuleNotFoundError:
            attention = module("vllm.attention.ops.triton_decode_attention")  # where it was before 0.13
        longest = max(spec.context_lens)
        splits = 1 << max(0, (-(-longest // _KEYS_A_SPLIT) - 1).bit_length())
        lengths = torch.as_tensor(spec.context_lens, dtype=torch.int32, device="cuda")
        partials = torch.empty(
            (spec.batch, spec.heads, splits, spec.v_head_size + 1), dtype=torch.float32, device="cuda"
        )
        lse = torch.empty((spec.batch, spec.heads), dtype=torch.float32, device="cuda")
        results, calls = [], []
        for inputs in sets:
            query, cache, table = (
                stream.view(inputs.arrays[name]) for name in ("query", "key_cache", "block_table")
            )
            query = query.view(spec.batch, spec.heads, spec.head_size)
            output = torch.full_like(query[..., : spec.v_head_size], float("nan"))
            results.append(output)

            def call(
                query: Any = query, cache: Any = cache, table: Any = table, output: Any = output
            ) -> None:
                attention.decode_attention_fwd(
                    *(query, cache, cache[..., : spec.v_head_size], output, lse, table, lengths, partials),
                    *(splits, SCALE, spec.block_size),
                )

            calls.append(stream.launch(call))
        bench.launch(calls[0])
        return PeerCalls(calls, stream.output(results[0], spec), stream.capture)

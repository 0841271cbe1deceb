"""FlashInfer's batched MLA kernels, planned on the host before they are timed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_bench.measure.bench import Bench
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.peers.base import PeerCalls, module, refuse, rope_width
from paged_bench.measure.peers.torch_tools import TorchStream
from paged_bench.measure.step import SCALE
from paged_bench.measure.suite import CaseSpec

_WORKSPACE_BYTES = 128 << 20


class FlashInfer:
    """`flashinfer.mla.BatchMLAPagedAttentionWrapper` with one of its backends.

    Args:
        backend: `fa3` for Hopper, or `fa2`.
    """

    modules = ("torch", "flashinfer")
    distribution = "flashinfer-python"

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.name = f"flashinfer-{backend}"
        self.title = f"FlashInfer {backend}"

    def prepare(self, bench: Bench, spec: CaseSpec, sets: Sequence[InputSet]) -> PeerCalls:
        """Plan for every set."""
        refuse(
            (spec.layers > 1, "stacks are measured for the operator alone"),
            (rope_width(spec) != 64, f"needs 64 rotary channels behind the value, here {rope_width(spec)}"),
            (
                self._backend == "fa3" and bench.device.properties.capability[0] != 9,
                "its fa3 backend is for compute capability 9",
            ),
        )
        stream = TorchStream(bench)
        calls, results = [], []
        scratch = stream.torch.empty(_WORKSPACE_BYTES, dtype=stream.torch.int8, device="cuda")
        for inputs in sets:
            wrapper = self._planned(stream, spec, inputs, scratch)
            query, cache = (stream.view(inputs.arrays[name]) for name in ("query", "key_cache"))
            query = query.view(spec.tokens, spec.heads, spec.head_size)
            rows = cache.view(-1, spec.block_size, spec.head_size)
            v = spec.v_head_size
            operands = {
                "q_nope": query[..., :v],
                "q_pe": query[..., v:],
                "ckv_cache": rows[..., :v],
                "kpe_cache": rows[..., v:],
            }
            output = stream.torch.full_like(operands["q_nope"], float("nan"))
            results.append(output)

            def call(wrapper: Any = wrapper, operands: Any = operands, output: Any = output) -> None:
                wrapper.run(**operands, out=output)

            calls.append(stream.launch(call))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer releases prefer another form of the same arguments
            bench.launch(*calls)
        # Its split partials are bfloat16.
        return PeerCalls(calls, stream.output(results[0], spec), stream.capture, tolerance_factor=1.5)

    def _planned(self, stream: TorchStream, spec: CaseSpec, inputs: InputSet, scratch: Any) -> Any:
        torch = stream.torch
        counts = [-(-length // spec.block_size) for length in spec.context_lens]
        pages = np.concatenate([inputs.plan.block_table[row, :count] for row, count in enumerate(counts)])
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        values = (inputs.plan.cumulative, np.cumsum([0, *counts]), pages, spec.context_lens)
        index = {
            name: torch.as_tensor(np.asarray(value, np.int32), device="cuda")
            for name, value in zip(names, values, strict=True)
        }
        wrapper = module("flashinfer.mla").BatchMLAPagedAttentionWrapper(
            scratch,
            use_cuda_graph=True,
            backend=self._backend,
            **{name: value.clone() for name, value in index.items()},
        )
        dtype = getattr(torch, spec.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapper.plan(
                **index,
                num_heads=spec.heads,
                head_dim_ckv=spec.v_head_size,
                head_dim_kpe=rope_width(spec),
                page_size=spec.block_size,
                causal=True,
                sm_scale=SCALE,
                q_data_type=dtype,
                kv_data_type=dtype,
            )
        return wrapper

"""torch's flex_attention, compiled, over pages that were gathered before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_bench.measure.bench import Bench
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.peers.base import PeerCalls, Unsuitable, module, refuse
from paged_bench.measure.peers.sdpa import refuse_dense
from paged_bench.measure.peers.torch_tools import TorchStream, folded_query, gathered, unfolded
from paged_bench.measure.step import SCALE
from paged_bench.measure.suite import CaseSpec


class FlexAttention:
    """`torch.nn.attention.flex_attention` under `torch.compile`.

    Each shape is compiled anew, some seconds each. A size that did not compile is not tried again.
    """

    name = "flex"
    title = "flex_attention"
    modules = ("torch", "triton")
    distribution = "torch"

    def __init__(self) -> None:
        self._failed: dict[tuple[int, int], str] = {}

    def prepare(self, bench: Bench, spec: CaseSpec, sets: Sequence[InputSet]) -> PeerCalls:
        """Gather pages and compile."""
        refuse((spec.group != "prefill", "asked for prefill only, as each shape takes its compiler seconds"))
        refuse_dense(spec)
        size = (spec.head_size, spec.v_head_size)
        if size in self._failed:
            raise Unsuitable(f"does not compile at these head sizes: {self._failed[size]}")
        stream = TorchStream(bench)
        torch, flex = stream.torch, module("torch.nn.attention.flex_attention")
        compiled = torch.compile(flex.flex_attention, dynamic=False)
        mask = flex.create_block_mask(
            lambda b, h, q, k: q >= k, None, None, spec.tokens, spec.tokens, device="cuda"
        )
        operands = []
        for inputs in sets:
            rows = gathered(stream, spec, inputs)[:, None]
            operands.append((folded_query(stream, spec, inputs), rows, rows[..., : spec.v_head_size]))

        def call(index: int) -> Any:
            return compiled(*operands[index], block_mask=mask, scale=SCALE, enable_gqa=True)

        try:
            with torch.cuda.stream(stream.stream):
                result = call(0)
        except Exception as error:  # the compiler raises what it likes
            told = " ".join(str(error).split())
            self._failed[size] = told[:160]
            raise Unsuitable(f"does not compile: {told[:160]}") from error
        # mypy does not infer a lambda whose parameter has a default.
        launches = [stream.launch(lambda index=index: call(index)) for index in range(len(sets))]  # type: ignore[misc]
        return PeerCalls(launches, stream.output(unfolded(spec, result), spec), stream.capture)

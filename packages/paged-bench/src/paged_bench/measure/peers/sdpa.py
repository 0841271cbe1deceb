"""torch's scaled_dot_product_attention, over pages that were gathered before.

It knows no pages, so it gets each sequence's rows in one piece, the heads folded into the query: the best
case for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from paged_bench.measure.bench import Bench
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.peers.base import PeerCalls, Unsuitable, module, refuse
from paged_bench.measure.peers.torch_tools import TorchStream, folded_query, gathered, unfolded
from paged_bench.measure.step import SCALE
from paged_bench.measure.suite import CaseSpec

# In the order of preference; the first that takes the shape is timed.
_BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")


def refuse_dense(spec: CaseSpec) -> None:
    """Refuse what attention over gathered, equally long sequences cannot express.

    Raises:
        Unsuitable: It cannot.
    """
    refuse(
        (not spec.uniform, "sequences differ in length, and it knows no pages"),
        (spec.layers > 1, "stacks are measured for the operator alone"),
        (
            spec.query_lens[0] > 1 and spec.group != "prefill",
            "several new tokens need a mask over folded heads",
        ),
    )


class TorchSdpa:
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "sdpa"
    title = "torch SDPA"
    modules = ("torch",)
    distribution = "torch"

    def prepare(self, bench: Bench, spec: CaseSpec, sets: Sequence[InputSet]) -> PeerCalls:
        """Gather pages and choose the backend."""
        refuse_dense(spec)
        stream = TorchStream(bench)
        attend = stream.torch.nn.functional.scaled_dot_product_attention
        kernels = module("torch.nn.attention")
        operands = []
        for inputs in sets:
            rows = gathered(stream, spec, inputs)[:, None]
            if spec.group == "prefill":
                rows = rows.expand(-1, spec.heads, -1, -1)
            operands.append((folded_query(stream, spec, inputs), rows, rows[..., : spec.v_head_size]))

        def call(backend: Any, index: int) -> Any:
            with kernels.sdpa_kernel(backend):
                return attend(*operands[index], is_causal=spec.group == "prefill", scale=SCALE)

        refusals = []
        for name in _BACKENDS:
            backend = getattr(kernels.SDPBackend, name)
            try:
                with stream.torch.cuda.stream(stream.stream), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of each backend that refuses, and raises
                    result = call(backend, 0)
            except RuntimeError as error:
                refusals.append(f"{name.lower()}: {str(error).splitlines()[0][:80]}")
                continue
            label = name.removesuffix("_ATTENTION").lower()
            output = stream.output(unfolded(spec, result), spec)
            launches = [
                # mypy does not infer a lambda whose parameters have defaults.
                stream.launch(lambda index=index, chosen=backend: call(chosen, index))  # type: ignore[misc]
                for index in range(len(sets))
            ]
            return PeerCalls(launches, output, stream.capture, label)
        raise Unsuitable("; ".join(refusals))

"""The residency report's counters and bits, by a decode whose caches lie in this GPU's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from paged_bench.demo.config import LlamaConfig
from paged_bench.demo.llama import Llama
from paged_bench.demo.rope import rope_tables
from paged_bench.demo.weights import Block, Linear, Weights
from paged_bench.residency.crossing import crossing
from paged_bench.residency.cuda_machine import CudaMachine
from paged_bench.residency.decode import decode
from paged_bench.residency.machine import FakeMachine, Machine
from paged_bench.residency.results import LaneResult
from paged_bench.residency.shapes import SHAPES, KvShape, variants

PROMPT, NEW = (11, 23, 42, 99, 7), 48
LONGEST = len(PROMPT) + NEW - 1
# As many layers and heads as the demo's model, with random weights and a narrower stream.
CONFIG = LlamaConfig(
    layers=30, width=192, hidden=256, heads=9, kv_heads=3, head_size=64, rotary_dim=64, rope_base=1e4,
    rope_factor=1.0, epsilon=1e-5, context=2_048, vocabulary=512,
)  # fmt: skip


def random_model() -> Llama:
    rng = np.random.default_rng(6)

    def matrix(into: int, out: int) -> Linear:
        return Linear((2 * rng.standard_normal((into, out)) / np.sqrt(into)).astype(np.float32), None)

    def block() -> Block:
        return Block(
            attention_norm=np.ones(CONFIG.width, np.float32),
            query_key_value=matrix(CONFIG.width, CONFIG.query_width + 2 * CONFIG.kv_width),
            attention_output=matrix(CONFIG.query_width, CONFIG.width),
            feed_forward_norm=np.ones(CONFIG.width, np.float32),
            gate_up=matrix(CONFIG.width, 2 * CONFIG.hidden),
            down=matrix(CONFIG.hidden, CONFIG.width),
        )

    embedding = (4 * rng.standard_normal((CONFIG.vocabulary, CONFIG.width))).astype(np.float32)
    blocks = tuple(block() for _ in range(CONFIG.layers))
    return Llama(CONFIG, Weights(embedding, blocks, np.ones(CONFIG.width, np.float32), embedding))


def decoded(machine: Machine, model: Llama, shape: KvShape) -> list[LaneResult]:
    lanes = [machine.lane(variant, shape, CONFIG, LONGEST) for variant in variants(8, LONGEST)]
    decode(model, PROMPT, lanes, NEW, rope_tables(CONFIG, LONGEST))
    results = [lane.result() for lane in lanes]
    for lane in lanes:
        lane.close()
    return results


def test_a_decode_on_the_gpu_counts_what_the_host_counts(facts: Any) -> None:
    model, shape = random_model(), SHAPES["0.5b"]
    on_gpu, on_host = decoded(CudaMachine(0), model, shape), decoded(FakeMachine(), model, shape)
    assert on_gpu == on_host
    assert len({lane.token_ids for lane in on_gpu}) == 1
    assert len(set(on_gpu[0].token_ids)) > 10, "a decode that repeats itself would prove little"
    forced = {(lane.layout, lane.capture): lane for lane in on_gpu if lane.in_place and lane.min_bucket == 8}
    assert forced["head_major_bucket", True].counters == (4, 39, 4, 0)
    assert forced["seq_major", True].counters == (1, 45, 1, 3)
    assert {lane.physical_bytes for lane in forced.values()} == {100_663_296}
    assert forced["head_major_bucket", True].kv_bytes_moved == 688_576
    assert forced["seq_major", True].kv_bytes_moved == 0
    facts["residency: captures, replays, invalidations, keeps"] = {
        f"{lane.label}, {'graph' if lane.capture else 'no graph'}, from {lane.min_bucket}": lane.counters
        for lane in on_gpu
    }


def test_growth_across_granules_in_every_layout(facts: Any) -> None:
    """qwen2.5-14b, 32,768 tokens reserved: the replay's bits are those of a launch over fresh memory."""
    stages = crossing(CudaMachine(0), SHAPES["14b"])
    assert len(stages) == 9
    for stage in stages:
        assert stage.driver_bytes == stage.planned_bytes
        assert stage.equal_bits is True
    seq = [stage for stage in stages if stage.layout == "seq_major"]
    assert [(one.granules_a_binding, one.captures, one.growth_keeps) for one in seq] == [
        (1, 1, 0),
        (4, 1, 1),
        (16, 1, 2),
    ]
    assert [one.granules_a_binding for one in stages if one.layout == "head_major"] == [8, 8, 16]
    facts["residency: layout, tokens, granules a binding, bytes by the driver, copied"] = [
        [one.layout, one.tokens, one.granules_a_binding, one.driver_bytes, one.bytes_moved] for one in stages
    ]

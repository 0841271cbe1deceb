"""How long the oracle takes; run by `paged-bench cpu`, or alone with `pytest -o python_files=bench_*.py`.

The sizes are those that the project promises for two cores: a decode of 32 sequences over 4,096 positions and
a prefill of 2,048 tokens, both with 16 heads at 576/512, and one layer of the demo's decode step.
"""

from __future__ import annotations

import pytest
from paged_oracle import paged_attention
from paged_oracle.testing import Case, make_case
from pytest_benchmark.fixture import BenchmarkFixture

MLA = {"num_heads": 16, "head_size": 576, "v_head_size": 512, "rotary_dim": 64, "rotary_offset": 512}
DEMO = {
    "num_heads": 9, "head_size": 384, "v_head_size": 192, "rotary_dim": 192, "rotary_offset": 192,
    "dtype": "float32",
}  # fmt: skip


def measure(benchmark: BenchmarkFixture, title: str, case: Case, rounds: int) -> None:
    """Time whole calls; the first, which also checks the call, is not counted."""
    benchmark.extra_info["title"] = title

    def call() -> None:
        paged_attention(case.attributes, case.inputs, extensions=case.extensions)

    benchmark.pedantic(call, rounds=rounds, warmup_rounds=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode_32_sequences_of_4096(benchmark: BenchmarkFixture, dtype: str) -> None:
    """One new token in each of 32 sequences."""
    title = f"decode, 32 sequences x 4,096, 16 heads, 576/512, {dtype}"
    measure(benchmark, title, make_case(new=[1] * 32, past=[4095] * 32, block_size=64, dtype=dtype, **MLA), 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prefill_2048_tokens(benchmark: BenchmarkFixture, dtype: str) -> None:
    """A whole prompt of a latent model."""
    title = f"prefill of 2,048 tokens, 16 heads, 576/512, {dtype}"
    measure(benchmark, title, make_case(new=[2048], past=[0], block_size=64, dtype=dtype, **MLA), 5)


def test_prefill_2048_tokens_separate(benchmark: BenchmarkFixture) -> None:
    """A whole prompt of a grouped-query model."""
    sizes = {"num_heads": 16, "kv_num_heads": 4, "head_size": 128, "rotary_dim": 128}
    case = make_case(new=[2048], past=[0], block_size=256, layout="SEPARATE", **sizes)
    measure(benchmark, "prefill of 2,048 tokens, SEPARATE", case, 5)


def test_demo_layer_of_eight_decoding_sequences(benchmark: BenchmarkFixture) -> None:
    """One of the 30 calls of a decode step of the demo."""
    past = [100, 150, 200, 250, 300, 350, 420, 500]
    title = "one layer of the demo, eight decoding sequences"
    measure(benchmark, title, make_case(new=[1] * 8, past=past, **DEMO), 50)


def test_demo_layer_with_a_prefill(benchmark: BenchmarkFixture) -> None:
    """The same with one sequence that prefills 40 tokens."""
    past = [100, 150, 200, 250, 300, 350, 420, 0]
    title = "one layer of the demo, seven decoding sequences and a prefill"
    measure(benchmark, title, make_case(new=[1] * 7 + [40], past=past, **DEMO), 50)

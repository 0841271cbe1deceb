"""Time of `check` for a full call of each layout, of the strict layer, and of the import.

Run by `paged-bench cpu`, or alone with `pytest -o python_files=bench_*.py`.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from paged_schema import PagedAttentionAttributes, PagedAttentionInputs, check
from paged_schema.strict import check_values
from pytest_benchmark.fixture import BenchmarkFixture

LATENT = (
    PagedAttentionAttributes(
        num_heads=64, kv_num_heads=1, kv_cache_layout="LATENT", v_head_size=512, rotary_offset=512,
        do_rotary=1, scale=192**-0.5,
    ),
    PagedAttentionInputs(
        query="bf16[tokens, 36864]", key="bf16[tokens, 576]", key_cache="bf16[4096, 64, 1, 576]",
        cumulative_sequence_length="i32[1025]", past_seqlens="i32[1024]", block_table="i32[1024, 2048]",
        cos_cache="bf16[131072, 32]", sin_cache="bf16[131072, 32]", slot_mapping="i32[tokens]",
        attention_metadata="i32[3]",
    ),
)  # fmt: skip
SEPARATE = (
    PagedAttentionAttributes(
        num_heads=8, kv_num_heads=2, do_rotary=1, k_quant_type="PER_CHANNEL", v_quant_type="PER_TENSOR"
    ),
    PagedAttentionInputs(
        query="bf16[16, 512]", key="bf16[16, 128]", value="bf16[16, 128]", key_cache="i8[9, 16, 2, 64]",
        value_cache="i8[9, 16, 2, 64]", cumulative_sequence_length="i32[4]", past_seqlens="i32[3]",
        block_table="i32[3, 3]", cos_cache="bf16[99, 32]", sin_cache="bf16[99, 32]", slot_mapping="i32[16]",
        head_sink="bf16[8]", q_norm_weight="bf16[64]", k_norm_weight="bf16[64]", k_scale="f32[2, 1, 64]",
        v_scale="f32[1]", attention_metadata="i32[3]",
    ),
)  # fmt: skip


def test_check_latent(benchmark: BenchmarkFixture) -> None:
    """A full LATENT call; the aim is below 50 microseconds."""
    benchmark.extra_info["title"] = "`check`, LATENT, every size known"
    benchmark(check, *LATENT)


def test_check_separate_with_every_input(benchmark: BenchmarkFixture) -> None:
    """A quantised SEPARATE call with every optional input; the aim is below 50 microseconds."""
    benchmark.extra_info["title"] = "`check`, SEPARATE, every input"
    benchmark(check, *SEPARATE)


def test_strict_1024_sequences_2048_columns(benchmark: BenchmarkFixture) -> None:
    """The strict layer over a large, full table; the aim is below 5 milliseconds."""
    call = check(*LATENT)
    sequences, columns = 1024, 2048
    rng = np.random.default_rng(0)
    past = rng.integers(0, 64 * columns, sequences, dtype=np.int32)
    table = rng.integers(0, 4096, (sequences, columns), dtype=np.int32)
    table[np.arange(sequences), past // 64] = rng.permutation(4096)[:sequences]  # one writer a page
    arrays = {
        "cumulative_sequence_length": np.arange(sequences + 1, dtype=np.int32),
        "past_seqlens": past,
        "block_table": table,
        "attention_metadata": np.array([1, int(past.max()) + 1, 0], np.int32),
    }
    benchmark.extra_info["title"] = "strict layer, 1,024 sequences x 2,048 columns, all mapped"
    benchmark(check_values, call, arrays)


def test_import(benchmark: BenchmarkFixture) -> None:
    """A fresh interpreter that imports the package; the aim is below 150 milliseconds over an empty one."""

    def fresh() -> None:
        subprocess.run([sys.executable, "-c", "import paged_schema"], check=True)

    benchmark.extra_info["title"] = "a fresh interpreter that imports `paged_schema`"
    benchmark.pedantic(fresh, rounds=10)

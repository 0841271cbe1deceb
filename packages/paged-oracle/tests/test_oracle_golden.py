"""Every golden file of the real operator: cache rows bit for bit, outputs within stated counts.

`LATENT` holds how many output values of a file differ, each by one unit of T at most. `SEPARATE` holds the
kernel that answered, how many values differ by what it rounds on top, and how many once it is emulated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paged_oracle import compare, paged_attention, tolerance
from paged_oracle.testing import Golden, load_golden

GOLDEN = Path(__file__).parents[3] / "tests-golden"

LATENT = {
    "latent128_vdefault_noscale_bf16_h4_bs16": 2,
    "latent192_cache_but_no_rotary_bf16_h4_bs16": 0,
    "latent192_decode_fp16_h64_bs16": 23,
    "latent192_int8_tensor_bf16_h4_bs16": 0,
    "latent192_iscausal0_bf16_h4_bs16": 1,
    "latent192_mixed_bf16_h16_bs128_softcap": 15,
    "latent192_mixed_bf16_h4_bs64_window": 2,
    "latent192_prefill_fp16_h1_bs32_norope": 7,
    "latent576_decode_bf16_h16_bs64": 2,
    "latent576_fp8_tensor_bf16_h16_bs64": 1,
    "latent576_mixed_bf16_h4_bs32_slot": 11,
    "latent576_prefill_fp16_h4_bs16": 38,
}
SEPARATE = {
    "sep128_decode_bf16_bs16_qknorm_rope": ("cudnn", 654, 0),
    "sep128_decode_fp8_bf16_bs16": ("paged-decode", 0, 0),
    "sep128_mixed_bf16_bs16_rope_window": ("memory-efficient", 7423, 1),
    "sep128_prefill_fp16_bs128_rope_sink": ("flash", 21703, 110),
    "sep64_decode_bf16_bs16_rope": ("cudnn", 356, 0),
    "sep64_decode_fp16_bs16_sink": ("paged-decode", 1, 1),
    "sep64_decode_int8_fp16_bs16": ("paged-decode", 1, 1),
    "sep64_mixed_bf16_bs16_slot": ("memory-efficient", 1427, 0),
    "sep64_mixed_bf16_bs256_softcap": ("flash", 746, 37),
    "sep64_mixed_fp16_bs32_packed_interleaved": ("memory-efficient", 3170, 18),
    "sep64_mixed_int8_bf16_bs16": ("flash", 1878, 0),
}


def load(name: str) -> Golden:
    return load_golden(GOLDEN / f"{name}.npz")


def test_every_file_is_covered() -> None:
    assert {path.stem for path in GOLDEN.glob("*.npz")} == LATENT.keys() | SEPARATE.keys()


@pytest.mark.parametrize("name", [*LATENT, *SEPARATE])
def test_cache_rows_bit_for_bit(name: str) -> None:
    golden = load(name)
    outputs = paged_attention(golden.attributes, golden.inputs)
    for cache, after in (("key_cache", outputs.key_cache), ("value_cache", outputs.value_cache)):
        assert (after is None) == (cache not in golden.caches)
        if after is not None:
            assert after is golden.inputs[cache]
            assert after.tobytes() == golden.caches[cache].tobytes()


def test_the_files_tell_rotation_in_t_from_exact_rotation() -> None:
    for name in (*LATENT, *SEPARATE):
        golden = load(name)
        outputs = paged_attention(golden.attributes, golden.inputs, rounding="exact")
        same = outputs.key_cache.tobytes() == golden.caches["key_cache"].tobytes()
        assert same == (golden.attributes.do_rotary != 1)


@pytest.mark.parametrize(("name", "differing"), LATENT.items())
def test_latent_outputs(name: str, differing: int) -> None:
    golden = load(name)
    outputs = paged_attention(golden.attributes, golden.inputs)
    result = compare(outputs.output, golden.output)
    assert result.differing <= differing
    assert result.max_units is not None
    assert result.max_units <= 1


@pytest.mark.parametrize(("name", "emulated"), [(name, row[2]) for name, row in SEPARATE.items()])
def test_separate_outputs_of_the_emulated_kernel(name: str, emulated: int) -> None:
    golden = load(name)
    outputs = paged_attention(golden.attributes, golden.inputs, backend=SEPARATE[name][0])
    assert compare(outputs.output, golden.output).differing <= emulated


@pytest.mark.parametrize("name", SEPARATE)
def test_separate_outputs_within_what_the_kernel_rounds(name: str) -> None:
    golden = load(name)
    backend, differing, _ = SEPARATE[name]
    bound = allowed(golden, backend)
    outputs = paged_attention(golden.attributes, golden.inputs)
    result = compare(outputs.output, golden.output, tolerance=bound)
    assert result.outside == 0, str(result)
    assert result.differing <= differing


def allowed(golden: Golden, backend: str) -> np.ndarray:
    """The error that a kernel's own roundings explain, from the error models in `tolerance`."""
    magnitudes = tolerance.magnitude(golden.attributes, golden.inputs)
    dtype, keys = golden.output.dtype, 100
    # scale |q| |k| for normal numbers, with room; the softcap file's queries are three times as large.
    largest_logit = 48.0 if golden.attributes.softcap else 16.0
    bound = tolerance.rounded_output(golden.output, 2 if "head_sink" in golden.inputs else 1)
    bound = bound + tolerance.float32_sums(magnitudes, 128, keys, largest_logit)
    if backend != "paged-decode":
        bound += tolerance.rounded_weights(magnitudes, dtype, keys=keys, largest_value=6.0)
    if backend == "flash" and "k_scale" in golden.inputs:
        bound += tolerance.rounded_copies(magnitudes, dtype, largest_logit)
    return bound


def test_the_kernels_do_round_their_weights() -> None:
    for name, (backend, _, _) in SEPARATE.items():
        golden = load(name)
        without = allowed(golden, "paged-decode")
        outputs = paged_attention(golden.attributes, golden.inputs)
        outside = compare(outputs.output, golden.output, tolerance=without).outside
        assert (outside > 0) == (backend != "paged-decode")

"""Configurations written from public figures, and what the operator makes of each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from paged_schema import InvalidArgument
from paged_schema.applicability import Fit, Plan, fit, fit_file
from paged_schema.cli import main

CONFIGS = Path(__file__).with_name("configs")
YARN_40 = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2


def fitted(name: str, **plan: Any) -> Fit:
    return fit_file(CONFIGS / f"{name}.json", Plan(**plan))


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


MLA = {
    "kv_num_heads": 1,
    "kv_cache_layout": "LATENT",
    "v_head_size": 512,
    "rotary_offset": 512,
    "do_rotary": 1,
}


@pytest.mark.parametrize(
    ("name", "heads", "scale", "layers"),
    [
        ("deepseek-v2-lite", 16, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, 27),
        ("deepseek-v3", 128, YARN_40, 61),
        ("kimi-k2", 64, 192**-0.5 * (0.1 * math.log(32) + 1) ** 2, 61),
    ],
)
def test_dense_latent_attention_fits(name: str, heads: int, scale: float, layers: int) -> None:
    found = fitted(name)
    (layer,) = found.layers
    assert found.fits
    assert (layer.layers, layer.bytes_per_token, found.bytes_per_token) == (layers, 1152, 1152 * layers)
    assert layer.attributes == MLA | {
        "num_heads": heads,
        "scale": pytest.approx(scale, rel=1e-12),
        "rotary_interleaved": 1,
    }
    assert layer.inputs["query"] == f"bfloat16[tokens, {heads * 576}]"
    assert layer.inputs["key_cache"] == "bfloat16[blocks, 64, 1, 576]"
    assert layer.inputs["cos_cache"].endswith(", 32]")
    assert layer.served_by[:2] == ("paged-cuda", "dense MLA, LATENT")
    assert found.table_factor == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "topk", "scale"), [("glm-5.2", 2048, 256**-0.5), ("deepseek-v3.2", 2048, YARN_40)]
)
def test_selected_keys_do_not_fit_but_their_dense_form_does(name: str, topk: int, scale: float) -> None:
    found = fitted(name)
    assert not found.fits
    (reason,) = found.layers[0].reasons
    assert f"selects {topk} keys for each query" in reason
    assert "fits as dense attention" in reason
    dense = fitted(name, dense=True)
    assert dense.fits
    assert dense.layers[0].attributes["scale"] == pytest.approx(scale)
    assert "paged-cuda" in dense.layers[0].served_by


def test_compressed_entries_do_not_fit() -> None:
    found = fitted("deepseek-v4", dense=True)
    assert not found.fits
    local, csa, hca = found.layers
    assert (local.layers, csa.layers, hca.layers) == (2, 21, 20)
    assert local.fits
    assert local.attributes["local_window_size"] == 128
    assert (local.attributes["rotary_offset"], local.inputs["cos_cache"]) == (448, "bfloat16[1048576, 32]")
    assert csa.reasons[0].startswith("4 tokens are folded")
    assert hca.reasons[0].startswith("128 tokens are folded")


@pytest.mark.parametrize(
    ("name", "attributes", "bytes_per_token"),
    [
        ("llama-3.1-8b", {"num_heads": 32, "kv_num_heads": 8, "do_rotary": 1}, 131072),
        ("qwen2.5-7b", {"num_heads": 28, "kv_num_heads": 4, "do_rotary": 1}, 57344),
        ("smollm2-135m", {"num_heads": 9, "kv_num_heads": 3, "do_rotary": 1}, 23040),
        (
            "mistral-7b-v0.1",
            {"num_heads": 32, "kv_num_heads": 8, "do_rotary": 1, "local_window_size": 4096},
            131072,
        ),
    ],
)
def test_grouped_attention_fits(name: str, attributes: dict[str, int], bytes_per_token: int) -> None:
    found = fitted(name)
    (layer,) = found.layers
    assert (found.fits, layer.layout, layer.attributes) == (True, "SEPARATE", attributes)
    assert found.bytes_per_token == bytes_per_token
    assert "value_cache" in layer.inputs


def test_norms_come_from_the_caller() -> None:
    assert "q_norm_weight" not in fitted("qwen3-8b").layers[0].inputs
    normed = fitted("qwen3-8b", qk_norm=True).layers[0]
    assert (normed.fits, normed.inputs["q_norm_weight"]) == (True, "bfloat16[128]")


def test_windows_alternate_and_the_scale_is_the_models() -> None:
    found = fitted("gemma-3-27b", qk_norm=True)
    local, full = found.layers
    assert (local.layers, full.layers) == (52, 10)
    assert local.attributes["local_window_size"] == 1024
    assert "local_window_size" not in full.attributes
    assert full.attributes["scale"] == pytest.approx(168**-0.5)


def test_sinks_need_a_block_size_that_flash_takes() -> None:
    small, large = (fitted("gpt-oss-20b", sink=True, block_size=size) for size in (64, 256))
    assert small.table_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert [layer.layers for layer in small.layers] == [12, 12]
    assert small.layers[0].inputs["head_sink"] == "bfloat16[64]"
    assert any("prefill" in text and "head_sink" in text for text in small.layers[0].not_served_by)
    assert any(text.endswith("prefill: Flash") for text in large.layers[0].served_by)


def test_a_sink_with_latent_does_not_fit() -> None:
    found = fitted("deepseek-v3", sink=True)
    assert not found.fits
    assert found.layers[0].reasons == (
        "LATENT has no head_sink; drop the sink, or append it as a key of its own",
    )


@pytest.mark.parametrize(
    ("name", "ranks", "heads", "kv_heads"),
    [
        ("llama-3.1-8b", 4, 8, 2),
        ("llama-3.1-8b", 16, 2, 1),
        ("deepseek-v3", 8, 16, 1),
        ("smollm2-135m", 3, 3, 1),
    ],
)
def test_tensor_parallel_ranks(name: str, ranks: int, heads: int, kv_heads: int) -> None:
    (layer,) = fitted(name, tensor_parallel=ranks).layers
    assert layer.fits
    assert (layer.attributes["num_heads"], layer.attributes["kv_num_heads"]) == (heads, kv_heads)


@pytest.mark.parametrize(("name", "ranks"), [("smollm2-135m", 2), ("qwen2.5-7b", 14), ("llama-3.1-8b", 0)])
def test_ranks_that_do_not_divide(name: str, ranks: int) -> None:
    found = fitted(name, tensor_parallel=ranks)
    assert not found.fits
    assert "ranks" in found.layers[0].reasons[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alibi": True}, "ALiBi"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"head_dim": 120}, "R14b"),
        ({"head_dim": 36}, "R04b"),
        ({"v_head_dim": 64}, "R06b"),
        ({"partial_rotary_factor": 0.1}, "R14d"),
        ({"num_key_value_heads": 5}, "C02"),
    ],
)
def test_what_does_not_fit_says_why(changes: dict[str, Any], reason: str) -> None:
    found = fit(config("llama-3.1-8b") | changes)
    assert not found.fits
    assert any(reason in text for text in found.layers[0].reasons)
    assert found.layers[0].served_by == ()


def test_other_ways_to_write_the_same_things() -> None:
    base = config("llama-3.1-8b")
    assert fit(base | {"torch_dtype": "float32"}).layers[0].inputs["query"].startswith("bfloat16")
    assert (
        fit(base | {"dtype": "float16", "torch_dtype": None}).layers[0].inputs["query"].startswith("float16")
    )
    assert fit(base, Plan(dtype="fp16")).layers[0].inputs["query"].startswith("float16")
    assert fit(base | {"attn_logit_softcapping": 50.0}).layers[0].attributes["softcap"] == 50.0
    assert fit(base | {"use_bidirectional_attention": True}).layers[0].attributes["is_causal"] == 0
    assert fit(base | {"attention_multiplier": 0.5}).layers[0].attributes["scale"] == 0.5
    assert "scale" not in fit(base | {"query_pre_attn_scalar": 128}).layers[0].attributes
    assert fit(base | {"partial_rotary_factor": 0.5}).layers[0].inputs["cos_cache"].endswith(", 32]")
    hybrid = fit(base | {"layer_types": ["linear_attention", "full_attention"] * 16})
    assert (hybrid.other_layers, hybrid.layers[0].layers) == (16, 16)
    windowed = fit(base | {"use_sliding_window": True, "max_window_layers": 30, "sliding_window": 64})
    assert [(layer.layers, layer.attributes.get("local_window_size")) for layer in windowed.layers] == [
        (30, None),
        (2, 64),
    ]


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": "32"}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"attn_logit_softcapping": float("nan")}, "attn_logit_softcapping"),
        ({"torch_dtype": "int8"}, "dtype"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "8"}}, "factor"),
    ],
)
def test_a_configuration_that_makes_no_sense(changes: dict[str, Any], subject: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        fit(config("llama-3.1-8b") | changes)
    assert (caught.value.rule, caught.value.subject) == ("F02", subject)


def test_names_do_not_matter() -> None:
    base = config("deepseek-v3")
    assert fit(base | {"model_type": "llama", "architectures": ["GPT2"]}) == fit(base)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(CONFIGS / "deepseek-v3.json")
    assert main(["applicability", path]) == 0
    text = capsys.readouterr().out
    for part in (
        "LATENT",
        "rotary_offset",
        "served by",
        "paged-cuda",
        "cache bytes a token, all layers of one rank: 70272",
    ):
        assert part in text
    assert main(["applicability", path, "--json", "--tensor-parallel", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["attributes"]["num_heads"] == 16
    assert main(["applicability", str(CONFIGS / "glm-5.2.json")]) == 1
    assert "why not" in capsys.readouterr().out
    assert main(["applicability", str(CONFIGS / "glm-5.2.json"), "--dense"]) == 0
    for content in ("[]", "{", "", "\xff"):
        wrong = tmp_path / "config.json"
        wrong.write_bytes(content.encode("latin-1"))
        assert main(["applicability", str(wrong)]) == 2
    assert main(["applicability", str(tmp_path)]) == 2
    assert main(["applicability", path, "--dtype", "int8"]) == 2
    assert all(line.startswith("error: F02") for line in capsys.readouterr().err.splitlines())

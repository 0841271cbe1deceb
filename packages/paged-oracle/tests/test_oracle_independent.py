"""Agreement with implementations that nobody here wrote, in float64 over gathered caches.

ONNX's own operators, in its reference evaluator, do the norm, the rotation and the attention. PyTorch does
the attention where it is installed (extra ``torch-test``); PAGED_REQUIRE_TORCH=1 makes its absence a
failure. Ours runs with ``rounding="exact"`` on float32 tensors, so one rounding of the output to float32 is
all that differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from paged_oracle import paged_attention
from paged_oracle.testing import Case, make_case, place

Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, float], np.ndarray]


def standard(op: str, inputs: dict[str, np.ndarray], **attributes: float | int) -> np.ndarray:
    """Run one operator of the ONNX standard."""
    node = helper.make_node(op, list(inputs), ["y"], **attributes)
    double = TensorProto.DOUBLE
    values = [helper.make_tensor_value_info(name, double, None) for name in inputs]
    graph = helper.make_graph([node], op, values, [helper.make_tensor_value_info("y", double, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return ReferenceEvaluator(model).run(None, inputs)[0]


def onnx_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float, softcap: float
) -> np.ndarray:
    # The evaluator splits the scale into two float32 square roots; scale here, where it stays float64.
    inputs = {"q": scale * q[None], "k": k[None], "v": v[None], "mask": np.where(mask, 0.0, -np.inf)}
    return standard("Attention", inputs, scale=1.0, softcap=softcap)[0]


def torch_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float, softcap: float
) -> np.ndarray:
    import torch

    assert softcap == 0
    tensors = [torch.from_numpy(np.ascontiguousarray(x))[None] for x in (q, k, v)]
    found = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.from_numpy(mask), scale=scale, enable_gqa=True
    )
    return found[0].numpy()


def projected(case: Case, name: str, heads: int, size: int, positions: np.ndarray) -> np.ndarray:
    """Query or key heads (tokens, heads, size) in float64 after ONNX's norm and rotation."""
    x = case.inputs[name].astype(np.float64).reshape(-1, heads, size)
    weight = case.inputs.get("q_norm_weight" if name == "query" else "k_norm_weight")
    if weight is not None:
        epsilon = case.attributes.qk_norm_epsilon
        x = standard("RMSNormalization", {"x": x, "w": weight.astype(np.float64)}, axis=-1, epsilon=epsilon)
    if case.attributes.do_rotary:
        cos, sin = (case.inputs[f"{table}_cache"].astype(np.float64) for table in ("cos", "sin"))
        offset, width = case.attributes.rotary_offset, 2 * cos.shape[1]
        inputs = {
            "x": x[..., offset : offset + width].swapaxes(0, 1)[None],
            "cos": cos[positions][None],
            "sin": sin[positions][None],
        }
        interleaved = case.attributes.rotary_interleaved
        turned = standard("RotaryEmbedding", inputs, interleaved=interleaved)[0].swapaxes(0, 1)
        x = np.concatenate([x[..., :offset], turned, x[..., offset + width :]], axis=-1)
    return x


def check(case: Case, attention: Attention) -> None:
    size = case.inputs["key_cache"].shape[3]
    nodes, heads, kv = case.attributes, case.attributes.num_heads, case.attributes.kv_num_heads
    width = nodes.v_head_size or size
    before = case.fresh()
    outputs = paged_attention(nodes, before, rounding="exact", extensions=case.extensions)
    bounds, past = case.inputs["cumulative_sequence_length"], case.inputs["past_seqlens"]
    scale = np.float32(nodes.scale if nodes.scale else size**-0.5)
    for b, start in enumerate(bounds[:-1]):
        new = int(bounds[b + 1] - start)
        if new == 0:
            continue
        rows, context = slice(start, start + new), int(past[b]) + new
        positions = np.arange(context - new, context)
        where = place(case.inputs["block_table"][b], context, case.inputs["key_cache"].shape[1])
        keys = outputs.key_cache[where].astype(np.float64)
        one = Case(nodes, case.inputs | {n: case.inputs[n][rows] for n in ("query", "key")}, case.extensions)
        expected_keys = projected(one, "key", kv, size, positions)
        np.testing.assert_allclose(keys[-new:], expected_keys, rtol=2.0**-23, atol=1e-12)
        if outputs.value_cache is None:
            values = keys[..., :width]
        else:
            values = outputs.value_cache[where].astype(np.float64)
        mask = np.ones((new, context), np.bool_)
        if nodes.is_causal in (None, 1):
            mask &= np.arange(context) <= positions[:, None]
        if nodes.local_window_size > 0:
            mask &= np.arange(context) > positions[:, None] - nodes.local_window_size
        found = attention(
            projected(one, "query", heads, size, positions).swapaxes(0, 1),
            keys.swapaxes(0, 1),
            values.swapaxes(0, 1),
            mask,
            float(scale),
            nodes.softcap or 0.0,
        )
        actual = outputs.output[rows].astype(np.float64).reshape(new, heads, width).swapaxes(0, 1)
        np.testing.assert_allclose(actual, found, rtol=2.0**-23, atol=1e-12)


COMMON = {"new": [1, 37, 0, 5], "past": [300, 0, 7, 130], "dtype": "float32"}
CASES = {
    "latent": {"head_size": 96, "v_head_size": 64, "rotary_dim": 32, "rotary_offset": 64},
    "latent 576/512": {
        "num_heads": 16, "head_size": 576, "v_head_size": 512, "rotary_dim": 64, "rotary_offset": 512,
    },
    "latent window": {"head_size": 64, "local_window_size": 20},
    "latent non-causal": {"head_size": 64, "is_causal": 0},
    "gqa": {"layout": "SEPARATE", "num_heads": 6, "kv_num_heads": 2, "rotary_dim": 64, "norm": True},
    "gqa interleaved": {
        "layout": "SEPARATE", "num_heads": 6, "kv_num_heads": 2, "rotary_dim": 32, "rotary_offset": 16,
        "rotary_interleaved": 1, "local_window_size": 33, "block_size": 128,
    },
    "mha": {"layout": "SEPARATE", "num_heads": 3, "kv_num_heads": 3, "head_size": 128},
}  # fmt: skip
CAPPED = {
    "latent softcap": {"head_size": 64, "softcap": 2.0},
    "gqa softcap": {"layout": "SEPARATE", "num_heads": 4, "kv_num_heads": 2, "softcap": 2.0},
}


@pytest.mark.parametrize("options", [*CASES.values(), *CAPPED.values()], ids=[*CASES, *CAPPED])
def test_agrees_with_the_operators_of_the_onnx_standard(options: dict[str, object]) -> None:
    check(make_case(**COMMON, **options), onnx_attention)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_agrees_with_torch_in_float64(options: dict[str, object]) -> None:
    if not os.environ.get("PAGED_REQUIRE_TORCH"):
        pytest.importorskip("torch", reason="needs the extra paged-oracle[torch-test]")
    check(make_case(**COMMON, **options), torch_attention)  # type: ignore[arg-type]

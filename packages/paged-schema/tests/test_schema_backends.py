"""Which ORT backend serves a call: the choices that the CUDA provider's own log showed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paged_schema import backends
from paged_schema.backends import explain
from paged_schema.eligibility import NO_SINK, Problem

BASE = Problem(
    minor=31,
    sm=90,
    dtype="bfloat16",
    cache_dtype="bfloat16",
    latent=False,
    head_size=128,
    v_head_size=128,
    group_size=8,
    block_size=128,
    tokens=6,
    batch=2,
    sink=False,
    windowed=False,
    softcapped=False,
    causal=True,
    metadata=True,
    max_query=3,
)
ONE = {"tokens": 2, "max_query": 1}
INT8 = {"cache_dtype": "int8"}
INT4 = {"cache_dtype": "uint8"}
GATHERED = "Flash over a gathered copy"


def chosen(**changes: object) -> str:
    assert all(not verdict.reasons for verdict in explain(replace(BASE, **changes)) if verdict.serves)  # type: ignore[arg-type]
    served = [verdict.backend for verdict in explain(replace(BASE, **changes)) if verdict.serves]  # type: ignore[arg-type]
    assert len(served) <= 1
    return served[0] if served else "none"


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "Flash"),
        ({"block_size": 64}, "memory-efficient"),
        ({"block_size": None}, "Flash"),
        ({"head_size": 64}, "memory-efficient"),
        ({"head_size": 64, "block_size": 256}, "Flash"),
        ({"head_size": 72, "block_size": 128}, "Flash"),
        ({"head_size": 65, "block_size": 128}, "Flash"),
        ({"head_size": 129, "block_size": 64}, "Flash"),
        ({"head_size": 1025}, "none"),
        ({"head_size": 136, "block_size": 64}, "Flash"),
        ({"head_size": 256, "block_size": 64}, "Flash"),
        ({"head_size": 256, "block_size": 32}, "memory-efficient"),
        ({"head_size": 264, "block_size": 256}, "memory-efficient"),
        ({"head_size": None}, "Flash"),
        ({"sm": 80}, "Flash"),
        ({"sm": 75}, "none"),
        ({"sm": 75, "dtype": "float16"}, "memory-efficient"),
        ({"sm": 53, "dtype": "float16"}, "memory-efficient"),
        ({"sm": 52, "dtype": "float16"}, "none"),
        ({"block_size": 16, **ONE}, "paged decode"),
        ({"block_size": 16, "tokens": 1}, "paged decode"),
        ({"block_size": 16, "tokens": None}, "paged decode"),
        (ONE, "Flash"),
        ({"head_size": 1024}, "memory-efficient"),
        ({"head_size": 1032}, "none"),
        ({"head_size": 5952, **ONE}, "paged decode"),
        ({"head_size": 5960, **ONE}, "none"),
        ({"block_size": 16, "sink": True}, "none"),
        ({"block_size": 16, "sink": True, **ONE}, "paged decode"),
        ({"sink": True, "windowed": True, "softcapped": True}, "Flash"),
        ({"latent": True, "head_size": 576, "v_head_size": 512}, "LATENT"),
        ({"latent": True, "head_size": 6000, "v_head_size": 5904}, "LATENT"),
        ({"latent": True, "head_size": 6000, "v_head_size": 5905}, "none"),
        ({"latent": True, "head_size": None}, "LATENT"),
        ({"latent": True, "v_head_size": None}, "LATENT"),
        (INT8, GATHERED),
        ({**INT8, "head_size": 256, "block_size": 16}, GATHERED),
        ({**INT8, "head_size": 264}, "memory-efficient"),
        ({**INT8, "sm": 75, "dtype": "float16"}, "memory-efficient"),
        ({**INT8, **ONE}, "XQA"),
        ({**INT8, **ONE, "max_query": 0}, "XQA"),
        ({**INT8, **ONE, "max_query": None}, "XQA"),
        ({**INT8, **ONE, "max_query": 2}, "paged decode"),
        ({**INT8, "tokens": 1, "batch": 1, "max_query": 5}, "XQA"),
        ({**INT8, **ONE, "batch": 3}, "paged decode"),
        ({**INT8, **ONE, "batch": None}, "XQA"),
        ({**INT8, **ONE, "tokens": None}, "XQA"),
        ({**INT8, **ONE, "group_size": 6}, "XQA"),
        ({**INT8, **ONE, "group_size": 6, "minor": 30}, "XQA"),
        ({**INT8, **ONE, "group_size": 6, "minor": 29}, "paged decode"),
        ({**INT8, **ONE, "minor": 29}, "XQA"),
        ({**INT8, **ONE, "group_size": 4}, "XQA"),
        ({**INT8, **ONE, "group_size": 16}, "XQA"),
        ({**INT8, **ONE, "group_size": 32}, "XQA"),
        ({**INT8, **ONE, "minor": 29, "group_size": 4}, "XQA"),
        ({**INT8, **ONE, "minor": 29, "group_size": 16}, "XQA"),
        ({**INT8, **ONE, "minor": 29, "group_size": 32}, "XQA"),
        ({**INT8, **ONE, "group_size": 5}, "paged decode"),
        ({**INT8, **ONE, "head_size": 64}, "XQA"),
        ({**INT8, **ONE, "head_size": 256}, "XQA"),
        ({**INT8, **ONE, "head_size": 256, "minor": 29}, "paged decode"),
        ({**INT8, **ONE, "head_size": 64, "minor": 29}, "XQA"),
        ({**INT8, **ONE, "head_size": 80}, "paged decode"),
        ({**INT8, **ONE, "head_size": None}, "XQA"),
        ({**INT8, **ONE, "block_size": 64}, "paged decode"),
        ({**INT8, **ONE, "block_size": 256}, "XQA"),
        ({**INT8, **ONE, "block_size": None}, "XQA"),
        ({**INT8, **ONE, "softcapped": True}, "paged decode"),
        ({**INT8, **ONE, "windowed": True, "sink": True}, "XQA"),
        ({**INT8, **ONE, "sm": 80}, "XQA"),
        ({**INT8, **ONE, "sm": 79}, "paged decode"),
        ({"cache_dtype": "float8e4m3fn", **ONE, "sm": 89}, "XQA"),
        ({"cache_dtype": "float8e4m3fn", **ONE, "sm": 86}, "paged decode"),
        ({**INT8, **ONE, "causal": False}, "XQA"),
        ({**INT8, **ONE, "causal": False, "minor": 30}, GATHERED),
        ({**INT8, **ONE, "block_size": 64, "minor": 30}, "paged decode"),
        ({**INT8, **ONE, "block_size": 64, "causal": False}, "paged decode"),
        ({"block_size": 16, **ONE, "causal": False, "minor": 30}, "none"),
        ({"block_size": 16, **ONE, "causal": False}, "paged decode"),
        ({**INT8, "tokens": None}, "paged decode"),
        ({**INT8, "tokens": None, "head_size": 5960}, "none"),
    ],
)
def test_choice(changes: dict[str, object], backend: str) -> None:
    assert chosen(**changes) == backend


SPECULATIVE = {"dtype": "float16", "group_size": 6, "head_size": 256, **INT8}


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "XQA"),
        ({"cache_dtype": "float8e4m3fn"}, "XQA"),
        ({"cache_dtype": "uint8", "per_channel": True}, "XQA"),
        ({"minor": 30}, "XQA"),
        ({"minor": 30, "causal": False}, "XQA"),
        ({"minor": 30, "causal": False, "max_query": 0, "tokens": None}, "XQA"),
        ({"minor": 29}, GATHERED),
        ({"dtype": "bfloat16"}, GATHERED),
        ({"group_size": 8}, GATHERED),
        ({"metadata": False}, GATHERED),
        ({"head_size": None}, "XQA"),
        ({"head_size": 64}, GATHERED),
        ({"head_size": 128}, "XQA"),
        ({"head_size": 128, "minor": 30}, GATHERED),
        ({"head_size": 128, "cache_dtype": "float8e4m3fn"}, GATHERED),
        ({"head_size": 128, "tokens": 18, "max_query": 9}, GATHERED),
        ({"max_query": 2}, "XQA"),
        ({"max_query": 1}, GATHERED),
        ({"max_query": 0}, "XQA"),
        ({"max_query": 0, "tokens": 9}, GATHERED),
        ({"max_query": 0, "tokens": 8}, "XQA"),
        ({"max_query": 9, "tokens": 6}, "XQA"),
        ({"max_query": 8, "tokens": 16}, "XQA"),
        ({"max_query": 9, "tokens": 18}, GATHERED),
        ({"max_query": None, "tokens": 18}, "XQA"),
        ({"softcapped": True}, GATHERED),
    ],
)
def test_speculative_xqa(changes: dict[str, object], backend: str) -> None:
    assert chosen(**(SPECULATIVE | changes)) == backend


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "paged decode"),
        ({"max_query": 8, "tokens": 99}, "paged decode"),
        ({"max_query": 9, "tokens": 99}, GATHERED),
        ({"max_query": 1}, GATHERED),
        ({"max_query": 0}, "paged decode"),
        ({"max_query": 0, "tokens": 9}, GATHERED),
        ({"metadata": False}, GATHERED),
        ({"metadata": False, **ONE}, "paged decode"),
        ({"max_query": 0, "tokens": None}, "paged decode"),
        ({"max_query": 9, "tokens": None}, "paged decode"),
        ({"max_query": None, "tokens": 99}, "paged decode"),
        ({"group_size": 6, "head_size": 256, "dtype": "float16", "per_channel": True, **ONE}, "XQA"),
        ({"group_size": 6, "head_size": None, "dtype": "float16", "per_channel": True, **ONE}, "XQA"),
        ({"group_size": 6, "head_size": 256, "dtype": "float16", **ONE}, "paged decode"),
        ({"group_size": 6, "head_size": 256, "per_channel": True, **ONE}, "paged decode"),
        ({"group_size": 6, "head_size": 128, "dtype": "float16", "per_channel": True, **ONE}, "paged decode"),
        ({"group_size": 8, "head_size": 256, "dtype": "float16", "per_channel": True, **ONE}, "paged decode"),
    ],
)
def test_int4(changes: dict[str, object], backend: str) -> None:
    assert chosen(**(INT4 | changes)) == backend


def reasons(backend: str, **changes: object) -> tuple[str, ...]:
    verdicts = explain(replace(BASE, **changes))  # type: ignore[arg-type]
    return next(verdict.reasons for verdict in verdicts if verdict.backend == backend)


def test_reasons_name_the_numbers() -> None:
    assert reasons("Flash", block_size=16) == ("block size 16 is not a multiple of 128",)
    assert reasons("Flash", head_size=300, sm=75) == ("sm_75 is below sm_80", "head size 300 is above 256")
    assert reasons("paged decode", **ONE) == ("Flash is tried first",)
    assert reasons("memory-efficient", sink=True) == (NO_SINK,)
    assert reasons("Flash", head_size=257, block_size=16) == ("head size 257 is above 256",)
    assert reasons(GATHERED, head_size=257, cache_dtype="int8") == ("head size 257 is above 256",)
    assert reasons("memory-efficient", sink=True, block_size=16) == (NO_SINK,)
    assert len(reasons("cuDNN", **ONE)) == 1
    assert set(reasons("cuDNN", minor=30, sm=80, sink=True, windowed=True, softcapped=True, causal=False)) > {
        "ORT has it from 1.31",
        "sm_80 is below sm_90",
        "head_sink is given",
        "a window is set",
        "softcap is set",
        "the mask is not causal",
    }
    assert "attention_metadata is not given" in reasons("cuDNN", metadata=False)
    assert "not one new token for each sequence" in reasons("cuDNN")


def test_what_is_not_said_of_a_problem_rules_nothing_out() -> None:
    bare = Problem(31, 90, "bfloat16", "bfloat16", False, 128, 128, 128, 6, 2)
    assert (bare.sink, bare.causal, bare.metadata, bare.max_query) == (False, True, False, None)
    assert (bare.group_size, bare.windowed, bare.softcapped, bare.per_channel) == (1, False, False, False)


def test_every_backend_is_tried_while_the_tokens_are_open() -> None:
    tried = [verdict.backend for verdict in explain(replace(BASE, cache_dtype="int8", tokens=None))]
    assert tried == ["XQA", "paged decode", GATHERED, "memory-efficient"]


def test_a_call_describes_its_problem() -> None:
    from paged_schema import PagedAttentionAttributes, PagedAttentionInputs, check
    from paged_schema.testing import bases

    attributes, inputs = bases.separate()
    call = check(PagedAttentionAttributes(**attributes), PagedAttentionInputs(**inputs))
    problem = backends.problem_of(call, sm=89, tokens=99, batch=99)
    assert (problem.tokens, problem.batch, problem.sm, problem.minor, problem.group_size) == (3, 2, 89, 31, 4)
    attributes, inputs = bases.latent()
    call = check(
        PagedAttentionAttributes(**attributes, softcap=1.0, local_window_size=4),
        PagedAttentionInputs(**(inputs | {"query": "bf16[t, 768]", "key": "bf16[t, 192]"})),
    )
    problem = backends.problem_of(call, tokens=7)
    assert problem.sm == 80
    assert backends.explain_call(call) == explain(backends.problem_of(call, sm=80))
    half = replace(
        call, layout="SEPARATE", cache_dtype="int8", head_size=128, block_size=128, group_size=8, batch=2
    )
    default = backends.explain_call(replace(half, softcap=0.0, tokens=2, has_metadata=False))
    assert [verdict.backend for verdict in default if verdict.serves] == ["XQA"]
    assert "sm_80" in str(backends.explain_call(replace(half, cache_dtype="float8e4m3fn")))
    assert (problem.latent, problem.tokens, problem.windowed, problem.softcapped) == (True, 7, True, True)
    assert not problem.per_channel
    kinds = ("PER_CHANNEL", "PER_TENSOR", "NONE")
    for k, v in [(k, v) for k in kinds for v in kinds]:
        quantised = backends.problem_of(replace(call, k_quant_type=k, v_quant_type=v))
        assert quantised.per_channel == (k == "PER_CHANNEL" and v == "PER_CHANNEL")
    assert backends.problem_of(replace(call, local_window_size=1)).windowed
    bare = backends.problem_of(replace(call, local_window_size=-1, softcap=0.0))
    assert (bare.windowed, bare.softcapped) == (False, False)

"""Bad input: the schema's errors first, ours next, and never a changed cache."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from paged_oracle import UnusableArrayError, UnusableOptionError, paged_attention
from paged_oracle.testing import make_case
from paged_schema import InvalidArgument


def test_the_schema_refuses_first_and_nothing_is_written() -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32)
    inputs = case.fresh() | {"value": case.inputs["key"]}
    with pytest.raises(InvalidArgument) as caught:
        paged_attention(case.attributes, inputs)
    assert (caught.value.rule, caught.value.subject) == ("R03b", "value")
    assert inputs["key_cache"].tobytes() == case.inputs["key_cache"].tobytes()


def test_float32_is_admitted_by_name_only() -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32, dtype="float32")
    with pytest.raises(InvalidArgument) as caught:
        paged_attention(case.attributes, case.inputs)
    assert caught.value.stage == "load"
    paged_attention(case.attributes, case.inputs, extensions=frozenset({"float32"}))


def test_the_release_decides() -> None:
    case = make_case(new=[2], past=[5], layout="SEPARATE", cache_dtype="uint8", num_heads=2, head_size=32)
    paged_attention(case.attributes, case.inputs, ort="1.30")
    with pytest.raises(InvalidArgument):
        paged_attention(case.attributes, case.inputs, ort="1.29")


@pytest.mark.parametrize("name", ["query", "past_seqlens"])
def test_types_that_the_operator_does_not_have(name: str) -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32)
    inputs = case.fresh()
    inputs[name] = inputs[name].astype(np.float64 if name == "query" else np.int64)
    with pytest.raises(InvalidArgument):
        paged_attention(case.attributes, inputs)


@pytest.mark.parametrize("metadata", [[-1, 0], [0, -1], [0, 10, 11]])
def test_metadata_that_onnx_runtime_reads_and_refuses(metadata: list[int]) -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32)
    inputs = case.fresh() | {"attention_metadata": np.array(metadata, np.int32)}
    with pytest.raises(InvalidArgument) as caught:
        paged_attention(case.attributes, inputs)
    assert caught.value.rule == "P05"


def test_a_batch_without_any_key_is_refused_where_lengths_are_read() -> None:
    case = make_case(new=[2], past=[0], layout="SEPARATE", num_heads=2, head_size=32)
    inputs = case.fresh() | {"cumulative_sequence_length": np.zeros(2, np.int32)}
    with pytest.raises(InvalidArgument) as caught:
        paged_attention(case.attributes, inputs)
    assert caught.value.rule == "P07"


@pytest.mark.parametrize("layout", ["LATENT", "SEPARATE"])
def test_a_call_that_runs_out_of_memory_puts_the_caches_back(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(new=[2, 3], past=[5, 0], num_heads=2, head_size=32, layout=layout)
    inputs = case.fresh() | {"slot_mapping": np.array([3, 3, -1, 4, 5], np.int32)}

    def fail(*_: object) -> None:
        changed = inputs["key_cache"].tobytes() != case.inputs["key_cache"].tobytes()
        raise MemoryError(changed)

    monkeypatch.setattr("paged_oracle.softmax.RunningSoftmax.add", fail)
    with pytest.raises(MemoryError) as caught:
        paged_attention(case.attributes, inputs)
    assert caught.value.args == (True,)
    for name in ("key_cache", "value_cache"):
        if name in inputs:
            assert inputs[name].tobytes() == case.inputs[name].tobytes()


def test_inputs_must_be_arrays() -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32)
    inputs = case.fresh() | {"past_seqlens": [5]}
    with pytest.raises(UnusableArrayError, match="past_seqlens"):
        paged_attention(case.attributes, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        lambda array: np.ma.masked_array(array, mask=array > 0),
        lambda array: array.view(np.matrix),
        lambda array: array.astype(array.dtype.newbyteorder()),
    ],
    ids=["masked", "matrix", "byte order"],
)
def test_arrays_must_be_plain(change: Callable[[np.ndarray], np.ndarray]) -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32, dtype="float16")
    inputs = case.fresh()
    inputs["query"] = change(inputs["query"])
    with pytest.raises(UnusableArrayError, match="query"):
        paged_attention(case.attributes, inputs)
    assert inputs["key_cache"].tobytes() == case.inputs["key_cache"].tobytes()


def test_a_cache_may_be_a_mapped_file(tmp_path: Path) -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32, dtype="float16")
    inputs = case.fresh()
    cache = np.memmap(tmp_path / "cache", np.float16, "w+", shape=inputs["key_cache"].shape)
    cache[...] = inputs["key_cache"]
    outputs = paged_attention(case.attributes, inputs | {"key_cache": cache})
    expected = paged_attention(case.attributes, inputs)
    assert outputs.key_cache is cache
    assert cache.tobytes() == expected.key_cache.tobytes()
    assert outputs.output.tobytes() == expected.output.tobytes()


@pytest.mark.parametrize("ort", ["1.29", "1.30"])
def test_a_query_that_old_releases_misread(ort: str) -> None:
    """They round its head size down and check no further."""
    case = make_case(new=[2], past=[5], layout="SEPARATE", kv_num_heads=2, head_size=32)
    inputs = case.fresh()
    inputs["query"] = np.pad(inputs["query"], ((0, 0), (0, 1)))
    with pytest.raises(UnusableArrayError, match="width 129"):
        paged_attention(case.attributes, inputs, ort=ort)
    with pytest.raises(InvalidArgument):
        paged_attention(case.attributes, inputs)
    assert inputs["key_cache"].tobytes() == case.inputs["key_cache"].tobytes()


def test_a_cache_must_be_writable() -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32)
    inputs = case.fresh()
    inputs["key_cache"].flags.writeable = False
    with pytest.raises(UnusableArrayError, match="read-only"):
        paged_attention(case.attributes, inputs)


def test_an_unknown_input_is_refused() -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32)
    with pytest.raises(InvalidArgument):
        paged_attention(case.attributes, case.fresh() | {"attention_bias": np.zeros(3, np.float16)})


def test_attributes_may_be_a_mapping() -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32)
    given = case.attributes.model_dump(exclude_none=True)
    mapped = paged_attention(given, case.fresh())
    assert mapped.output.tobytes() == paged_attention(case.attributes, case.fresh()).output.tobytes()
    with pytest.raises(InvalidArgument) as caught:
        paged_attention(given | {"num_heads": "two"}, case.fresh())
    assert caught.value.rule == "L02"


def test_none_is_an_absent_input() -> None:
    case = make_case(new=[2], past=[5], num_heads=2, head_size=32)
    plain = paged_attention(case.attributes, case.fresh())
    named = paged_attention(case.attributes, case.fresh() | {"value": None, "slot_mapping": None})
    assert named.output.tobytes() == plain.output.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "float"},
        {"backend": "triton"},
        {"backend": "flash"},
        {"backend": "flash", "rounding": "exact", "layout": "SEPARATE"},
        {"backend": "cudnn", "layout": "SEPARATE", "sink": "yes"},
    ],
)
def test_options_that_do_not_exist_or_fit(options: dict[str, str]) -> None:
    layout, sink = options.pop("layout", "LATENT"), options.pop("sink", "") == "yes"
    case = make_case(new=[2], past=[5], num_heads=2, block_size=256, layout=layout, sink=sink)
    inputs = case.fresh()
    with pytest.raises(UnusableOptionError):
        paged_attention(case.attributes, inputs, **options)  # type: ignore[arg-type]
    assert inputs["key_cache"].tobytes() == case.inputs["key_cache"].tobytes()


@pytest.mark.parametrize(
    "error",
    [UnusableArrayError("key", "list", "a NumPy array"), UnusableOptionError("backend", "x", "one of y")],
)
def test_errors_travel(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cuda import ArgumentMismatch, Bounds, Device, DeviceArray
from paged_cuda.testing import FakeDriver

Make = Callable[..., Any]
REQUIRED = (
    "query",
    "key",
    "key_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "output",
)


@pytest.fixture
def attempt(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> Callable[..., ArgumentMismatch]:
    call = make_call()
    op = make_operator(call).prepare()

    def run(**changed: Any) -> ArgumentMismatch:
        launches = len(driver.launched)
        with pytest.raises(ArgumentMismatch) as caught:
            op.run(**{**make_operands(call), **changed}, stream=7)
        assert len(driver.launched) == launches
        return caught.value

    return run


def array(device: Device, *shape: int, dtype: str = "bfloat16") -> DeviceArray:
    return DeviceArray.empty(shape, dtype, device)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "rule"),
    [
        ("query", (3, 4 * 192), "float16", "dtype"),
        ("query", (3, 4 * 192 - 8), "bfloat16", "shape"),
        ("query", (3, 4, 192), "bfloat16", "rank"),
        ("key", (2, 192), "bfloat16", "shape"),
        ("key_cache", (8, 16, 2, 192), "bfloat16", "shape"),
        ("key_cache", (8, 32, 1, 192), "bfloat16", "extent"),
        ("key_cache", (8, 16, 192), "bfloat16", "rank"),
        ("cumulative_sequence_length", (2,), "int32", "shape"),
        ("cumulative_sequence_length", (3,), "int64", "dtype"),
        ("past_seqlens", (5,), "int32", "bounds"),
        ("block_table", (3, 4), "int32", "shape"),
        ("cos_cache", (64, 16), "bfloat16", "shape"),
        ("sin_cache", (32, 32), "bfloat16", "shape"),
        ("output", (3, 4 * 192), "bfloat16", "shape"),
        ("lse", (3, 5), "float32", "shape"),
        ("lse", (3, 4), "float16", "dtype"),
        ("slot_mapping", (3,), "int32", "presence"),
    ],
)
def test_wrong_geometry_is_refused_by_name(
    attempt: Any, device: Device, name: str, shape: tuple[int, ...], dtype: str, rule: str
) -> None:
    error = attempt(**{name: array(device, *shape, dtype=dtype)})
    assert error.rule == rule
    assert name in error.subject or error.subject in ("batch", "block_size")


@pytest.mark.parametrize("name", [*REQUIRED, "cos_cache", "sin_cache"])
def test_missing_arrays_are_refused(attempt: Any, name: str) -> None:
    assert name in str(attempt(**{name: None}))


@pytest.mark.parametrize("name", REQUIRED)
def test_host_memory_is_refused(attempt: Any, name: str) -> None:
    error = attempt(**{name: np.zeros(3, np.int32)})
    assert (error.rule, error.subject) == ("host-memory", name)
    assert "from_numpy" in error.expected


def test_tokens_beyond_the_bounds_are_refused(attempt: Any, device: Device) -> None:
    error = attempt(query=array(device, 17, 4 * 192), key=array(device, 17, 192))
    assert (error.rule, error.got) == ("bounds", 17)


def test_cache_output_is_the_cache(attempt: Any, device: Device) -> None:
    assert attempt(key_cache_out=array(device, 8, 16, 1, 192)).rule == "alias"


def test_cache_output_may_be_the_cache(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    operands = make_operands(call)
    make_operator(call).prepare().run(**operands, key_cache_out=operands["key_cache"], stream=7)
    assert len(driver.launched) == 2


def test_output_over_an_input_is_refused(attempt: Any, device: Device) -> None:
    query = array(device, 3, 4 * 192)
    inside = DeviceArray(query.pointer + 512, (3, 512), (512, 1), "bfloat16", 0)
    assert attempt(query=query, output=inside).rule == "overlap"


def test_arrays_of_another_gpu_are_refused(attempt: Any) -> None:
    other = Device(FakeDriver(devices=2), 1)
    assert attempt(key=array(other, 3, 192)).rule == "device"


def test_unaligned_cache_is_refused(attempt: Any, device: Device) -> None:
    cache = array(device, 9, 16, 1, 192)
    moved = DeviceArray(cache.pointer + 2, (8, 16, 1, 192), (3072, 192, 192, 1), "bfloat16", 0, cache)
    assert attempt(key_cache=moved).rule == "alignment"


@pytest.mark.parametrize(
    ("strides", "legal"),
    [
        ((16 * 192, 192, 192, 1), True),
        ((2 * 16 * 192, 192, 192, 1), True),
        ((16 * 256, 256, 256, 1), True),
        ((192, 8 * 192, 192, 1), True),
        ((16 * 192, 192, 7, 1), True),
        ((16 * 192, 192, 192, 2), False),
        ((16 * 192, 184, 192, 1), False),
        ((16 * 192 - 8, 192, 192, 1), False),
        ((16 * 200 + 4, 200, 200, 1), False),
    ],
)
def test_strided_caches(
    driver: FakeDriver,
    device: Device,
    make_call: Make,
    make_operands: Make,
    make_operator: Make,
    strides: tuple[int, ...],
    legal: bool,
) -> None:
    call = make_call()
    memory = array(device, 8 * 2 * 16 * 256)
    cache = DeviceArray(memory.pointer, (8, 16, 1, 192), strides, "bfloat16", 0, memory)
    op = make_operator(call).prepare()
    operands = {**make_operands(call), "key_cache": cache}
    if legal:
        op.run(**operands, stream=7)
    else:
        with pytest.raises(ArgumentMismatch, match="strides"):
            op.run(**operands, stream=7)
    assert len(driver.launched) == (2 if legal else 0)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_extent_never_reaches_the_kernel(
    data: st.DataObject,
    driver: FakeDriver,
    device: Device,
    make_call: Make,
    make_operands: Make,
    make_operator: Make,
) -> None:
    """One extent of one array off by something: refused, and a good run after it still works."""
    call = make_call(slots=True)
    op, operands = make_operator(call).prepare(), make_operands(call)
    name = data.draw(st.sampled_from(sorted(operands)))
    shape = list(operands[name].shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape[axis] = data.draw(st.integers(0, 40).filter(lambda extent: extent != shape[axis]))
    free = {("key_cache", 0), ("block_table", 1)}
    changed = DeviceArray.empty(shape, operands[name].dtype, device)
    if (name, axis) not in free:
        with pytest.raises(ArgumentMismatch):
            op.run(**{**operands, name: changed}, stream=7)
    launches = len(driver.launched)
    op.run(**operands, stream=7)
    assert len(driver.launched) == launches + 2


def test_extents_fixed_by_the_call_are_enforced(make_call: Make) -> None:
    call = make_call()
    with pytest.raises(ArgumentMismatch, match="max_tokens = 4"):
        Bounds(max_batch=1, max_tokens=4, max_context=1).admit(_Fixed(call, tokens=5))


class _Fixed:
    """A call with one extent replaced; `check` makes calls, tests only bend them."""

    def __init__(self, call: Any, **changed: Any) -> None:
        self.__dict__.update({name: getattr(call, name) for name in call.__slots__}, **changed)


@pytest.mark.parametrize(
    "name",
    ["cumulative_sequence_length", "past_seqlens", "block_table", "cos_cache", "sin_cache", "output", "lse"],
)
def test_an_address_between_elements_is_refused(
    name: str, device: Device, make_call: Make, make_operands: Make, attempt: Callable[..., ArgumentMismatch]
) -> None:
    """On the device it would be a fault that takes the context along."""
    given = make_operands(make_call()).get(name) or array(device, 3, 4, dtype="float32")
    odd = DeviceArray(given.pointer + 1, given.shape, given.strides, given.dtype, given.ordinal, given)
    error = attempt(**{name: odd})
    assert (error.rule, error.subject) == ("alignment", name)


@pytest.mark.parametrize("metadata", [(), (1,), (1, 2, 3, 4), (-1, 2), (1.5, 2), "ab", 5])
def test_metadata_is_two_or_three_integers(metadata: Any, attempt: Callable[..., ArgumentMismatch]) -> None:
    assert attempt(attention_metadata=metadata).rule == "metadata"


@pytest.mark.parametrize("name", ["query", "key", "key_cache", "output"])
def test_log_sums_may_not_lie_over_another_array(
    name: str, device: Device, make_call: Make, make_operands: Make, attempt: Callable[..., ArgumentMismatch]
) -> None:
    other = make_operands(make_call())[name]
    over = DeviceArray(other.pointer, (3, 4), (4, 1), "float32", device.ordinal, other)
    error = attempt(**{name: other, "lse": over})
    assert (error.rule, error.subject, error.got) == ("overlap", "lse", f"memory of {name}")

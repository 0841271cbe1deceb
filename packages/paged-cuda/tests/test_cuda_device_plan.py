from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cuda import ArgumentMismatch, Bounds, Device, DeviceIndexPlan
from paged_cuda.testing import FakeDriver

BOUNDS = Bounds(max_batch=5, max_tokens=24, max_context=128)


@dataclass(frozen=True)
class HostPlan:
    block_table: Any
    slot_mapping: Any
    cumulative_sequence_length: Any
    past_seqlens: Any


def host_plan(lengths: list[int], past: list[int], columns: int = 8) -> HostPlan:
    rng = np.random.default_rng(sum(lengths) + len(past))
    tokens = sum(lengths)
    return HostPlan(
        rng.integers(-1, 99, (len(lengths), columns), dtype=np.int32),
        rng.integers(-1, 999, tokens, dtype=np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        np.array(past, np.int32),
    )


def on_device(plan: DeviceIndexPlan) -> dict[str, Any]:
    return {name: array.to_numpy(0) for name, array in plan.arrays._asdict().items()}


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100)), max_size=5), min_size=1, max_size=4
    )
)
def test_the_device_holds_the_plan_and_harmless_padding(
    device: Device, steps: list[list[tuple[int, int]]]
) -> None:
    plan = DeviceIndexPlan(BOUNDS, 16, device=device)
    addresses = [array.pointer for array in plan.arrays]
    for step in steps:
        host = host_plan([length for length, _ in step], [past for _, past in step])
        plan.upload(host, 7)
        batch, tokens = len(step), int(host.cumulative_sequence_length[-1])
        found = on_device(plan)
        np.testing.assert_array_equal(found["block_table"][:batch], host.block_table)
        np.testing.assert_array_equal(found["slot_mapping"][:tokens], host.slot_mapping)
        assert (found["slot_mapping"][tokens:] == -1).all()
        np.testing.assert_array_equal(
            found["cumulative_sequence_length"][: batch + 1], host.cumulative_sequence_length
        )
        assert (found["cumulative_sequence_length"][batch:] == tokens).all()
        np.testing.assert_array_equal(found["past_seqlens"][:batch], host.past_seqlens)
        assert (found["past_seqlens"][batch:] == 0).all()
    assert [array.pointer for array in plan.arrays] == addresses


def test_one_copy_an_upload_and_no_allocation(driver: FakeDriver, device: Device) -> None:
    plan = DeviceIndexPlan(BOUNDS, 16, device=device)
    before = driver.calls.copy()
    for _ in range(4):
        plan.upload(host_plan([1, 2], [3, 4]), 7)
    spent = driver.calls - before
    assert (spent["copy_to_device"], spent["allocate"], spent["allocate_pinned"]) == (4, 0, 0)
    assert spent["synchronize"] == 0
    # A staging buffer is filled again only after its last copy.
    assert (spent["record_event"], spent["wait_event"]) == (4, 2)


def test_an_upload_inside_a_capture_is_refused(driver: FakeDriver, device: Device) -> None:
    plan = DeviceIndexPlan(BOUNDS, 16, device=device)
    driver.begin_capture(7)
    with pytest.raises(ArgumentMismatch, match="under capture"):
        plan.upload(host_plan([1], [3]), 7)
    driver.end_capture(7)
    plan.upload(host_plan([1], [3]), 7)


def test_narrow_tables_are_padded_with_unmapped_pages(device: Device) -> None:
    plan = DeviceIndexPlan(BOUNDS, 16, device=device)
    plan.upload(host_plan([1], [3], columns=8), 7)
    plan.upload(host_plan([1], [3], columns=2), 7)
    assert (on_device(plan)["block_table"][0, 2:] == -1).all()


@pytest.mark.parametrize(
    ("host", "rule"),
    [
        (host_plan([1] * 6, [0] * 6), "bounds"),
        (host_plan([25], [0]), "bounds"),
        (host_plan([1], [0], columns=9), "bounds"),
        (host_plan([1], [128]), "bounds"),
        (host_plan([1], [-1]), "past"),
        (
            replace(host_plan([2, 1], [0, 0]), cumulative_sequence_length=np.array([0, 3, 2], np.int32)),
            "cumulative",
        ),
        (replace(host_plan([2, 1], [0, 0]), cumulative_sequence_length=np.array([0, 3], np.int32)), "shape"),
        (replace(host_plan([2], [0]), cumulative_sequence_length=np.array([0, 3], np.int32)), "cumulative"),
        (replace(host_plan([2], [0]), past_seqlens=np.zeros(1, np.int64)), "dtype"),
        (replace(host_plan([2], [0]), block_table=np.zeros((2, 4), np.int32)), "shape"),
    ],
)
def test_a_bad_plan_changes_nothing(device: Device, host: HostPlan, rule: str) -> None:
    plan = DeviceIndexPlan(BOUNDS, 16, device=device)
    plan.upload(host_plan([3, 1], [5, 9]), 7)
    before = on_device(plan)
    with pytest.raises(ArgumentMismatch) as caught:
        plan.upload(host, 7)
    assert caught.value.rule == rule
    for name, array in on_device(plan).items():
        np.testing.assert_array_equal(array, before[name])


def test_columns_follow_the_bounds(device: Device) -> None:
    assert DeviceIndexPlan(BOUNDS, 16, device=device).arrays.block_table.shape == (5, 8)
    assert DeviceIndexPlan(BOUNDS, 16, columns=3, device=device).arrays.block_table.shape == (5, 3)


@pytest.mark.parametrize(
    ("block_size", "columns"), [(0, None), (-16, None), (16.0, None), (True, None), (16, -1), (16, 2.0)]
)
def test_a_block_size_or_width_that_is_none_is_refused(block_size: Any, columns: Any, device: Device) -> None:
    with pytest.raises(ArgumentMismatch):
        DeviceIndexPlan(Bounds(4, 16, 64), block_size, columns=columns, device=device)

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from paged_cuda import (
    ArgumentMismatch,
    Bounds,
    Device,
    DeviceArray,
    DeviceIndexPlan,
    NotPrepared,
    PagedAttention,
    Workspace,
)
from paged_cuda.params import AttentionParams
from paged_cuda.testing import FAKE_GPU, FakeDriver
from paged_schema import NotImplementedMode, PagedAttentionAttributes, PagedAttentionInputs, check

Make = Callable[..., Any]
HOST_SIDE = ("allocate", "free", "synchronize", "load_module", "copy_to_host", "copy_to_device", "wait_event")


def launched_params(driver: FakeDriver, index: int = -1) -> AttentionParams:
    return AttentionParams.from_buffer_copy(driver.launched[index].params)


def test_run_launches_append_then_attend_and_nothing_else(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op, operands = make_operator(call).prepare(), make_operands(call)
    before = driver.calls.copy()
    for _ in range(5):
        op.run(**operands, stream=7)
    spent = driver.calls - before
    assert spent["launch"] == 10
    assert not any(spent[name] for name in HOST_SIDE)
    assert [launch.symbol for launch in driver.launched[:2]] == ["append_bf16", "baseline_latent_bf16"]
    assert {launch.stream for launch in driver.launched} == {7}
    assert spent["enter_context"] == 5
    assert not spent["push_context"]


def test_somebody_elses_context_is_current_again_after_a_run(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op, operands = make_operator(call).prepare(), make_operands(call)
    for others in ([], [op.device.context], [99]):
        driver.contexts[:] = others
        before = driver.calls.copy()
        op.run(**operands, stream=7)
        spent = driver.calls - before
        assert driver.contexts == (others or [op.device.context])
        assert spent["push_context"] == spent["pop_context"] == (others == [99])
    driver.contexts.clear()


def test_params_carry_the_call_and_the_arrays(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call(slots=True, softcap=30.0, local_window_size=17, is_causal=0, rotary_interleaved=1)
    operands = make_operands(call)
    make_operator(call).prepare().run(**operands, stream=7)
    params = launched_params(driver)
    assert params.query == operands["query"].pointer
    assert params.slot_mapping == operands["slot_mapping"].pointer
    assert (params.tokens, params.batch, params.max_blocks, params.num_blocks) == (3, 2, 4, 8)
    assert (params.block_shift, params.num_heads, params.head_size, params.v_head_size) == (4, 4, 192, 128)
    assert (params.rotary_dim, params.rotary_offset, params.rotary_rows) == (64, 128, 64)
    assert (params.rotary_interleaved, params.local_window_size, params.causal) == (1, 17, 0)
    assert params.softcap == 30.0
    assert params.scale == np.float32(192**-0.5)
    assert (params.page_stride, params.row_stride, params.query_stride) == (16 * 192, 192, 4 * 192)
    assert params.lse == 0


def test_addresses_follow_each_run(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op, first, second = make_operator(call).prepare(), make_operands(call), make_operands(call, tokens=5)
    op.run(**first, stream=7)
    op.run(**second, stream=7)
    assert launched_params(driver, 1).output == first["output"].pointer
    assert launched_params(driver, 3).output == second["output"].pointer
    assert (launched_params(driver, 1).tokens, launched_params(driver, 3).tokens) == (3, 5)


def test_fresh_arrays_in_old_places_are_looked_at_again(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op = make_operator(call).prepare()
    for tokens in (3, 5, 3, 0, 3, 1):
        launches, operands = len(driver.launched), make_operands(call, tokens=tokens)
        for _ in range(2):
            op.run(**operands, stream=7)
        for index in range(launches, len(driver.launched)):
            params = launched_params(driver, index)
            assert (params.tokens, params.key) == (tokens, operands["key"].pointer)
        del operands


def test_a_refused_run_leaves_nothing_behind(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op, good, longer = make_operator(call).prepare(), make_operands(call), make_operands(call, tokens=5)
    op.run(**good, stream=7)
    for _ in range(2):
        with pytest.raises(ArgumentMismatch):
            op.run(**{**longer, "output": good["output"]}, stream=7)
    op.run(**good, stream=7)
    assert driver.launched[2:] == driver.launched[:2]


def test_launch_shape_depends_on_bounds_only(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op = make_operator(call, Bounds(max_batch=8, max_tokens=64, max_context=64)).prepare()
    for tokens in (1, 3, 40):
        op.run(**make_operands(call, tokens=tokens), stream=7)
    assert len({(launch.grid, launch.block, launch.shared_bytes) for launch in driver.launched[1::2]}) == 1
    assert driver.launched[1].shared_bytes == 64 * 12 + 4 * (192 + 128)


def test_no_tokens_means_no_launch(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    make_operator(call).prepare().run(**make_operands(call, tokens=0), stream=7)
    assert driver.launched == []


def test_cold_operator_names_what_to_prepare(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    with pytest.raises(NotPrepared, match="append_bf16, baseline_latent_bf16"):
        make_operator(call).run(**make_operands(call), stream=7)
    assert driver.launched == []


def test_prepare_twice_loads_once(driver: FakeDriver, make_call: Make, make_operator: Make) -> None:
    op = make_operator(make_call()).prepare()
    loads = driver.calls["load_module"]
    assert op.prepare() is op
    make_operator(make_call()).prepare()
    assert driver.calls["load_module"] == loads == 2


def test_unsupported_modes_are_refused_before_the_device_is_asked(cubins: Any) -> None:
    attributes = PagedAttentionAttributes(num_heads=4, kv_num_heads=2)
    inputs = PagedAttentionInputs(
        query="f16[t, 256]",
        key="f16[t, 128]",
        value="f16[t, 128]",
        key_cache="f16[b, 16, 2, 64]",
        value_cache="f16[b, 16, 2, 64]",
        cumulative_sequence_length="i32[3]",
        past_seqlens="i32[2]",
        block_table="i32[2, 4]",
    )
    with pytest.raises(NotImplementedMode):
        PagedAttention(check(attributes, inputs), Bounds(2, 16, 64), device=99, cache=cubins)


def test_unknown_kernel_is_refused(make_call: Make, make_operator: Make) -> None:
    with pytest.raises(ArgumentMismatch, match="baseline"):
        make_operator(make_call(), kernel="fastest")


def test_rows_beyond_shared_memory_are_refused_with_the_numbers(make_call: Make, make_operator: Make) -> None:
    small = Device(FakeDriver(replace(FAKE_GPU, shared_bytes=1000)), 0)
    with pytest.raises(ArgumentMismatch, match="needs 2048 bytes of shared memory a block, the GPU has 1000"):
        make_operator(make_call(), device=small)


def test_shared_workspace_must_fit_the_device(device: Device, make_call: Make, make_operator: Make) -> None:
    workspace = Workspace(device, 0)
    make_operator(make_call(), workspace=workspace).prepare()
    other = Workspace(Device(FakeDriver(devices=2), 1), 0)
    with pytest.raises(ArgumentMismatch, match="GPU 0"):
        make_operator(make_call(), workspace=other).prepare()


def test_plan_replaces_the_index_tensors(
    driver: FakeDriver, device: Device, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    bounds = Bounds(max_batch=4, max_tokens=16, max_context=64)
    for slots in (False, True):
        call = make_call(slots=slots)
        plan = DeviceIndexPlan(bounds, 16, device=device)
        operands = make_operands(call)
        for name in ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping"):
            operands.pop(name, None)
        op = make_operator(call, bounds).prepare()
        op.run(**operands, plan=plan, stream=7)
        params = launched_params(driver)
        assert params.block_table == plan.arrays.block_table.pointer
        assert (params.slot_mapping == plan.arrays.slot_mapping.pointer) is slots
        with pytest.raises(ArgumentMismatch, match="either plan"):
            op.run(**operands, plan=plan, past_seqlens=plan.arrays.past_seqlens, stream=7)


def test_debug_operator_reads_its_counters(driver: FakeDriver, make_call: Make, make_operator: Make) -> None:
    op = make_operator(make_call(), debug=True).prepare()
    assert op.violations(7).count == 0
    assert "debug" in op.explain().kernels[1].symbol
    with pytest.raises(NotPrepared):
        make_operator(make_call()).prepare().violations(7)


def test_explain_says_what_runs_and_what_it_must_move(make_call: Make, make_operator: Make) -> None:
    op = make_operator(make_call())
    assert op.explain().kernels[0].resources is None
    explained = op.prepare().explain(context_lens=[100, 50])
    assert (explained.path, explained.architecture) == ("baseline", "sm_90a")
    assert explained.floor_bytes == 2 * ((150 + 4) * 192 + 2 * 4 * (192 + 128))
    assert explained.floor_us == pytest.approx(explained.floor_bytes / 1e6)
    text = str(explained)
    assert "baseline_latent_bf16" in text
    assert "registers" in text


def test_memory_of_a_foreign_capture_outlives_the_operator(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op, operands = make_operator(call, debug=True).prepare(), make_operands(call)
    driver.begin_capture(9)
    op.run(**operands, stream=9)
    frees = driver.calls["free"]
    del op
    assert driver.calls["free"] == frees


def test_metadata_is_checked_and_changes_nothing(
    driver: FakeDriver, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    op, operands = make_operator(call).prepare(), make_operands(call)
    op.run(**operands, attention_metadata=[0, 0], stream=7)
    with pytest.raises(ArgumentMismatch, match="attention_metadata"):
        op.run(**operands, attention_metadata=[1, -1], stream=7)
    assert len(driver.launched) == 2


def test_lse_is_optional(
    driver: FakeDriver, device: Device, make_call: Make, make_operands: Make, make_operator: Make
) -> None:
    call = make_call()
    lse = DeviceArray.empty((3, 4), "float32", device)
    make_operator(call).prepare().run(**make_operands(call), lse=lse, stream=7)
    assert launched_params(driver).lse == lse.pointer


@pytest.mark.parametrize("nbytes", [-1, 1.5, None])
def test_a_workspace_has_a_number_of_bytes(nbytes: Any, driver: FakeDriver, device: Device) -> None:
    with pytest.raises(ArgumentMismatch, match="nbytes"):
        Workspace(device, nbytes)
    assert driver.calls["allocate"] == 0


def test_a_workspace_of_another_gpu_is_refused(make_call: Make, make_operator: Make) -> None:
    elsewhere = Workspace(Device(FakeDriver(devices=2), 1), 1 << 20)
    with pytest.raises(ArgumentMismatch, match="GPU 0"):
        make_operator(make_call(), workspace=elsewhere).prepare()


def test_debug_counts_can_be_read_and_forgotten(
    driver: FakeDriver, make_call: Make, make_operator: Make
) -> None:
    op = make_operator(make_call(), debug=True).prepare()
    address = next(pointer for pointer, block in driver.memory.items() if len(block) == 16 + 256)
    ctypes.memmove(address, (ctypes.c_uint64 * 2)(3, 5 << 36 | 2 << 32 | 77), 16)
    found = op.violations(7)
    assert (found.count, found.kind, found.token, found.value) == (3, "block id out of range", 5, 77)
    op.reset_violations(7)
    assert op.violations(7).count == 0

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paged_cuda import Bounds, CubinCache, Device, DeviceArray, PagedAttention
from paged_cuda.testing import FakeDriver
from paged_schema import Call, PagedAttentionAttributes, PagedAttentionInputs, check

Operands = dict[str, Any]


def latent_call(
    dtype: str = "bf16",
    heads: int = 4,
    head_size: int = 192,
    v_head_size: int = 128,
    *,
    rotary_dim: int = 64,
    slots: bool = False,
    **attributes: Any,
) -> Call:
    rotary: dict[str, Any] = {}
    if rotary_dim:
        rotary = {"do_rotary": 1, "rotary_offset": head_size - rotary_dim}
    given = PagedAttentionAttributes(
        num_heads=heads,
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=v_head_size,
        **{"scale": 192**-0.5, **rotary, **attributes},
    )
    tables = f"{dtype}[positions, {rotary_dim // 2}]" if rotary_dim else None
    inputs = PagedAttentionInputs(
        query=f"{dtype}[tokens, {heads * head_size}]",
        key=f"{dtype}[tokens, {head_size}]",
        key_cache=f"{dtype}[blocks, 16, 1, {head_size}]",
        cumulative_sequence_length="i32[starts]",
        past_seqlens="i32[batch]",
        block_table="i32[batch, columns]",
        slot_mapping="i32[tokens]" if slots else None,
        cos_cache=tables,
        sin_cache=tables,
    )
    return check(given, inputs, ort="1.31")


def operands_of(call: Call, device: Device, *, tokens: int = 3, batch: int = 2, blocks: int = 8) -> Operands:
    assert call.head_size
    assert call.v_head_size

    def empty(*shape: int, dtype: str = call.dtype) -> DeviceArray:
        return DeviceArray.empty(shape, dtype, device)

    operands: Operands = {
        "query": empty(tokens, call.num_heads * call.head_size),
        "key": empty(tokens, call.head_size),
        "key_cache": empty(blocks, 16, 1, call.head_size),
        "cumulative_sequence_length": empty(batch + 1, dtype="int32"),
        "past_seqlens": empty(batch, dtype="int32"),
        "block_table": empty(batch, 4, dtype="int32"),
        "output": empty(tokens, call.num_heads * call.v_head_size),
    }
    if call.has_slot_mapping:
        operands["slot_mapping"] = empty(tokens, dtype="int32")
    if call.rotary:
        operands |= {name: empty(64, (call.rotary_dim or 0) // 2) for name in ("cos_cache", "sin_cache")}
    return operands


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver) -> Device:
    return Device(driver, 0)


@pytest.fixture
def make_call() -> Callable[..., Call]:
    return latent_call


@pytest.fixture
def make_operands(device: Device) -> Callable[..., Operands]:
    def make(call: Call, **sizes: int) -> Operands:
        return operands_of(call, device, **sizes)

    return make


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> CubinCache:
    folder: Path = tmp_path_factory.mktemp("cubins")
    return CubinCache(folder)


@pytest.fixture
def make_operator(device: Device, cubins: CubinCache) -> Callable[..., PagedAttention]:
    def make(call: Call, bounds: Bounds | None = None, **options: Any) -> PagedAttention:
        chosen = bounds or Bounds(max_batch=4, max_tokens=16, max_context=64)
        # Most of the host side is the same for every path; tests of the split path name it.
        return PagedAttention(
            call, chosen, **{"device": device, "cache": cubins, "kernel": "baseline", **options}
        )

    return make

"""The arena of `paged_kv` over the driver of `paged_cuda`: two packages that meet by structure alone.

The GPU is a driver in host memory that refuses what a real one refuses, with its own map of addresses.
"""

import inspect
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cuda import CudaVmmDriver, Device
from paged_cuda.testing import FakeDriver
from paged_kv.errors import DriverCallFailed, RangeQuarantined
from paged_kv.vmm import (
    BasePlacement,
    CaptureGate,
    FakeVmmDriver,
    HandlePool,
    KvCacheGeometry,
    KvGrowthController,
    KvLayout,
    MappedStorage,
    MemoryGovernor,
    VmmDriver,
)

G = 2 << 20
# Two bindings of 4 granules each; 1,024 tokens fill a granule.
GEOMETRY = KvCacheGeometry.uniform(KvLayout.SEQ_MAJOR, layers=1, kv_heads=8, head_dim=128, capacity=4_096)
STREAM = 7
METHODS = sorted(name for name in vars(VmmDriver) if not name.startswith("_"))


@pytest.mark.parametrize("kind", [CudaVmmDriver, FakeVmmDriver])
@pytest.mark.parametrize("name", METHODS)
def test_both_drivers_have_the_protocols_methods(name: str, kind: type) -> None:
    wanted = inspect.signature(getattr(VmmDriver, name)).parameters
    found = inspect.signature(getattr(kind, name)).parameters
    assert [(one.name, one.kind, one.default) for one in found.values()] == [
        (one.name, one.kind, one.default) for one in wanted.values()
    ]


def cache_over(driver: FakeDriver, retain: int = 0) -> MappedStorage:
    governor = MemoryGovernor(device=1 << 30)
    holder = governor.register("cache")
    vmm: VmmDriver = CudaVmmDriver(Device(driver, 0))
    pool = HandlePool(vmm, governor, holder, retain=retain, gate=CaptureGate())
    return MappedStorage(GEOMETRY, pool, BasePlacement.GRANULE_ALIGNED)


def assert_books_agree(storage: MappedStorage, driver: FakeDriver) -> None:
    """V1 to V3, and that the driver made only what the pool or the arena knows."""
    arena, pool = storage.arena, storage.arena.pool
    arena.check()
    mapped = {arena.address + granule * G: handle for granule, handle in arena.table.handles.items()}
    assert {start: one.handle for start, one in driver.mappings.items()} == mapped
    assert len(driver.handles) == len(mapped) + pool.count + pool.num_quarantined
    assert pool.governor.account(pool.holder).mapped == arena.mapped_bytes


def life(storage: MappedStorage, check: Callable[[], None]) -> None:
    """Grow twice, shrink, grow again; every step may fail and is then done again."""
    controller = KvGrowthController(storage, min_bucket=1_024)

    def again(action: Callable[[], object]) -> None:
        try:
            action()
        except DriverCallFailed:
            check()
            action()
        check()

    again(lambda: controller.ensure(1, stream=STREAM))
    again(lambda: controller.ensure(2_000, stream=STREAM))
    again(lambda: storage.arena.fence.record(STREAM))
    again(lambda: controller.shrink(1_000))
    again(lambda: controller.commit_ahead(4_000, stream=STREAM + 1))
    again(lambda: controller.ensure(4_000, stream=STREAM))
    assert storage.physical_bytes == 8 * G


def calls_of_a_life() -> dict[str, int]:
    driver = FakeDriver(limit=1 << 30)
    storage = cache_over(driver)
    driver.calls.clear()
    life(storage, lambda: None)
    return {name: driver.calls[name] for name in METHODS if driver.calls[name]}


@pytest.mark.parametrize(("name", "count"), calls_of_a_life().items())
def test_any_call_may_fail_once(name: str, count: int) -> None:
    for number in range(1, count + 1):
        driver = FakeDriver(limit=1 << 30)
        storage = cache_over(driver)
        driver.failing[name] = number
        try:
            life(storage, lambda storage=storage, driver=driver: assert_books_agree(storage, driver))
        except RangeQuarantined:
            assert_books_agree(storage, driver)
            continue
        assert name not in driver.failing, "the call was to fail and did not come"
        storage.close()
        storage.arena.pool.close()
        if not storage.arena.pool.num_quarantined and not storage.arena.table.handles:
            assert driver.used_bytes() == 0
            assert driver.reservations == {}


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 4_096), min_size=1, max_size=8),
    retain=st.sampled_from([0, 3]),
)
def test_memory_follows_the_lengths_and_nothing_stays(lengths: list[int], retain: int) -> None:
    driver = FakeDriver(limit=1 << 30)
    storage = cache_over(driver, retain)
    for tokens in lengths:
        grown = storage.commit(tokens, STREAM)
        assert grown.billed_bytes % G == 0
        storage.shrink(tokens)
        assert_books_agree(storage, driver)
        assert storage.physical_bytes == 2 * -(-tokens // 1_024) * G
    storage.close()
    storage.arena.pool.close()
    assert driver.used_bytes() == 0
    assert driver.reservations == {}

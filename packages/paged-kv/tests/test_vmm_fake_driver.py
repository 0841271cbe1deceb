"""The fake driver refuses what a real one forbids, so what runs over it asks for nothing impossible."""

import time

import numpy as np
import pytest
from paged_kv.vmm import FakeDriverFailure, FakeVmmDriver, ImpossibleSequence

G = 4096


def mapped(driver: FakeVmmDriver, granules: int = 3) -> int:
    address = driver.reserve_addresses(granules * G, G)
    for number in range(granules):
        driver.map_handle(address + number * G, G, driver.create_handle(G))
    return address


def assert_refused(driver: FakeVmmDriver, call, *arguments, **options) -> None:
    before = len(driver.impossible)
    state = driver.mapped, driver.num_handles, driver.num_events, driver.reserved_bytes
    with pytest.raises(ImpossibleSequence):
        call(*arguments, **options)
    assert len(driver.impossible) == before + 1
    assert state == (driver.mapped, driver.num_handles, driver.num_events, driver.reserved_bytes)


def test_impossible_sequences() -> None:
    d = FakeVmmDriver(G, backed=True)
    address = mapped(d)
    free = d.reserve_addresses(2 * G, G)
    handle, wide = d.create_handle(G), d.create_handle(2 * G)
    used = d.mapped[address]
    for call, *arguments in (
        (d.reserve_addresses, G + 1, G),
        (d.reserve_addresses, 0, G),
        (d.reserve_addresses, G, 3),
        (d.free_addresses, address, 3 * G),
        (d.free_addresses, free, G),
        (d.free_addresses, free + G, G),
        (d.create_handle, G - 1),
        (d.create_handle, 0),
        (d.release_handle, used),
        (d.release_handle, 99_999),
        (d.map_handle, address, G, handle),
        (d.map_handle, free + 8, G, handle),
        (d.map_handle, free + 2 * G, G, handle),
        (d.map_handle, free, G, wide),
        (d.map_handle, free, G, 99_999),
        (d.unmap, free, G),
        (d.unmap, address + 8, G),
        (d.unmap, address, 2 * G),
        (d.set_access, free, G),
        (d.set_access, address, 4 * G),
        (d.fill, address, 0, G, 0),
        (d.fill, 12, 0, G, 0),
        (d.view, address, 8),
        (d.destroy_event, 5),
        (d.record_event, 5, 0),
        (d.event_done, 5),
        (d.wait_event, 5),
        (d.stream_wait_event, 0, 5),
        (d.free, address),
    ):
        assert_refused(d, call, *arguments)


def test_access_and_contents() -> None:
    d = FakeVmmDriver(G, backed=True)
    address = mapped(d)
    d.set_access(address, 2 * G)
    d.set_access(address + G, G, writable=False)
    assert (d.accessible(address), d.accessible(address + G), d.accessible(address + 2 * G)) == (
        True,
        False,
        False,
    )
    assert (d.view(address, 8) == 0xA5).all(), "new memory holds garbage"
    assert_refused(d, d.fill, address, 0, G + 1, 0)
    assert_refused(d, d.view, address, 2 * G + 1)
    d.fill(address + 8, 3, 16, 0)
    assert d.view(address, 32).tolist() == [0xA5] * 8 + [3] * 16 + [0xA5] * 8
    d.copy_on_device(address + 100, address + 8, 16, 0)
    assert (d.view(address + 100, 16) == 3).all()
    assert_refused(d, d.copy_on_device, address, address + 8, 16, 0)
    assert_refused(d, d.copy_on_device, address + G, address, 16, 0)
    plain = d.allocate(100)
    d.copy_on_device(plain, address + 8, 16, 0)
    assert isinstance(d.view(plain, 100), np.ndarray)
    assert_refused(d, d.view, plain, 101)
    d.free(plain)
    unbacked = FakeVmmDriver(G)
    other = mapped(unbacked)
    unbacked.set_access(other, 3 * G)
    unbacked.fill(other, 1, 3 * G, 0)
    unbacked.copy_on_device(other, other + G, 8, 0)
    assert_refused(unbacked, unbacked.view, other, 8)
    assert not FakeVmmDriver(G).mapped
    far = unbacked.reserve_addresses(G, 16 * G)
    assert far % (16 * G) == 0


def test_memory_runs_out_and_is_counted() -> None:
    d = FakeVmmDriver(G, total_bytes=3 * G)
    first = d.create_handle(2 * G)
    assert d.memory_info() == (G, 3 * G)
    for call in (lambda: d.create_handle(2 * G), lambda: d.allocate(G + 1)):
        with pytest.raises(FakeDriverFailure) as caught:
            call()
        assert caught.value.code == 2
        assert not isinstance(caught.value, ImpossibleSequence)
    assert d.impossible == []
    d.release_handle(first)
    assert d.memory_info() == (3 * G, 3 * G)


def test_what_a_capture_forbids_and_allows() -> None:
    d = FakeVmmDriver(G)
    address, event = mapped(d), d.create_event()
    d.set_access(address, 2 * G)
    d.begin_capture(1)
    for call, *arguments in (
        (d.create_handle, G),
        (d.map_handle, address, G, 1),
        (d.unmap, address, G),
        (d.set_access, address, G),
        (d.fill, address, 0, G, 0),
        (d.fill, address, 0, G, 1),
        (d.copy_on_device, address, address + G, 8, 1),
        (d.record_event, event, 1),
        (d.stream_wait_event, 1, event),
        (d.event_done, event),
        (d.wait_event, event),
        (d.destroy_event, event),
        (d.synchronize, 2),
        (d.allocate, G),
        (d.reserve_addresses, G, G),
    ):
        assert_refused(d, call, *arguments)
    assert d.granularity() == (G, G)
    d.memory_info()
    other = d.create_event()
    d.fill(address, 0, G, 2)
    d.copy_on_device(address, address + G, 8, 2)
    d.record_event(other, 2)
    d.stream_wait_event(3, other)
    d.end_capture(1)
    assert d.event_done(other)
    d.unmap(address, G)


def test_streams_events_and_what_they_wait_for() -> None:
    d = FakeVmmDriver(G)
    address = mapped(d)
    d.set_access(address, 3 * G)
    first, second, early = d.create_event(), d.create_event(), d.create_event()
    d.hold(1)
    d.record_event(early, 1)
    d.fill(address, 0, G, 1)
    d.record_event(first, 1)
    assert (d.event_done(early), d.event_done(first), d.undone(1), d.undone(2)) == (True, False, True, False)
    d.stream_wait_event(2, first)
    d.fill(address + G, 0, G, 2)
    d.record_event(second, 2)
    assert not d.event_done(second), "stream 2 is not held, and waits for stream 1"
    assert_refused(d, d.unmap, address, G)
    assert_refused(d, d.unmap, address + G, G)
    d.stream_wait_event(1, second)
    d.launch(1, address + 2 * G, G)
    assert_refused(d, d.unmap, address + 2 * G, G)
    d.wait_event(first)
    d.unmap(address, G)
    assert_refused(d, d.unmap, address + G, G)
    d.finish(2)
    assert d.event_done(second)
    d.unmap(address + G, G)
    d.synchronize(1)
    d.unmap(address + 2 * G, G)
    d.fill(d.allocate(8), 0, 8, 3)
    d.destroy_event(first)
    assert d.num_events == 2


def test_failing_calls_are_counted_from_arming_and_do_nothing() -> None:
    d = FakeVmmDriver(G)
    d.create_handle(G)
    d.arm(lambda number, name: number == 1)
    d.create_handle(G)
    with pytest.raises(FakeDriverFailure, match="call 1"):
        d.create_handle(G)
    assert (d.num_handles, d.num_calls) == (2, 2)
    d.arm(None)
    d.create_handle(G)
    assert d.num_handles == 3


def test_latency_is_slept() -> None:
    d = FakeVmmDriver(G, latency={"create_handle": 0.01})
    start = time.perf_counter()
    d.create_handle(G)
    assert time.perf_counter() - start >= 0.01

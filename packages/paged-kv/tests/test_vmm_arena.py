"""An arena commits all or nothing, in the right order, once, and gives everything back."""

import ast
import gc
import threading
from pathlib import Path

import paged_kv.vmm
import pytest
from paged_kv.errors import (
    ArenaClosed,
    CapacityUnavailable,
    CaptureInProgress,
    CommitOutOfRange,
    DriverCallFailed,
    ForeignGrant,
    ForeignHandle,
    ForeignPlan,
    GrantOpen,
    GrantSettled,
    GranularityMismatch,
    InvalidGeometry,
    InvariantViolation,
    RangeQuarantined,
    WorkInFlight,
)
from paged_kv.testing.vmm import VmmStand
from paged_kv.vmm import (
    AdmissionRefused,
    BasePlacement,
    BindingGeometry,
    DecommitOutcome,
    FakeVmmDriver,
    HandlePool,
    KvCacheGeometry,
    KvLayout,
    MemoryGovernor,
    Placement,
    VirtualArena,
)

G = 4096
SEQ = BindingGeometry(KvLayout.SEQ_MAJOR, 64, kv_heads=4, head_dim=64)  # 512 bytes a token: 8 a granule


def arena_of(stand: VmmStand, bindings: int = 2, placement=BasePlacement.GRANULE_ALIGNED) -> VirtualArena:
    geometry = KvCacheGeometry((SEQ,) * bindings)
    return stand.watch(VirtualArena(Placement.of(geometry, stand.pool.granule, placement), stand.pool))


def commit(arena: VirtualArena, tokens: int, **options):
    return arena.commit(arena.planner.plan(arena.table, tokens), **options)


def decommit(arena: VirtualArena, tokens: int) -> DecommitOutcome:
    return arena.decommit(arena.planner.shrink_plan(arena.table, tokens))


def names(stand: VmmStand) -> list[str]:
    return [name for name, _ in stand.driver.log]


def test_a_commit_is_create_map_access_zero_record_in_that_order() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    stand.driver.log.clear()
    outcome = commit(arena, 17, stream=7)
    assert (outcome.billed_bytes, outcome.created, outcome.runs, outcome.granted) == (6 * G, 6, 2, True)
    create, mapped = ["create_handle"] * 6, ["map_handle"] * 6
    assert names(stand) == [*create, *mapped, "set_access", "set_access", "fill", "fill", "record_event"]
    starts = (arena.address, arena.address + 8 * G)
    assert stand.driver.log[-5:] == [
        *(("set_access", (start, 3 * G)) for start in starts),
        *(("fill", (start, 0, 3 * G, 7)) for start in starts),
        ("record_event", (arena._ready, 7)),
    ]
    stand.assert_consistent()
    assert arena.mapped_bytes == arena.attributed_bytes == 6 * G


def test_a_run_across_bindings_gets_one_access() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand, 4, BasePlacement.PACKED)
    assert commit(arena, 64).runs == 1
    assert names(stand).count("set_access") == names(stand).count("fill") == 1
    stand.assert_consistent()


def test_committing_again_does_nothing() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    commit(arena, 17)
    stand.driver.log.clear()
    for tokens in (17, 24, 1, 0):
        outcome = commit(arena, tokens)
        assert (outcome.billed_bytes, outcome.granted) == (0, False)
    assert stand.driver.log == []
    stand.assert_consistent()


def test_neighbours_share_granules_and_the_last_one_gives_them_back() -> None:
    stand = VmmStand(G)
    small = BindingGeometry(KvLayout.SEQ_MAJOR, 3, kv_heads=1, head_dim=256)  # 1.5 KiB each
    placed = Placement.of(KvCacheGeometry((small,) * 8), G, BasePlacement.PACKED)
    arena = stand.watch(VirtualArena(placed, stand.pool))
    commit(arena, 3)
    assert arena.mapped_bytes == 3 * G
    assert arena.attributed_bytes == 10 * G
    stand.assert_consistent()
    decommit(arena, 1)
    stand.assert_consistent()
    assert decommit(arena, 0).refunded_bytes + arena.mapped_bytes <= 3 * G
    assert arena.mapped_bytes == 0
    arena.close()
    stand.assert_empty()


def test_handles_come_from_the_pool_first() -> None:
    stand = VmmStand(G, retain=3)
    arena = arena_of(stand)
    assert stand.pool.prefill(4) == 4
    assert stand.pool.prefill(4) == 0
    stand.assert_consistent()
    assert commit(arena, 17).created == 2
    assert stand.pool.count == 0
    stand.assert_consistent()
    outcome = decommit(arena, 0)
    assert (outcome.refunded_bytes, outcome.pooled, stand.driver.num_handles) == (6 * G, 3, 3)
    stand.assert_consistent()
    assert stand.pool.trim(1) == 2
    stand.assert_consistent()
    arena.close()
    stand.pool.close()
    stand.assert_empty()


def test_a_pool_keeps_no_more_than_it_retains() -> None:
    stand = VmmStand(G, retain=4)
    arena = arena_of(stand)
    commit(arena, 17)
    stand.pool.prefill(3)
    assert decommit(arena, 0) == DecommitOutcome(6 * G, pooled=1)
    assert (stand.pool.count, stand.driver.num_handles) == (4, 4)
    stand.assert_consistent()


def test_a_pool_makes_room_for_another_holder() -> None:
    stand = VmmStand(G, limit=10 * G)
    assert stand.pool.prefill(10) == 10
    assert stand.pool.prefill(11) == AdmissionRefused(G, 0, 10 * G, stand.holder.tier, "cache")
    other = stand.governor.register("other")
    with stand.governor.grant(other, 3 * G - 1) as grant:
        assert (grant.sources.unassigned, grant.sources.reserved) == (3 * G - 1, 3 * G - 1)
    assert stand.pool.count == 7
    assert stand.governor.account(stand.holder).owned == 7 * G == stand.driver.num_handles * G
    stand.assert_consistent()


def test_a_refusal_changes_nothing() -> None:
    stand = VmmStand(G, limit=5 * G)
    arena = arena_of(stand)
    refused = commit(arena, 17)
    assert refused == AdmissionRefused(6 * G, 5 * G, 5 * G, stand.holder.tier, "cache")
    assert arena.mapped_bytes == 0
    stand.assert_consistent()
    assert commit(arena, 16).billed_bytes == 4 * G


def test_a_grant_of_the_caller() -> None:
    stand, other = VmmStand(G), VmmStand(G)
    arena = arena_of(stand)
    plan = arena.planner.plan(arena.table, 17)
    with other.governor.grant(other.holder, 6 * G) as foreign, pytest.raises(ForeignGrant):
        arena.commit(plan, grant=foreign)
    with stand.governor.grant(stand.holder, 5 * G) as short:
        with pytest.raises(CapacityUnavailable) as caught:
            arena.commit(plan, grant=short)
        assert caught.value.numbers == {"granted": 5 * G, "needed": 6 * G}
        with pytest.raises(GrantOpen):
            arena.commit(plan)
    stand.assert_consistent()
    with stand.governor.grant(stand.holder, 9 * G) as grant:
        assert arena.commit(plan, grant=grant).billed_bytes == 6 * G
        assert not grant.is_open
        with pytest.raises(GrantSettled):
            arena.commit(arena.planner.plan(arena.table, 64), grant=grant)
    stand.assert_consistent()
    with stand.governor.grant(stand.holder, G) as nothing:
        assert commit(arena, 17, grant=nothing).billed_bytes == 0
        assert not nothing.is_open
    stand.assert_consistent()


def test_handles_that_a_grant_counts_on_are_not_trimmed() -> None:
    stand = VmmStand(G, limit=7 * G)
    arena = arena_of(stand)
    stand.pool.prefill(7)
    with stand.governor.grant(stand.holder, 6 * G) as grant:
        assert stand.pool.trim() == 1
        assert commit(arena, 17, grant=grant).created == 0
    stand.assert_consistent()


def test_a_pool_that_does_not_have_what_its_account_says() -> None:
    """Such as when a holder has two pools, which nobody can forbid."""
    stand = VmmStand(G, limit=6 * G)
    arena = arena_of(stand)
    other = HandlePool(stand.driver, stand.governor, stand.holder, gate=stand.gate)
    other.prefill(6)
    with pytest.raises(CapacityUnavailable) as caught:
        commit(arena, 17)
    assert caught.value.numbers == {"needed": 6 * G, "granted": 0}
    assert arena.mapped_bytes == 0
    other.close()
    stand.assert_consistent()
    assert commit(arena, 17).created == 6


def test_plans_that_are_old_or_another_arenas() -> None:
    stand = VmmStand(G)
    first, second = arena_of(stand), arena_of(stand)
    plan, shrink = first.planner.plan(first.table, 9), first.planner.shrink_plan(first.table, 0)
    for arena in (second, first):
        if arena is first:
            commit(first, 1)
        with pytest.raises(ForeignPlan):
            arena.commit(plan)
        with pytest.raises(ForeignPlan):
            arena.decommit(shrink)
    stand.assert_consistent()


def test_beyond_the_reservation_and_unknown_bindings() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    with pytest.raises(CommitOutOfRange):
        commit(arena, 65)
    assert [arena.address_of(binding) - arena.address for binding in (0, 1)] == [0, 8 * G]
    for bad in (2, -1, 1.0, None):
        with pytest.raises(InvalidGeometry):
            arena.address_of(bad)


def test_a_wrong_granule() -> None:
    stand = VmmStand(G)
    geometry = KvCacheGeometry((SEQ,))
    with pytest.raises(GranularityMismatch) as caught:
        VirtualArena(Placement.of(geometry, 2 * G), stand.pool)
    assert caught.value.numbers == {"given": 2 * G, "expected": G}
    for granule in (G // 2, 3 * G, 0):
        with pytest.raises(GranularityMismatch):
            HandlePool(stand.driver, stand.governor, stand.holder, granule)
    odd = FakeVmmDriver(3000)
    with pytest.raises(GranularityMismatch):
        HandlePool(odd, stand.governor, stand.holder)
    wide = FakeVmmDriver(G, recommended=4 * G)
    assert HandlePool(wide, stand.governor, stand.holder).granule == 4 * G
    assert HandlePool(wide, stand.governor, stand.holder, 2 * G).granule == 2 * G


def test_foreign_handles_and_handles_given_twice() -> None:
    stand = VmmStand(G, retain=9)
    stand.pool.prefill(2)
    taken = stand.pool.take(5)
    assert len(taken) == 2
    for bad in ([999], [taken[0], taken[0]]):
        with pytest.raises(ForeignHandle):
            stand.pool.give(bad)
        with pytest.raises(ForeignHandle):
            stand.pool.put_back(bad)
    with pytest.raises(ForeignHandle):
        stand.pool.destroy(999)
    with pytest.raises(ForeignHandle):
        stand.pool.close()
    stand.pool.put_back(taken)
    with pytest.raises(ForeignHandle):
        stand.pool.put_back(taken)
    stand.pool.close()
    stand.assert_empty()


def test_nothing_is_mapped_by_the_thread_that_captures() -> None:
    stand = VmmStand(G, retain=4)
    arena = arena_of(stand)
    commit(arena, 9)
    stand.pool.prefill(2)
    plan, shrink = arena.planner.plan(arena.table, 64), arena.planner.shrink_plan(arena.table, 0)
    with stand.gate.capture():
        stand.driver.begin_capture(1)
        for call in (
            lambda: arena.commit(plan),
            lambda: arena.decommit(shrink),
            lambda: stand.pool.prefill(9),
            stand.pool.trim,
            arena.close,
            lambda: arena_of(stand),
            lambda: arena.fence.launching(1).__enter__(),
            arena.wait_idle,
            arena.require_idle,
            lambda: arena.wait_ready(1),
        ):
            with pytest.raises(CaptureInProgress):
                call()
        arena.fence.record(2)  # another stream
        stand.driver.end_capture(1)
    stand.assert_consistent()
    assert arena.fence.busy() == ()
    assert arena.commit(plan).billed_bytes > 0


def test_another_threads_commit_waits_for_the_capture() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    done = threading.Event()

    def grow() -> None:
        commit(arena, 9)
        done.set()

    with stand.gate.capture():
        stand.driver.begin_capture(1)
        thread = threading.Thread(target=grow)
        thread.start()
        assert not done.wait(0.02)
        stand.driver.end_capture(1)
    thread.join()
    assert done.is_set()
    stand.assert_consistent()


def test_nothing_is_unmapped_under_work_in_flight() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    commit(arena, 17)
    stand.driver.hold(3)
    for stream in (3, 4):
        stand.driver.launch(stream)
        arena.fence.record(stream)
    for call in (lambda: decommit(arena, 0), arena.close):
        with pytest.raises(WorkInFlight) as caught:
            call()
        assert caught.value.numbers == {"streams": (3,)}
    assert commit(arena, 24).billed_bytes == 0
    assert commit(arena, 25).billed_bytes == 2 * G, "mapping needs no waiting"
    stand.assert_consistent()
    stand.driver.finish(3)
    assert decommit(arena, 0).complete
    stand.driver.launch(3)
    arena.fence.record(3)
    arena.wait_idle()
    arena.close()
    stand.assert_empty()


def test_nothing_is_unmapped_while_it_is_still_being_zeroed() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    stand.driver.hold(6)
    commit(arena, 17, stream=6)
    with pytest.raises(WorkInFlight) as caught:
        decommit(arena, 0)
    assert caught.value.numbers == {"streams": (6,)}
    stand.assert_consistent()
    arena.wait_idle()
    assert decommit(arena, 0).complete
    stand.assert_consistent()


def test_a_launch_that_could_not_be_recorded_counts_as_busy() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    commit(arena, 1)
    for failing in ("create_event", "record_event"):
        stand.driver.arm(lambda number, name, failing=failing: name == failing)
        with pytest.raises(DriverCallFailed) as caught:
            arena.fence.record(5)
        assert caught.value.numbers == {"call": failing, "phase": "fence", "code": 2}
        stand.driver.arm(None)
        with pytest.raises(WorkInFlight):
            decommit(arena, 0)
    arena.fence.record(5)
    assert decommit(arena, 0).complete
    commit(arena, 1)
    stand.driver.arm(lambda number, name: name == "record_event")
    with pytest.raises(DriverCallFailed):
        arena.fence.record(5)
    stand.driver.arm(None)
    arena.fence.wait()
    assert arena.fence.busy() == ()
    arena.close()
    stand.assert_empty()


def test_later_streams_wait_for_earlier_zeroing() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    commit(arena, 1, stream=1)
    commit(arena, 9, stream=1)
    assert "stream_wait_event" not in names(stand)
    commit(arena, 17, stream=2)
    assert stand.driver.log[-2:] == [
        ("stream_wait_event", (2, arena._ready)),
        ("record_event", (arena._ready, 2)),
    ]
    arena.wait_ready(9)
    assert stand.driver.log[-1] == ("stream_wait_event", (9, arena._ready))


def test_a_closed_arena() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    commit(arena, 17)
    plan = arena.planner.plan(arena.table, 20)
    assert arena.close() == DecommitOutcome(6 * G, 0)
    assert arena.is_closed
    assert arena.close() == DecommitOutcome(0, 0)
    waits = (arena.wait_idle, arena.require_idle, lambda: arena.wait_ready(1), lambda: arena.fence.record(1))
    for call in (lambda: arena.commit(plan), lambda: decommit(arena, 0), *waits):
        with pytest.raises(ArenaClosed):
            call()
    stand.assert_empty()


def test_the_block_waits_for_the_work_and_closes() -> None:
    stand = VmmStand(G)
    stand.driver.hold(2)
    with arena_of(stand) as arena:
        commit(arena, 17)
        stand.driver.launch(2)
        arena.fence.record(2)
    stand.assert_empty()
    with arena_of(stand) as again:
        again.close()
    stand.assert_empty()


def test_a_dropped_arena_makes_no_driver_call() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    commit(arena, 17)
    stand.arenas.clear()
    stand.driver.log.clear()
    with stand.governor.grant(stand.holder, G):
        pass
    del arena
    gc.collect()
    assert stand.driver.log == []
    assert stand.driver.num_handles == 6, "the leak can be seen, and nobody hid it"


def test_no_module_has_a_finaliser() -> None:
    folder = Path(paged_kv.vmm.__file__).parent
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert "__del__" not in functions, path.name
        assert "weakref.finalize" not in path.read_text(encoding="utf-8"), path.name


def test_check_sees_what_is_wrong() -> None:
    spoils = (
        ("V2", lambda arena: arena.table.refs.__setitem__(0, 5)),
        ("V2", lambda arena: arena.table.handles.pop(0)),
        ("V3", lambda arena: arena.pool.governor.unmapped(arena.pool.holder, G)),
    )
    for name, spoil in spoils:
        stand = VmmStand(G)
        arena = arena_of(stand, 4)
        commit(arena, 17)
        arena.check()
        spoil(arena)
        with pytest.raises(InvariantViolation) as caught:
            arena.check()
        assert caught.value.numbers["invariant"] == name


def test_a_poisoned_granule_is_never_used_again() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    commit(arena, 17)
    stand.driver.arm(lambda number, name: name == "unmap" and number == 2)
    outcome = decommit(arena, 0)
    stand.driver.arm(None)
    assert (outcome.quarantined_granules, outcome.refunded_bytes, outcome.complete) == ((1,), 5 * G, False)
    assert arena.mapped_bytes == stand.governor.account(stand.holder).mapped == G
    assert arena.attributed_bytes == 0
    stand.assert_consistent()
    assert commit(arena, 8).billed_bytes == 2 * G
    with pytest.raises(RangeQuarantined) as caught:
        commit(arena, 9)
    assert caught.value.numbers == {"granules": (1,), "needed": 2 * G}
    stand.assert_consistent()
    arena.close()
    stand.assert_consistent()
    assert stand.driver.reserved_bytes > 0, "addresses with something mapped cannot be given back"
    assert stand.driver.num_handles == 1


def test_a_handle_that_cannot_be_released_stays_owned() -> None:
    stand = VmmStand(G)
    arena = arena_of(stand)
    commit(arena, 17)
    stand.driver.arm(lambda number, name: name == "release_handle" and number % 2 == 0)
    outcome = decommit(arena, 0)
    stand.driver.arm(None)
    assert (outcome.quarantined_handles, outcome.refunded_bytes) == (3, 6 * G)
    account = stand.governor.account(stand.holder)
    assert (account.mapped, account.owned, account.quarantined) == (0, 3 * G, 3 * G)
    stand.assert_consistent()
    assert commit(arena, 17).created == 6


def test_two_governors_of_one_device_do_not_know_each_other() -> None:
    """Documented: the governor and the gate are this process's, and this object's."""
    first, second = MemoryGovernor(device=G), MemoryGovernor(device=G)
    assert first.reserve("a", G).nbytes == second.reserve("b", G).nbytes

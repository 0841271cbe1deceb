"""The parts of `paged-bench run`: names, inputs, the counted work, the clock, and what each peer refuses."""

import argparse
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_bench.errors import MeasurementError, OptionError
from paged_bench.measure.accounting import CallCounter
from paged_bench.measure.bench import Bench
from paged_bench.measure.ceilings import measure_ceilings
from paged_bench.measure.check import sampled_heads, sampled_rows
from paged_bench.measure.guard import Guard
from paged_bench.measure.inputs import Footprint, InputMaker, Pool, host_plans, layer_plan
from paged_bench.measure.kernels import ROOT
from paged_bench.measure.nvml import GpuState, Nvml, with_states
from paged_bench.measure.options import add_options, read_options
from paged_bench.measure.peers import Unsuitable, all_peers, chosen_peers, is_installed
from paged_bench.measure.recording import merged
from paged_bench.measure.suite import CaseSpec, digest
from paged_bench.measure.tables import SUITES, cases_of, decode, prefill, ragged
from paged_bench.measure.testing import IDLE, SimulatedCounters, SimulatedGpu
from paged_bench.measure.timing import Timer
from paged_bench.record import Case, Gpu, PeerRow, Samples
from paged_cuda import Device
from paged_cuda._nvrtc import compile_to_cubin
from paged_cuda.sources import kernel_source

SMALL = CaseSpec("mixed", (40, 33, 70), (1, 17, 1), 4, 192, 128, 16)


@pytest.fixture
def gpu() -> SimulatedGpu:
    return SimulatedGpu(limit=24 << 20)


@pytest.fixture
def bench(gpu: SimulatedGpu) -> Bench:
    return Bench(Device(gpu, 0), SimulatedCounters(gpu))


@st.composite
def specs(draw: st.DrawFn) -> CaseSpec:
    block_size = draw(st.sampled_from([16, 32]))
    rows = draw(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=5))
    contexts = tuple(max(context, query) for context, query in rows)
    return CaseSpec("mixed", contexts, tuple(query for _, query in rows), 3, 192, 128, block_size)


def test_names_are_those_of_records_that_exist():
    assert decode(128, 4096, 16).id == "latent/576-512/bf16/h16/p64/decode/b128/c4096"
    assert prefill(16, 192, 128).id == "latent/192-128/bf16/h16/p64/prefill/b1/c4096/q4096"
    assert ragged(128).id == "latent/576-512/bf16/h128/p64/ragged/b128/c261-8179"
    assert replace(decode(1, 4096, 16), weight_terms=1).id.endswith("/terms1")
    assert replace(decode(1, 4096, 16), split_rows=1024).id.endswith("/split1024")


@pytest.mark.parametrize("suite", SUITES)
def test_names_are_unique_and_the_digest_is_of_the_definitions_alone(suite):
    cases = cases_of(suite)
    assert len({case.id for case in cases}) == len(cases)
    assert digest(cases) == digest([replace(case, title="another") for case in cases])
    assert digest(cases) != digest(cases[1:])


def test_the_suites_hold_each_other_and_the_targets():
    quick, standard, full, tiles, small = ({case.id for case in cases_of(suite)} for suite in SUITES)
    assert standard < full
    assert not (tiles | small) & full
    assert (len(small), sum("speculative" in name for name in small)) == (120, 8)
    assert {name.replace("tile16", "tile64") for name in small} == {
        name for name in small if "tile64" in name
    }
    wanted = {
        decode(batch, context, heads).id
        for batch, context in (
            *((1, 4096), (1, 32_768), (1, 131_072), (16, 8192), (64, 4096)),
            *((128, 4096), (128, 8192), (256, 1024)),
        )
        for heads in (16, 64, 128)
    }
    wanted |= {ragged(heads).id for heads in (16, 128)} | {prefill(heads).id for heads in (16, 128)}
    wanted |= {decode(128, 4096, heads).id for heads in (12, 24, 48, 96)}
    wanted |= {decode(128, 4096, 16, block_size=size).id for size in (16, 32)}
    wanted |= {"latent/576-512/bf16/h128/p64/speculative/b128/c4096/q2"}
    wanted |= {f"latent/576-512/bf16/h{heads}/p64/mixed/b64/c4096/q1-2048" for heads in (16, 128)}
    assert wanted <= standard
    assert 10 <= len(quick) <= 20
    assert ragged(16).work.bytes == pytest.approx(615.2e6, rel=1e-3)


@given(specs())
@settings(deadline=None, max_examples=40)
def test_work_is_what_a_mask_counts(spec):
    pairs = sum(
        context - query + token + 1
        for context, query in zip(spec.context_lens, spec.query_lens, strict=True)
        for token in range(query)
    )
    assert spec.work.operations == 2 * 3 * (192 + 128) * pairs
    assert spec.work.bytes == 2 * 192 * sum(spec.context_lens)


@given(specs(), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_no_set_writes_a_page_that_another_one_reads(spec, sets):
    plans = host_plans(spec, sets)
    written = [set((plan.slot_mapping // spec.block_size).tolist()) for plan in plans]
    read = [set(plan.block_table[plan.block_table >= 0].tolist()) for plan in plans]
    for one, plan in enumerate(plans):
        assert written[one] <= read[one]
        assert not any(written[one] & read[other] for other in range(sets) if other != one)
        pages = plan.block_table[plan.block_table >= 0].tolist()
        assert len(pages) == len(set(pages)) == sum(-(-n // spec.block_size) for n in spec.context_lens)
        assert len(set(plan.slot_mapping.tolist())) == spec.tokens
        # Every token is written where its sequence's table says.
        token = 0
        for row, (context, query) in enumerate(zip(spec.context_lens, spec.query_lens, strict=True)):
            for position in range(context - query, context):
                page = plan.block_table[row, position // spec.block_size]
                assert plan.slot_mapping[token] == page * spec.block_size + position % spec.block_size
                token += 1
        assert plan.past.tolist() == np.subtract(spec.context_lens, spec.query_lens).tolist()
    again = host_plans(spec, sets)
    assert [plan.block_table.tolist() for plan in plans] == [plan.block_table.tolist() for plan in again]


@pytest.mark.parametrize("spec", [SMALL, replace(SMALL, rotary_dim=0), replace(SMALL, layers=3)])
def test_the_footprint_is_what_is_allocated(gpu, bench, spec):
    footprint = Footprint.of(spec)
    footprint = replace(footprint, sets=min(footprint.sets, 64))
    cache = Pool(bench).view(spec, footprint.cache)
    maker = InputMaker(bench, spec)
    plans = [layer_plan(spec)] * spec.layers if spec.layers > 1 else host_plans(spec, footprint.sets)
    sets = [maker.make(index, plan, cache) for index, plan in enumerate(plans)]
    assert len(sets) == footprint.sets
    arrays = {array.pointer: array.nbytes for one in sets for name, array in one.arrays.items()}
    outputs = {one.output.pointer: one.output.nbytes for one in sets}
    assert sum(outputs.values()) == footprint.outputs
    assert sum(arrays.values()) - sum(outputs.values()) - cache.nbytes == footprint.inputs
    assert cache.nbytes == footprint.cache
    highest = max(int(plan.block_table.max()) for plan in plans)
    assert highest < cache.shape[0] // spec.layers


def test_a_pool_grows_and_gives_every_case_the_same_numbers(gpu, bench):
    pool = Pool(bench)
    first = pool.view(SMALL, 64 * SMALL.page_bytes)
    before = bench.digest(first)
    again = pool.view(replace(SMALL, head_size=64), 64 * SMALL.page_bytes)
    assert first.pointer == again.pointer
    bench.fill(again, 99)  # as a case that writes to its pages
    assert bench.digest(first) != before
    assert bench.digest(pool.view(SMALL, 64 * SMALL.page_bytes)) == before
    half = pool.view(replace(SMALL, dtype="float16"), SMALL.page_bytes)
    assert (half.pointer, half.dtype, half.shape) == (first.pointer, "float16", (1, 16, 1, 192))
    assert pool.nbytes == 64 * SMALL.page_bytes
    larger = pool.view(SMALL, 65 * SMALL.page_bytes)
    assert pool.nbytes == larger.nbytes == 65 * SMALL.page_bytes


@given(specs())
@settings(deadline=None, max_examples=40)
def test_sampled_rows_are_rows_of_the_step(spec):
    rows = sampled_rows(spec)
    starts = np.cumsum([0, *spec.query_lens])
    assert {0, spec.tokens - 1} <= {row.token for row in rows}
    for row in rows:
        assert starts[row.sequence] <= row.token < starts[row.sequence + 1]
        assert spec.context_lens[row.sequence] - row.keys == starts[row.sequence + 1] - 1 - row.token


@pytest.mark.parametrize(("heads", "keys"), [(1, 10), (16, 10), (128, 4096), (128, 131_072), (3, 10**7)])
def test_sampled_heads_hold_the_first_and_the_last(heads, keys):
    found = sampled_heads(replace(SMALL, heads=heads), keys)
    assert found[0] == 0
    assert found[-1] == heads - 1
    assert len(found) <= 16
    assert found == sorted(set(found))


@pytest.mark.parametrize("name", ["read", "copy", "matmul"])
def test_a_ceiling_whose_kernel_is_wrong_is_no_ceiling(gpu, bench, monkeypatch, name):
    # What is right is left behind in memory that the next one is given.
    assert len(measure_ceilings(bench, ["bfloat16"]).all) == 4
    gpu._fresh.clear()

    def nothing(launched):
        if launched.symbol == "read":
            gpu._fresh["read", launched.params] = 0

    monkeypatch.setattr(gpu, f"_run_{name}", nothing)
    with pytest.raises(MeasurementError, match=name):
        measure_ceilings(bench, ["bfloat16"])


def test_short_graphs_repeat_their_launches_and_long_ones_do_not(gpu, bench):
    gpu.noise = 0.0
    timer, kernels = Timer(bench), bench.kernels("bfloat16")
    short = timer.graph("launch", [kernels.spin(0)] * 2)
    assert short.calls == 64
    assert short.median == pytest.approx(1.0)
    long = timer.graph("launch", [kernels.spin(1980 * 999)])
    assert (long.calls, long.median) == (1, pytest.approx(1000.0))
    assert len(long.values) == sum(long.blocks) == 15
    slow = timer.graph("launch", [kernels.spin(1980 * 99_999)])
    assert len(slow.values) == 5
    eager = timer.eager("launch", [kernels.spin(1980), kernels.spin(1980 * 3)])
    assert set(np.round(eager.values)) == {2.0, 4.0}
    assert timer.host("launch", [kernels.spin(0)]).timing == "wall"


def test_the_gpu_rests_before_each_series_that_asks_for_it(bench):
    rests = []
    timer = Timer(bench, rest=0.25, sleep=rests.append)
    spin = bench.kernels("bfloat16").spin(1980 * 10)
    timer.graph("launch", [spin])
    timer.eager("launch", [spin])
    assert rests == [0.25, 0.25]
    loaded = timer.sustained("launch", [spin] * 10)
    assert loaded.median == pytest.approx(11, rel=0.02)
    assert len(loaded.values) == 5
    assert loaded.warmups * 11 >= 200_000


def test_calls_are_counted_and_the_driver_is_itself_again(gpu):
    before = gpu.allocate
    with CallCounter(gpu) as counter:
        gpu.free(gpu.allocate(16))
        gpu.synchronize(0)
    gpu.allocate(16)
    assert (counter.allocations, counter.waits) == (2, 1)
    assert gpu.allocate == before
    assert counter.calls == Counter(allocate=1, free=1, synchronize=1)


def series(*values: float, what: str = "step") -> Samples:
    return Samples(what=what, timing="graph", values=values, blocks=(len(values),))


def test_a_later_round_becomes_a_block():
    there = Case(id="a", title="a", group="decode", series=(series(1.0, 2.0),))
    later = there.model_copy(update={"series": (series(3.0), series(4.0, what="append"))})
    found = merged(there, later)
    assert found.samples("step").in_blocks() == ((1.0, 2.0), (3.0,))
    assert found.samples("append").values == (4.0,)
    failed = Case(id="a", title="a", group="decode", failed="wrong output")
    assert merged(there, failed) is failed
    assert merged(failed, there) is failed


def test_a_peer_of_a_later_round_becomes_a_block_too():
    def case(*rows: PeerRow) -> Case:
        return Case(id="a", title="a", group="decode", peers=rows)

    first = PeerRow(peer="A", series=(series(1.0),))
    absent = PeerRow(peer="B", failed="not asked for")
    found = merged(case(first, absent), case(PeerRow(peer="A", series=(series(2.0),))))
    assert found.peers[0].series[0].in_blocks() == ((1.0,), (2.0,))
    assert found.peers[1] == absent


def test_without_the_management_library_nothing_is_known(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert Nvml().state("00" * 16) == GpuState()


def test_two_looks_become_pairs_where_both_told():
    gpu = Gpu(name="x", compute_capability="9.0", multiprocessors=1, driver="13.0")
    after = replace(IDLE, sm_clock_mhz=1755.0, throttle=("sw power cap",), driver_release="580")
    told = with_states(gpu, IDLE, after, 0)
    assert told.sm_clock_mhz == (1980.0, 1755.0)
    assert told.memory_clock_mhz is None
    assert told.throttle_reasons == ("sw power cap",)
    assert (told.driver_release, told.other_processes) == ("580", 0)


def test_processes_of_before_do_not_count_as_newcomers():
    states = iter([IDLE] * 3 + [replace(IDLE, processes=frozenset({1}))] * 2 + [IDLE])
    guard = Guard(lambda: next(states), sleep=lambda seconds: None)
    guard.before()
    guard.opened()
    guard.between()
    guard.between()  # ours may leave the list
    assert guard.notes == []


def options(*words: str):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_options(parser.parse_args(words))


def test_options_and_how_they_were_typed():
    assert options().command == "paged-bench run --suite standard"
    assert options().rounds == 3
    found = options(
        "--suite", "quick", "--only", "decode/*c4096", "--peers", "none", "--delay", "0.2", "--force"
    )
    assert found.command == (
        "paged-bench run --suite quick --only decode/*c4096 --peers none --delay 0.2 --force"
    )
    assert found.wants(decode(1, 4096, 16).id)
    assert not found.wants(decode(1, 32_768, 16).id)
    assert options("--rounds", "1").rounds == 1


@pytest.mark.parametrize(
    "words", [("--rounds", "-1"), ("--rounds", "21"), ("--delay", "-0.1"), ("--delay", "nan")]
)
def test_options_out_of_range_are_refused(words):
    with pytest.raises(OptionError, match=words[0]):
        options(*words)


def test_peers_are_chosen_by_name_and_by_what_is_installed():
    assert chosen_peers("none") == ()
    assert all(is_installed(peer) for peer in chosen_peers("auto"))
    assert len({peer.name for peer in all_peers()}) == 7


LONG = decode(64, 4096, 16)


@pytest.mark.parametrize(
    ("name", "spec", "why"),
    [
        ("flashmla", replace(LONG, head_size=192, v_head_size=128), "576/512"),
        ("flashmla", replace(LONG, block_size=16), "64 tokens"),
        ("flashmla", replace(LONG, query_lens=(2,) + (1,) * 63), "same number"),
        ("flashinfer-fa3", replace(LONG, v_head_size=128), "rotary channels"),
        ("flashinfer-fa2", replace(LONG, layers=2), "stacks"),
        ("vllm-triton", replace(LONG, query_lens=(2,) * 64), "one token"),
        ("sdpa", ragged(16), "differ in length"),
        ("sdpa", replace(LONG, query_lens=(2,) * 64), "mask"),
        ("flex", LONG, "prefill only"),
        ("ort", prefill(128), "seconds a call"),
    ],
)
def test_a_peer_refuses_what_it_does_not_serve_before_it_is_imported(bench, name, spec, why):
    (peer,) = (peer for peer in all_peers() if peer.name == name)
    with pytest.raises(Unsuitable, match=why):
        peer.prepare(bench, spec, [])


@pytest.mark.parametrize("bf16", [0, 1])
@pytest.mark.parametrize(
    ("source", "architectures"),
    [
        ("memory.cu", ("sm_80", "sm_86", "sm_90a", "sm_100", "sm_120")),
        ("matmul_mma.cu", ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")),
        ("matmul_wgmma.cu", ("sm_90a",)),
    ],
)
def test_the_kernels_compile_without_spills(source, architectures, bf16):
    for architecture in architectures:
        options = (f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", f"-DBF16={bf16}")
        log = compile_to_cubin(kernel_source(source, ROOT), source, (*options, "--ptxas-options=-v")).log
        assert "0 bytes spill stores" in log
        assert log.count("0 bytes stack frame, 0 bytes spill stores") == log.count("spill stores")
        assert "C75" not in log

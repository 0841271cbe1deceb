"""The comparison over simulated samples: what is flagged, what is not, and what is said about it."""

import io
import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_bench.compare.action import action_json
from paged_bench.compare.bootstrap import bootstrap_medians, noise_of, ratio_of_medians
from paged_bench.compare.comparison import compare
from paged_bench.compare.limits import limits
from paged_bench.compare.markdown import markdown
from paged_bench.compare.terminal import show
from paged_bench.compare.verdict import Verdict
from paged_bench.compare.words import headline
from paged_bench.errors import ComparisonError
from paged_bench.record import (
    Case,
    Environment,
    Gpu,
    Peer,
    PeerRow,
    Record,
    Revision,
    Samples,
    Suite,
)
from rich.console import Console

ENVIRONMENT = Environment(
    python="3.12.1", system="Linux 6.1 x86_64", cpu="a processor", cores=2, packages={"numpy": "2.4.6"}
)
SEEDS = st.integers(0, 2**32 - 1)


def simulated(rng, median=50.0, noise=0.05, drift=0.004, blocks=3, each=80):
    """Samples of one thing: noise from call to call, and a slow drift from block to block."""
    levels = median * np.exp(rng.normal(0, drift, blocks))
    values = np.concatenate([level * np.exp(rng.normal(0, noise, each)) for level in levels])
    return Samples(what="call", timing="wall", values=tuple(values.tolist()), blocks=(each,) * blocks)


def steady(*values, what="call", timing="wall", calls=1):
    return Samples(what=what, timing=timing, values=values, calls=calls)


def a_record(cases, **fields):
    made = tuple(
        Case(id=name, title=name.title(), group="g", series=tuple(series))
        if not isinstance(series, str)
        else Case(id=name, title=name.title(), group="g", failed=series)
        for name, series in cases.items()
    )
    filled = {
        "kind": "cpu", "what": "a test", "created": "2026-11-29T10:00:00+00:00", "suite": Suite(name="cpu"),
        "environment": ENVIRONMENT, "cases": made,
    }  # fmt: skip
    return Record(**(filled | fields))


def one_verdict(base, head):
    return compare(a_record({"a": [base]}), a_record({"a": [head]})).rows[0].verdict


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_a_delay_of_20_percent_is_flagged(seed):
    rng = np.random.default_rng(seed)
    base, head = simulated(rng), simulated(rng)
    slow = head.model_copy(update={"values": tuple(value * 1.2 for value in head.values)})
    fast = head.model_copy(update={"values": tuple(value * 0.75 for value in head.values)})
    assert one_verdict(base, slow) in {Verdict.SLOWER, Verdict.MUCH_SLOWER}
    assert one_verdict(base, fast) is Verdict.FASTER


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_noise_of_5_percent_is_not_flagged(seed):
    rng = np.random.default_rng(seed)
    flagged = {Verdict.SLOWER, Verdict.MUCH_SLOWER, Verdict.FASTER}
    assert one_verdict(simulated(rng, drift=0.02), simulated(rng, drift=0.02)) not in flagged
    # A shift of the median by 5 % is noise to this tool too: it is below what it promises to see.
    assert one_verdict(simulated(rng), simulated(rng, median=52.5)) not in flagged


@pytest.mark.parametrize(("calls", "verdict"), [(1, Verdict.SAME), (10_000, Verdict.MUCH_SLOWER)])
def test_what_the_clock_resolves_is_shared_by_the_calls_of_a_sample(calls, verdict):
    before, after = (steady(*[us] * 30, calls=calls) for us in (0.04, 0.08))
    assert one_verdict(before, after) is verdict


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_a_delay_of_40_percent_is_red(seed):
    rng = np.random.default_rng(seed)
    assert one_verdict(simulated(rng), simulated(rng, median=70.0)) is Verdict.MUCH_SLOWER


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, drift=st.floats(0.17, 0.4))
def test_a_change_within_the_noise_of_the_same_code_is_not_flagged(seed, drift):
    """Blocks of the same code lie as far apart as base and head do: nothing can be said."""
    rng = np.random.default_rng(seed)
    low, high = 50 * np.exp(rng.normal(0, 0.002, 20)), 50 * (1 + drift) * np.exp(rng.normal(0, 0.002, 20))
    base = Samples(what="call", timing="wall", values=(*low, *high, *low), blocks=(20, 20, 20))
    head = Samples(what="call", timing="wall", values=(*high, *high, *low), blocks=(20, 20, 20))
    assert one_verdict(base, head) is Verdict.UNCLEAR


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, slow=st.sampled_from([1.0, 1.2]))
def test_what_a_round_did_to_both_sides_is_taken_out(seed, slow):
    """The machine is up to twice as slow in some rounds, as a busy one is; both sides suffer alike."""
    rng = np.random.default_rng(seed)
    rounds, each = 6, 30
    levels = 50 * np.exp(rng.uniform(0, 0.7, rounds))

    def side(factor):
        values = np.concatenate([factor * level * np.exp(rng.normal(0, 0.03, each)) for level in levels])
        return Samples(what="call", timing="wall", values=tuple(values.tolist()), blocks=(each,) * rounds)

    base, head = a_record({"a": [side(1.0)]}, session="s"), a_record({"a": [side(slow)]}, session="s")
    row = compare(base, head).rows[0]
    assert row.verdict is (Verdict.SAME if slow == 1.0 else Verdict.SLOWER)
    assert row.change == pytest.approx(slow - 1, abs=0.03)
    assert row.noise < 0.1
    apart = compare(base, head.model_copy(update={"session": "another"})).rows[0]
    assert apart.noise > row.noise


def test_host_times_of_two_processes_beside_a_gpu_are_not_judged():
    """The blocks of a GPU run are of one process; what the next one shows of the host is another matter."""

    def side(us):
        graph = steady(*[us] * 9, what="step", timing="graph", calls=9)
        return a_record({"a": [steady(*[us] * 9, what="step"), graph]}, kind="gpu")

    base, head = side(10.0), side(20.0)
    assert {row.timing: row.verdict for row in compare(base, head).rows} == {
        "graph": Verdict.MUCH_SLOWER,
        "wall": Verdict.UNCLEAR,
    }
    together = (record.model_copy(update={"session": "s"}) for record in (base, head))
    assert {row.verdict for row in compare(*together).rows} == {Verdict.MUCH_SLOWER}


def test_the_thresholds_are_those_that_are_named():
    base = steady(*[100.0] * 9)
    expected = {
        114.9: Verdict.SAME, 115.0: Verdict.SLOWER, 129.9: Verdict.SLOWER, 130.0: Verdict.MUCH_SLOWER,
        85.1: Verdict.SAME, 85.0: Verdict.FASTER, 100.0: Verdict.SAME, 1000.0: Verdict.MUCH_SLOWER,
    }  # fmt: skip
    assert {us: one_verdict(base, steady(*[us] * 9)) for us in expected} == expected


def test_a_difference_below_the_clock_is_none():
    assert one_verdict(steady(*[0.1] * 9), steady(*[0.14] * 9)) is Verdict.SAME
    graph = {"what": "step", "timing": "graph", "calls": 1}
    assert one_verdict(steady(*[1.0] * 9, **graph), steady(*[1.4] * 9, **graph)) is Verdict.SAME
    many = graph | {"calls": 10}
    assert one_verdict(steady(*[1.0] * 9, **many), steady(*[1.4] * 9, **many)) is Verdict.MUCH_SLOWER


def test_few_or_no_samples_cannot_be_told():
    alone = Samples(what="call", timing="wall", median_us=500.0)
    for base, head in ((alone, alone), (steady(1.0, 1.0), steady(9.0, 9.0)), (alone, steady(*[900.0] * 9))):
        row = compare(a_record({"a": [base]}), a_record({"a": [head]})).rows[0]
        assert (row.verdict, row.ratio) == (Verdict.UNCLEAR, None)
        assert "samples" in row.why


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, n=st.integers(1, 12))
def test_the_short_cut_gives_the_distribution_of_real_resampling(seed, n):
    rng = np.random.default_rng(seed)
    values = rng.lognormal(0, 0.5, n)
    quick = np.sort(bootstrap_medians(values.tolist(), rng))
    real = np.sort(np.median(rng.choice(values, (2000, n)), axis=1))
    grid = np.unique(np.concatenate([quick, real]))
    below = [np.searchsorted(one, grid + 1e-12) / 2000 for one in (quick, real)]
    # Kolmogorov-Smirnov of two samples of 2,000; passed by chance in all but 1 of 10^7 cases.
    assert np.abs(below[0] - below[1]).max() < 2.9 * math.sqrt(2 / 2000)


def test_the_numbers_are_the_same_each_time():
    values = np.random.default_rng(0).lognormal(3, 0.1, 50).tolist()
    other = np.random.default_rng(1).lognormal(3, 0.1, 50).tolist()
    first = ratio_of_medians(values, other, "key")
    assert first == ratio_of_medians(values, other, "key")
    assert first != ratio_of_medians(values, other, "another key")
    assert first.low <= first.value <= first.high
    assert first.value == statistics.median(other) / statistics.median(values)


def test_noise_needs_two_moments():
    assert noise_of(steady(1.0, 2.0)) is None
    assert noise_of(steady(*[1.0] * 5, *[1.1] * 5)) == pytest.approx(0.1)
    assert noise_of(Samples(what="call", timing="wall", median_us=1.0)) is None


def test_nothing_is_dropped():
    base = a_record(
        {"same": [steady(*[9.0] * 9)], "gone": [steady(1.0)], "breaks": [steady(1.0)], "mended": "why"}
    )
    head = a_record(
        {
            "same": [steady(*[9.0] * 9), steady(1.0, what="step")],
            "fresh": [steady(1.0)],
            "breaks": "no memory",
            "mended": [steady(1.0)],
        }
    )
    comparison = compare(base, head)
    assert [(one.case_id, one.what, one.state, one.why) for one in comparison.unmatched] == [
        ("same", "step", "new", ""),
        ("gone", "", "removed", ""),
        ("breaks", "", "fails now", "no memory"),
        ("mended", "", "failed before", "why"),
        ("fresh", "", "new", ""),
    ]
    assert [row.case_id for row in comparison.rows] == ["same"]
    text = markdown(comparison)
    assert all(word in text for word in ("Gone", "Fresh", "no memory", "🔴"))


def test_other_machines_are_refused_unless_forced():
    gpu = Gpu(name="H200", compute_capability="9.0", multiprocessors=132, driver="13.0", power_limit_w=700.0)
    here = a_record({"a": [steady(*[1.0] * 9)]}, environment=ENVIRONMENT.model_copy(update={"gpu": gpu}))
    for key, change in (
        ("GPU", gpu.model_copy(update={"name": "A100"})),
        ("power limit", gpu.model_copy(update={"power_limit_w": 350.0})),
        ("driver", gpu.model_copy(update={"driver": "12.8"})),
        ("GPU card", gpu.model_copy(update={"uuid_sha256": "0" * 64})),
        ("GPU", None),
    ):
        there = here.model_copy(update={"environment": ENVIRONMENT.model_copy(update={"gpu": change})})
        with pytest.raises(ComparisonError, match=f"{key} .*--force"):
            compare(here, there)
        forced = compare(here, there, force=True)
        assert key in {one.key for one in forced.differences}
        assert "Forced" in limits(forced)[0]
        assert "as asked" in markdown(forced)


def test_patch_versions_and_our_own_packages_may_differ():
    newer = ENVIRONMENT.model_copy(
        update={"python": "3.12.9", "packages": {"numpy": "2.4.6", "paged-kv": "9"}}
    )
    cases = {"a": [steady(*[1.0] * 9)]}
    assert compare(a_record(cases), a_record(cases, environment=newer)).differences == ()
    other = ENVIRONMENT.model_copy(update={"packages": {"numpy": "2.1.0"}})
    with pytest.raises(ComparisonError, match="NumPy"):
        compare(a_record(cases), a_record(cases, environment=other))


def test_records_without_a_case_in_common_are_refused():
    ours = a_record({"a": [steady(*[1.0] * 9)]})
    for other in (a_record({}), a_record({"b": [steady(*[1.0] * 9)]})):
        with pytest.raises(ComparisonError, match="no case in common"):
            compare(ours, other)
    row = PeerRow(peer="sdpa", series=(steady(*[1.0] * 9),))
    peers = ours.model_copy(update={"cases": (Case(id="a", title="A", group="g", peers=(row,)),)})
    with pytest.raises(ComparisonError, match="peers alone"):
        compare(peers, peers)


def test_cases_that_fail_on_both_sides_are_no_good_news():
    comparison = compare(a_record({"a": "no memory"}), a_record({"a": "no memory"}))
    assert headline(comparison) == "1 fails in both"
    assert "Nothing could be compared" in markdown(comparison)
    assert "✅" not in markdown(comparison)


def test_the_limits_are_those_of_this_pair():
    cases = {"a": [steady(*[1.0] * 9)]}
    peers = (Peer(name="other", version="1"),)
    apart = " ".join(limits(compare(a_record(cases), a_record(cases))))
    assert "different times" in apart
    dirty = Revision(commit="abcdef0", dirty=True)
    both = {"session": "x", "peers": peers}
    base = a_record(cases, **both, stopped="interrupted", suite=Suite(name="cpu", digest="0" * 64))
    head = a_record(cases, **both, revision=dirty)

    def with_peer(record, us):
        row = PeerRow(peer="other", series=(steady(us),))
        case = record.cases[0].model_copy(update={"peers": (row,)})
        return record.model_copy(update={"cases": (case,)})

    told = " ".join(limits(compare(with_peer(base, 10.0), with_peer(head, 11.0))))
    assert "different times" not in told
    for word in ("ended early: interrupted", "uncommitted", "suites are not the same", "+10.0%"):
        assert word in told


@pytest.mark.parametrize(
    ("peer", "timing", "drift"),
    [
        ("torch SDPA", "graph", 1.1),
        ("torch SDPA (cudnn)", "graph", 1.1),
        ("torch SDPA (cudnn)", "eager", None),
        ("torch SDPAX", "graph", None),
    ],
)
def test_a_peer_shows_the_machine_whichever_backend_it_chose(peer, timing, drift):
    def record(us, timing):
        rows = (PeerRow(peer=peer, series=(steady(us, timing=timing),)),)
        case = Case(id="a", title="A", group="g", series=(steady(*[1.0] * 9),), peers=rows)
        known = (Peer(name="torch SDPA", version="2"),)
        return a_record({}, peers=known).model_copy(update={"cases": (case,)})

    found = compare(record(10.0, "graph"), record(11.0, timing)).drift
    assert found == (None if drift is None else pytest.approx(drift))


def test_the_worst_comes_first_and_the_terminal_shows_all():
    base = a_record({name: [steady(*[100.0] * 9)] for name in ("a", "b", "c", "d")})
    head = a_record(
        {name: [steady(*[us] * 9)] for name, us in zip("abcd", (80.0, 100.0, 200.0, 120.0), strict=True)}
    )
    comparison = compare(base, head)
    assert [row.case_id for row in comparison.rows] == ["c", "d", "b", "a"]
    console = Console(width=120, file=io.StringIO())
    show(comparison, console)
    text = console.file.getvalue()
    assert "1 much slower, 1 slower, 1 same, 1 faster" in text
    assert all(word in text for word in ("+100.0%", "-20.0%", "🔴", "🟢", "whole models"))


@pytest.mark.parametrize("width", [30, 66, 110, 200])
def test_a_narrow_terminal_still_names_the_case_and_its_change(width):
    comparison = compare(
        a_record({"a-case": [steady(*[100.0] * 9)]}), a_record({"a-case": [steady(*[140.0] * 9)]})
    )
    console = Console(width=width, file=io.StringIO())
    show(comparison, console)
    line = next(line for line in console.file.getvalue().splitlines() if "+40.0%" in line)
    assert "A-Case" in line
    assert "🔴" in line
    assert ("100.00 µs" in line) == (width >= 66)


def test_a_long_table_still_fits_a_comment():
    many = {f"case-{number}": [steady(*[100.0] * 9)] for number in range(1200)}
    slow = many | {"case-7": [steady(*[140.0] * 9)]}
    text = markdown(compare(a_record(many), a_record(slow)))
    assert len(text) < 65_536
    assert "Case-7" in text
    assert "1199 rows without a flag are left out" in text
    assert "What this cannot see" in text


def test_markup_in_a_record_stays_text():
    title = "<img src=x> | [b]bold[/b] @somebody ![a](http://a.example)"
    case = Case(id="a", title=title, group="g", series=(steady(*[100.0] * 9),))
    record = a_record({}).model_copy(update={"cases": (case,)})
    comparison = compare(record, record)
    console = Console(width=200, file=io.StringIO())
    show(comparison, console)
    assert title in console.file.getvalue()
    text = markdown(comparison)
    assert "<img" not in text
    assert "\\|" in text
    assert "@somebody" not in text
    assert "!\\[a\\](http" in text


def test_a_terminal_obeys_nothing_from_a_record():
    base = a_record({"a": [steady(*[100.0] * 9)], "b": [steady(1.0)]})
    title, why = "clear\x1b[2J", "no\x1b]0;title\x07memory"
    cases = (
        base.cases[0].model_copy(update={"title": title}),
        Case(id="b", title="B", group="g", failed=why),
    )
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system=None)
    show(compare(base, base.model_copy(update={"cases": cases, "stopped": "\x1b[2J"})), console)
    text = console.file.getvalue()
    assert "clear?[2J" in text
    assert "[2J" in text
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text


def test_the_action_json_has_one_entry_a_series():
    cases = {"a": [steady(1.0, 2.0, 3.0), steady(5.0, what="step", timing="eager")], "b": "failed"}
    cases["c"] = [steady(7.0, timing="graph"), steady(8.0, timing="eager")]
    entries = json.loads(action_json(a_record(cases)))
    assert [(one["name"], one["unit"], one["value"]) for one in entries] == [
        ("A", "µs", 2.0),
        ("A · step, eager", "µs", 5.0),
        ("C · call", "µs", 7.0),
        ("C · call, eager", "µs", 8.0),
    ]
    assert entries[0]["range"] == "1.50 µs to 2.50 µs"
    assert "range" not in entries[1]

"""The path that `auto` takes is the one that the records show to be faster."""

from pathlib import Path

import pytest
from paged_bench.measure.step import call_of
from paged_bench.measure.tables import cases_of
from paged_bench.record import Record, load
from paged_cuda import Bounds
from paged_cuda.launch_plan import PathOptions
from paged_cuda.sm90_path import FEWEST_ROWS
from paged_cuda.small_steps import SMALL_STEPS, small_pairs
from paged_cuda.split_plan import padded_v_head_size

RECORDS = Path(__file__).parent.parent / "docs" / "measurements"
HOPPER, AMPERE = (load(RECORDS / f"h200-standard-{path}.json") for path in ("sm90", "sm80"))
DECODES = [case.id for case in HOPPER.cases if "/decode/" in case.id and case.id.count("/") == 7]
SMALL_HOPPER, SMALL_AMPERE = (load(RECORDS / f"h200-small-{path}.json") for path in ("sm90", "sm80"))
SMALL = {spec.id.removesuffix("/tile64"): spec for spec in cases_of("small") if spec.row_tile == 64}
# Two medians of one path on that machine differ by up to this share.
NOISE = 0.03


def median(record: Record, name: str, what: str = "attend+combine") -> float:
    case = record.case(name)
    assert case is not None
    samples = case.samples(what)
    assert samples is not None
    return float(samples.median)


@pytest.mark.parametrize("name", DECODES)
def test_the_rule_agrees_with_the_records(name: str) -> None:
    case = HOPPER.case(name)
    assert case is not None
    assert case.shape is not None
    rows = case.shape.heads * int(case.shape.query or 1)
    hopper, ampere = median(HOPPER, name), median(AMPERE, name)
    takes_hopper = rows >= FEWEST_ROWS[padded_v_head_size(case.shape.v_head_size)]
    chosen, other = (hopper, ampere) if takes_hopper else (ampere, hopper)
    assert chosen <= other * (1 + NOISE), f"{name}: {hopper} us on sm90, {ampere} us on sm80"


def small(name: str) -> bool:
    spec = SMALL[name]
    bounds = Bounds(spec.batch, spec.tokens, max(spec.context_lens))
    return small_pairs(call_of(spec), bounds, PathOptions()) is not None


@pytest.mark.parametrize("what", ["attend+combine", "layer"])
@pytest.mark.parametrize("name", [name for name in SMALL if small(name)])
def test_small_steps_are_faster_with_low_tiles(name: str, what: str) -> None:
    hopper, ampere = (
        median(SMALL_HOPPER, f"{name}/tile64", what),
        median(SMALL_AMPERE, f"{name}/tile16", what),
    )
    assert ampere <= hopper * (1 + NOISE), f"{name}: {hopper} us on sm90, {ampere} us on sm80"


def test_the_limits_of_small_steps_are_near_where_low_tiles_stop_being_faster() -> None:
    """Of each width a step of at most four times the limit, for some number of heads, is slower with them."""
    for columns, steps in SMALL_STEPS.items():
        lost = [
            name
            for name, spec in SMALL.items()
            if padded_v_head_size(spec.v_head_size) == columns
            and not small(name)
            and spec.tokens * max(spec.context_lens)
            <= 4 * next((pairs for heads, pairs in steps.pairs.items() if spec.heads <= heads), 1024)
            and median(SMALL_AMPERE, f"{name}/tile16", "layer")
            > median(SMALL_HOPPER, f"{name}/tile64", "layer")
        ]
        assert lost, columns


@pytest.mark.parametrize("columns", SMALL_STEPS)
def test_the_limits_of_small_steps_were_measured(columns: int) -> None:
    """Each is a step of the records, and so are the most tokens: none was set where nobody looked."""
    steps = SMALL_STEPS[columns]
    specs = [spec for spec in SMALL.values() if padded_v_head_size(spec.v_head_size) == columns]
    assert steps.tokens in {spec.tokens for spec in specs}
    for heads, pairs in steps.pairs.items():
        assert pairs in {spec.tokens * max(spec.context_lens) for spec in specs if spec.heads == heads}, heads


def test_there_are_cases_on_both_sides_of_the_rule() -> None:
    heads = {name.split("/")[3] for name in DECODES}
    assert {"h12", "h16", "h24", "h64", "h128"} <= heads

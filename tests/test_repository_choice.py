"""The path that `auto` takes is the one that the records show to be faster."""

from pathlib import Path

import pytest
from paged_bench.record import load
from paged_cuda.sm90_path import FEWEST_ROWS
from paged_cuda.split_plan import padded_v_head_size

RECORDS = Path(__file__).parent.parent / "docs" / "measurements"
HOPPER, AMPERE = (load(RECORDS / f"h200-standard-{path}.json") for path in ("sm90", "sm80"))
DECODES = [case.id for case in HOPPER.cases if "/decode/" in case.id and case.id.count("/") == 7]
# Two medians of one path on that machine differ by up to this share.
NOISE = 0.03


def median(record: object, name: str) -> float:
    case = record.case(name)  # type: ignore[attr-defined]
    assert case is not None
    samples = case.samples()
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


def test_there_are_cases_on_both_sides_of_the_rule() -> None:
    heads = {name.split("/")[3] for name in DECODES}
    assert {"h12", "h16", "h24", "h64", "h128"} <= heads

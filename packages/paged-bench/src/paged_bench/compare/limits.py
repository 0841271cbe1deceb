"""What a comparison cannot see, in sentences, from the records themselves."""

from __future__ import annotations

from paged_bench.compare.comparison import Comparison
from paged_bench.compare.verdict import WARN, Verdict


def limits(comparison: Comparison) -> tuple[str, ...]:
    """Return the sentences, the ones about this pair first."""
    base, head = comparison.base, comparison.head
    found = []
    if comparison.differences:
        keys = ", ".join(one.key for one in comparison.differences)
        found.append(f"Forced: the records differ in {keys}. The ratios may be those of the machines.")
    if not (base.session and base.session == head.session):
        found.append(
            "The two sides ran at different times: a machine that was busier, hotter or clocked lower for "
            "one of them counts as a change. `paged-bench ab` interleaves both."
        )
    for name, record in (("base", base), ("head", head)):
        if record.stopped:
            found.append(f"The {name} ended early: {record.stopped}.")
        if record.revision is not None and record.revision.dirty:
            found.append(f"The tree of the {name} had uncommitted changes.")
        gpu = record.environment.gpu
        if gpu is not None and gpu.throttle_reasons:
            found.append(f"The GPU of the {name} was held back: {', '.join(gpu.throttle_reasons)}.")
    if base.suite.digest != head.suite.digest:
        found.append("The suites are not the same; cases are matched by their ids.")
    if comparison.drift is not None:
        change = comparison.drift - 1
        found.append(
            f"Peers at unchanged versions moved by {change:+.1%} in the median: that is the machine."
        )
    found.append(
        f"Within these runs the same code differed by {comparison.noise:.1%} in the median of all cases. A "
        f"change of less than {max(comparison.noise, WARN - 1):.0%} is never flagged; several can add up."
    )
    unclear = comparison.count(Verdict.UNCLEAR)
    if unclear:
        found.append(f"{unclear} of {len(comparison.rows)} rows are too noisy to tell; more samples would.")
    found.append("Medians are compared. A change of the slowest calls alone does not show.")
    found.append(
        "Only these shapes were timed, alone on the machine; other shapes and whole models were not."
    )
    return tuple(found)

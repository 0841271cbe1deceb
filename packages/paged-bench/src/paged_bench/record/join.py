"""Parts of one measurement, taken at different moments, as one.

Invariant: each part stays a block of its own, so the spread between the parts can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from paged_bench.record.case import Case
from paged_bench.record.samples import Samples


def joined(parts: Sequence[Sequence[Case]]) -> tuple[Case, ...]:
    """Put the samples of each case behind one another, in the order of the parts.

    A case that failed in one part has failed: its samples would be those of a benchmark that is not sound.
    Everything else of a case, peers included, is that of its last part.
    """
    found: dict[str, list[Case]] = {}
    for part in parts:
        for case in part:
            found.setdefault(case.id, []).append(case)
    return tuple(_join(cases) for cases in found.values())


def _join(cases: Sequence[Case]) -> Case:
    failed = next((case for case in cases if case.failed), None)
    if failed is not None:
        return failed.model_copy(update={"title": cases[0].title, "series": ()})
    keys = dict.fromkeys((one.what, one.timing) for case in cases for one in case.series)
    series = tuple(
        _behind([one for case in cases for one in case.series if (one.what, one.timing) == key])
        for key in keys
    )
    return cases[-1].model_copy(update={"series": series})


def _behind(parts: Sequence[Samples]) -> Samples:
    if any(part.median_us is not None for part in parts):
        return parts[-1]
    values = tuple(value for part in parts for value in part.values)
    blocks = tuple(size for part in parts for size in (part.blocks or (len(part.values),)))
    return parts[-1].model_copy(update={"values": values, "blocks": blocks})

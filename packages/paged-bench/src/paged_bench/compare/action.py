"""A record in the form that github-action-benchmark keeps: its tool `customSmallerIsBetter`."""

from __future__ import annotations

import json

from paged_bench.compare.words import series_name, time_text
from paged_bench.record import Record, Samples


def action_json(record: Record) -> str:
    """Return one entry a series: the median, its quartiles, and what it is.

    The names are titles with the series, so that a chart of years keeps one line a series.
    """
    entries = []
    for case in record.cases:
        for samples in case.series:
            name = series_name(case.title, samples.what, samples.timing)
            extra = f"{case.id}; {samples.timing}; {len(samples.values)} samples"
            entry = {"name": name, "unit": "µs", "value": round(samples.median, 4), "extra": extra}
            if (spread := _range(samples)) is not None:
                entry["range"] = spread
            entries.append(entry)
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def _range(samples: Samples) -> str | None:
    quartiles = samples.quartiles
    return None if quartiles is None else f"{time_text(quartiles[0])} to {time_text(quartiles[1])}"

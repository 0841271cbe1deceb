"""A run as a table and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_bench.simulate.engine import Engine, Outcome, Samples
from paged_bench.simulate.trace import Trace

WIDTH, HEIGHT, MARGIN, GAP = 860, 150, 56, 46


def table(trace: Trace, engine: Engine, outcome: Outcome) -> str:
    """What a user sizes a pool by, one figure a line."""
    stats, samples = outcome.stats, outcome.samples
    used = np.array(samples.used) / outcome.usable
    seconds = outcome.seconds - float(trace.arrival[0])
    waits, latencies = _percentiles(outcome.queue_waits), _percentiles(outcome.latencies)
    rows = [
        ("traffic", trace.source),
        ("pool", f"{engine.blocks} pages of {engine.block_size} tokens, batch up to {engine.max_batch}"),
        ("finished", f"{outcome.finished} of {len(trace)}; {outcome.refused} can never fit"),
        ("simulated time", f"{seconds:.1f} s, {outcome.steps} steps"),
        ("tokens", f"{outcome.tokens} written, {outcome.tokens / max(seconds, 1e-9):.0f} a second"),
        ("pages in use", f"{used.mean():.1%} on average, {used.max():.1%} at most"),
        ("wait to start", f"{waits[0]:.2f} s median, {waits[1]:.2f} s p99"),
        ("latency", f"{latencies[0]:.2f} s median, {latencies[1]:.2f} s p99"),
        ("prefix hits", f"{outcome.hits / max(1, outcome.starts):.1%} of {outcome.starts} starts"),
        ("tokens not computed", f"{outcome.hit_tokens}"),
        ("cached pages evicted", f"{stats.prefix_evictions_total}"),
        ("deferrals", f"{outcome.deferred_steps} steps began with somebody waiting for pages"),
        ("preemptions", f"{stats.preemptions_total}"),
        ("pages at the end", f"{stats.num_pages_free} free of {outcome.usable}: {_balance(outcome)}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _balance(outcome: Outcome) -> str:
    return "nothing lost" if outcome.stats.num_pages_free == outcome.usable else "PAGES LOST"


def _percentiles(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return 0.0, 0.0
    return float(np.median(known)), float(np.percentile(known, 99))


def svg(engine: Engine, samples: Samples) -> str:
    """Pages and sequences over time, as a self-contained drawing."""
    panels = [
        (
            "pages",
            engine.blocks,
            [("in use", samples.used, "#1f6fb2"), ("cached, free", samples.cached, "#8fbf6a")],
        ),
        (
            "sequences",
            max(1, *samples.waiting, *samples.running),
            [("running", samples.running, "#1f6fb2"), ("waiting", samples.waiting, "#d1495b")],
        ),
    ]
    height = len(panels) * (HEIGHT + GAP) + GAP
    body = []
    for number, (title, top, lines) in enumerate(panels):
        body.append(_panel(GAP + number * (HEIGHT + GAP), title, top, samples.time, lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _panel(
    y: int, title: str, top: int, time: Sequence[float], lines: Sequence[tuple[str, Sequence[int], str]]
) -> str:
    start, span = time[0], WIDTH - 2 * MARGIN
    end = max(time[-1] - start, 1e-9)
    parts = [
        f'<rect x="{MARGIN}" y="{y}" width="{span}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{MARGIN}" y="{y - 8}">{title}</text>',
        f'<text x="{MARGIN - 6}" y="{y + 10}" text-anchor="end">{top}</text>',
        f'<text x="{MARGIN - 6}" y="{y + HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{MARGIN + span}" y="{y + HEIGHT + 16}" text-anchor="end">{end:.0f} s</text>',
    ]
    for index, (name, values, colour) in enumerate(lines):
        points = " ".join(
            f"{MARGIN + span * (t - start) / end:.1f},{y + HEIGHT * (1 - value / top):.1f}"
            for t, value in zip(time, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x = MARGIN + 110 + 120 * index
        parts.append(f'<text x="{x}" y="{y - 8}" fill="{colour}">{name}</text>')
    return "\n".join(parts)

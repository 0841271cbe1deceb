"""`paged-bench simulate`: replay, print the table, draw the picture."""

from __future__ import annotations

from paged_bench.simulate.engine import Simulation
from paged_bench.simulate.options import SimulateOptions
from paged_bench.simulate.report import svg, table
from paged_bench.simulate.trace import generate, read_csv


def run(options: SimulateOptions) -> int:
    """Replay the trace and report.

    Returns:
        The exit status: 0, or 1 when a page was lost, which is a bug.

    Raises:
        BenchError: a bad trace or distribution.
        OSError: a file cannot be read or written.
    """
    trace = generate(options.traffic) if options.trace is None else read_csv(options.trace)
    outcome = Simulation(trace, options.engine, options.times).run()
    print(table(trace, options.engine, outcome))
    if options.svg is not None:
        options.svg.write_text(svg(options.engine, outcome.samples), encoding="utf-8")
        print(f"drawn to {options.svg}")
    return 0 if outcome.stats.num_pages_free == outcome.usable else 1

"""What a run amounted to: a table for people, a JSON array for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Ordered

from paged_kv import PageGeometry
from rich.table import Table

from paged_bench.demo.requests import Sequence
from paged_bench.demo.tokenizer import TextCodec
from paged_bench.demo.usage import RunTotals


def json_array(sequences: Ordered[Sequence], codec: TextCodec) -> str:
    """The results in the order of the prompts."""
    return json.dumps(
        [
            {
                "prompt": sequence.request.text,
                "prompt_ids": list(sequence.request.prompt_ids),
                "new_ids": sequence.new_ids,
                "text": codec.decode(sequence.new_ids),
            }
            for sequence in sequences
        ],
        indent=1,
    )


def summary(totals: RunTotals, attention_seconds: float, geometry: PageGeometry, title: str) -> Table:
    """The closing table of a run.

    Args:
        totals: Sums over the steps.
        attention_seconds: Wall time inside the backend.
        geometry: The pool.
        title: Which model, backend and layout.
    """
    seconds, share = totals.seconds, attention_seconds / totals.seconds
    new, tokens = totals.decode_tokens, totals.prefill_tokens + totals.decode_tokens
    rows = {
        "tokens": f"{new} generated, {totals.prefill_tokens} of prompts",
        "tokens/s": f"{new / seconds:.1f} generated, {tokens / seconds:.1f} in all",
        "steps": f"{totals.steps}, of which {totals.mixed_steps} mixed prefill and decode",
        "time per step": f"{seconds / totals.steps * 1e3:.0f} ms, slowest {totals.slowest * 1e3:.0f} ms",
        "time in attention": f"{attention_seconds:.2f} of {seconds:.2f} s ({share:.0%})",
        "peak batch": f"{totals.peak_running} sequences",
        "peak pages": f"{totals.peak_pages} of {geometry.usable_blocks}, {geometry.block_size} tokens each",
        "page reuse": f"{totals.handouts} handed out, {totals.reused} of them used before",
        "admission": f"waited for pages at {totals.deferred_steps} steps",
        "peak memory": peak_memory(),
    }
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def peak_memory() -> str:
    """The process's largest resident memory so far, for people."""
    if sys.platform == "win32":
        return "not measured on Windows"
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{peak / (1 << 20 if sys.platform == 'darwin' else 1 << 10):.0f} MiB resident"

"""How the pages of a run were used, counted from the index plans that the op was given."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_bench.demo.scheduler import StepRecord


@dataclass
class RunTotals:
    """Sums over the steps of a run.

    Attributes:
        steps: Steps run.
        mixed_steps: Steps that held a prefill and a decode.
        deferred_steps: Steps at which admission waited for pages.
        prefill_tokens: Prompt tokens run, beyond the last of each prompt.
        decode_tokens: Tokens generated.
        seconds: Wall time of the steps.
        slowest: Wall time of the slowest step.
        peak_pages: Most pages that sequences held in one step.
        peak_running: Most sequences in one step.
        handouts: Times a page was given to a sequence.
    """

    steps: int = 0
    mixed_steps: int = 0
    deferred_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    peak_pages: int = 0
    peak_running: int = 0
    handouts: int = 0
    _held: dict[int, frozenset[int]] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.steps += 1
        self.mixed_steps += record.mixed
        self.deferred_steps += record.deferred
        self.prefill_tokens += record.prefill_tokens
        self.decode_tokens += record.decode_tokens
        self.seconds += record.seconds
        self.slowest = max(self.slowest, record.seconds)
        self.peak_running = max(self.peak_running, record.running)
        self.peak_pages = max(self.peak_pages, sum(len(pages) for pages in record.pages.values()))
        for index, pages in record.pages.items():
            self.handouts += len(pages - self._held.get(index, frozenset()))
            self._held[index] = pages
            self._seen |= pages

    @property
    def distinct_pages(self) -> int:
        """Pages that were used at all."""
        return len(self._seen)

    @property
    def reused(self) -> int:
        """Handouts of a page that an earlier sequence had given back."""
        return self.handouts - self.distinct_pages

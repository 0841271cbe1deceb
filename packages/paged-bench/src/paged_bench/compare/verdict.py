"""What one pair of series says: slower, faster, the same, or that it cannot be told.

Invariant: nothing is flagged unless the change is large (15 %), sure (the interval excludes no change) and
beyond what the same code showed within the same run (the A/A noise).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from paged_bench.compare.bootstrap import Ratio, noise_of, ratio_of_medians, without_rounds
from paged_bench.record import Samples

WARN, ALARM = 1.15, 1.30
FEWEST = 5  # values from which on a median has an interval


class Verdict(Enum):
    """The flags, in the order in which they are shown."""

    MUCH_SLOWER = ("🔴", "much slower")
    SLOWER = ("⚠️", "slower")
    UNCLEAR = ("❔", "unclear")
    SAME = ("✅", "same")
    FASTER = ("🟢", "faster")

    def __init__(self, flag: str, word: str) -> None:
        self.flag = flag
        self.word = word


@dataclass(frozen=True)
class Row:
    """One series on both sides.

    Attributes:
        case_id: what was matched by.
        title: for people.
        what: the series.
        timing: graph, eager or wall.
        base_us: median of the base, microseconds.
        head_us: median of the head.
        base_spread: first and third quartile of the base.
        head_spread: the same of the head.
        ratio: head over base with its interval, round effects taken out; None without samples.
        noise: what the same code showed within the runs, as a share.
        verdict: the flag.
        why: why it is unclear, else empty.
    """

    case_id: str
    title: str
    what: str
    timing: str
    base_us: float
    head_us: float
    base_spread: tuple[float, float] | None
    head_spread: tuple[float, float] | None
    ratio: Ratio | None
    noise: float
    verdict: Verdict
    why: str = ""

    @property
    def change(self) -> float:
        """Head over base less one; positive is slower. Without samples it is that of the medians alone."""
        return (self.ratio.value if self.ratio else self.head_us / self.base_us) - 1


def resolution_us(samples: Samples) -> float:
    """Return the least difference that the clock behind the samples can be trusted with.

    The CPU's clock steps by about 50 ns and events on the device by half a microsecond, shared by the calls
    between two readings; a launch on the device is not trusted below 50 ns however many there are.
    """
    return 0.05 / samples.calls if samples.timing == "wall" else max(0.05, 0.5 / samples.calls)


def judge(base: Samples, head: Samples, noise: float, key: str) -> tuple[Ratio | None, Verdict, str]:
    """Return the ratio, the verdict and, for an unclear one, why."""
    if min(len(base.values), len(head.values)) < FEWEST:
        return None, Verdict.UNCLEAR, f"fewer than {FEWEST} samples were kept"
    ratio = ratio_of_medians(base.values, head.values, key)
    if abs(head.median - base.median) < max(resolution_us(base), resolution_us(head)):
        return ratio, Verdict.SAME, ""
    if ratio.value >= WARN and ratio.low > 1 + noise:
        return ratio, Verdict.MUCH_SLOWER if ratio.value >= ALARM else Verdict.SLOWER, ""
    if ratio.value <= 2 - WARN and ratio.high < 1 / (1 + noise):
        return ratio, Verdict.FASTER, ""
    if 2 - WARN < ratio.value < WARN and ratio.low > 2 - WARN and ratio.high < WARN:
        return ratio, Verdict.SAME, ""
    if ratio.value >= WARN or ratio.value <= 2 - WARN:
        return ratio, Verdict.UNCLEAR, f"the noise of the same code is {noise:.0%}"
    return ratio, Verdict.UNCLEAR, "the interval reaches 15 %"


@dataclass(frozen=True)
class Pair:
    """One series on both sides before it is judged.

    Attributes:
        case_id: what was matched by.
        title: for people.
        base: samples as they were taken.
        head: samples as they were taken.
        interleaved: whether block i of both sides was taken in the same round.
        one_process: whether all blocks of a side are of one process. Their spread then says nothing of what
            the next process would show, which for the host's own time is most of the noise: an H200's host
            gave the same code -31 to +73 % in a new process.
    """

    case_id: str
    title: str
    base: Samples
    head: Samples
    interleaved: bool
    one_process: bool = False

    @cached_property
    def compared(self) -> tuple[Samples, Samples]:
        """Both sides, round effects taken out where there were rounds."""
        if self.interleaved and 1 < len(self.base.in_blocks()) == len(self.head.in_blocks()):
            return without_rounds(self.base, self.head)
        return self.base, self.head

    @property
    def noise(self) -> float | None:
        """The larger of the two sides' A/A noise; None where neither says."""
        return max((one for one in map(noise_of, self.compared) if one is not None), default=None)


def row(pair: Pair, run_noise: float) -> Row:
    """Judge one pair; its noise is its own, and at least that of the runs."""
    base, head = pair.base, pair.head
    noise = max(run_noise, pair.noise or 0.0)
    ratio, verdict, why = judge(*pair.compared, noise, f"{pair.case_id} {base.what} {base.timing}")
    if pair.one_process and base.timing == "wall":
        verdict, why = Verdict.UNCLEAR, "host times of two processes; ab takes several of each"
    return Row(
        case_id=pair.case_id,
        title=pair.title,
        what=base.what,
        timing=base.timing,
        base_us=base.median,
        head_us=head.median,
        base_spread=base.quartiles,
        head_spread=head.quartiles,
        ratio=ratio,
        noise=noise,
        verdict=verdict,
        why=why,
    )

"""Whether the clock can be believed: a kernel of known bytes, timed every way that cases are timed.

Invariant: other memory, other sizes and another number of calls than the ceiling was measured with, so that
a fault of the timing shows as a rate that is off.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_cuda import DeviceArray

from paged_bench.measure.bench import Bench
from paged_bench.measure.ceilings import check_read
from paged_bench.measure.timing import Timer
from paged_bench.record import Case, Correctness, Samples, Work

TOLERANCE = 0.03
_PIECES = 3
_LARGEST = 3 << 30


@dataclass(frozen=True)
class SelfCheck:
    """What the clock said.

    Attributes:
        case: For the record; its ratio to the floor is 1 where the clock is right.
        problems: Ways to time that are off, in words.
    """

    case: Case
    problems: tuple[str, ...]


def check_clock(bench: Bench, read_rate: float, shape: tuple[int, int]) -> SelfCheck:
    """Time the reading of known bytes by graph replay and by eager calls.

    Args:
        bench: The instruments.
        read_rate: The run's own ceiling, bytes a second.
        shape: Blocks a multiprocessor and threads that reached it.
    """
    nbytes = min(_LARGEST, bench.free() // 4) // _PIECES // 4096 * 4096
    memory = DeviceArray.empty((_PIECES * nbytes // 2,), "bfloat16", bench.device)
    bench.fill(memory, 2)
    check_read(bench, memory)
    blocks = shape[0] * bench.device.properties.multiprocessors
    pieces = [
        bench.reading(memory.pointer + index * nbytes, nbytes, blocks=blocks, threads=shape[1])
        for index in range(_PIECES)
    ]
    timer = Timer(bench)
    series = (timer.graph("call", pieces), timer.eager("call", pieces))
    case = Case(
        id="selfcheck/read",
        title=f"reading {nbytes / 1e9:.2f} GB",
        group="selfcheck",
        work=Work(bytes=nbytes, operations=0),
        correctness=Correctness(reference="exclusive or of its words, by NumPy", relative_error=0.0),
        series=series,
    )
    return SelfCheck(
        case, tuple(_problem(one, nbytes, read_rate) for one in series if _off(one, nbytes, read_rate))
    )


def _share(series: Samples, nbytes: int, read_rate: float) -> float:
    return nbytes / series.median * 1e6 / read_rate


def _off(series: Samples, nbytes: int, read_rate: float) -> bool:
    return not abs(_share(series, nbytes, read_rate) - 1) <= TOLERANCE


def _problem(series: Samples, nbytes: int, read_rate: float) -> str:
    share = _share(series, nbytes, read_rate)
    return f"{series.timing} timing reads at {share:.1%} of the read ceiling, more than {TOLERANCE:.0%} off"

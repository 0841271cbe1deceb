"""What arrives and when: read from a CSV file, or drawn from a stated distribution.

A trace is a structure of arrays, one entry a request, in order of arrival.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paged_bench.errors import BenchError

Int64Array = npt.NDArray[np.int64]
COLUMNS = ("arrival", "prompt", "output")
OPTIONAL = ("prefix_group", "prefix")
NO_GROUP = -1
MAX_TOKENS = 2**31 - 1


class TraceError(BenchError, ValueError):
    """A trace file or distribution that cannot be replayed."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival.

    Attributes:
        arrival: ``(requests,)`` float64 seconds.
        prompt: ``(requests,)`` int64 tokens, at least 1.
        output: ``(requests,)`` int64 tokens, at least 1.
        group: ``(requests,)`` int64, which common prefix the prompt starts with; -1 for none.
        prefix: ``(requests,)`` int64, how many tokens of the prompt are that prefix.
        source: where it comes from, in words.
    """

    arrival: npt.NDArray[np.float64]
    prompt: Int64Array
    output: Int64Array
    group: Int64Array
    prefix: Int64Array
    source: str

    def __len__(self) -> int:
        return len(self.arrival)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A stated distribution of requests.

    Arrivals are a Poisson process of `rate` a second. Prompt and output lengths are log-normal with these
    medians and `spread` as the standard deviation of the logarithm, cut at `longest`. A share `shared` of the
    prompts has, in front, one of `groups` common prefixes of `prefix` tokens, each as likely as another.
    """

    requests: int = 2_000
    rate: float = 8.0
    prompt: int = 512
    output: int = 128
    spread: float = 0.7
    longest: int = 4_096
    shared: float = 0.5
    groups: int = 8
    prefix: int = 256
    seed: int = 0


def generate(traffic: Traffic) -> Trace:
    """Draw a trace.

    Raises:
        TraceError: a size, rate or share is out of range.
    """
    _check(traffic)
    rng, count = np.random.default_rng(traffic.seed), traffic.requests
    arrival = np.cumsum(rng.exponential(1 / traffic.rate, count))
    prompt = _lengths(rng, traffic.prompt, traffic)
    output = _lengths(rng, traffic.output, traffic)
    group = np.where(rng.random(count) < traffic.shared, rng.integers(0, traffic.groups, count), NO_GROUP)
    prefix = np.where(group == NO_GROUP, 0, traffic.prefix)
    words = (
        f"{count} requests, Poisson {traffic.rate:g}/s, log-normal prompts (median {traffic.prompt}) and "
        f"outputs (median {traffic.output}), spread {traffic.spread:g}, {traffic.shared:.0%} after one of "
        f"{traffic.groups} prefixes of {traffic.prefix}, seed {traffic.seed}"
    )
    return Trace(arrival, prompt + prefix, output, group.astype(np.int64), prefix.astype(np.int64), words)


def _lengths(rng: np.random.Generator, median: int, traffic: Traffic) -> Int64Array:
    drawn = rng.lognormal(np.log(median), traffic.spread, traffic.requests)
    return np.clip(np.rint(drawn), 1, traffic.longest).astype(np.int64)


def _check(traffic: Traffic) -> None:
    limits = (
        ("requests", traffic.requests, 1, 10**8),
        ("rate", traffic.rate, 1e-6, 1e9),
        ("prompt", traffic.prompt, 1, MAX_TOKENS),
        ("output", traffic.output, 1, MAX_TOKENS),
        ("spread", traffic.spread, 0, 10),
        ("longest", traffic.longest, 1, MAX_TOKENS // 4),
        ("shared", traffic.shared, 0, 1),
        ("groups", traffic.groups, 1, 10**6),
        ("prefix", traffic.prefix, 0, MAX_TOKENS // 4),
        ("seed", traffic.seed, 0, 2**63 - 1),
    )
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise TraceError(name, f"{value:g} was given, it must lie in [{low:g}, {high:g}]")


def read_csv(path: Path) -> Trace:
    """Read a trace: a header with arrival, prompt and output, and perhaps prefix_group and prefix.

    Arrivals are seconds on any clock; lengths are tokens; a prefix is the front of the prompt that all
    requests of its group share.

    Raises:
        TraceError: a column is missing or a value is not what it must be; names the line.
        OSError: the file cannot be read.
    """
    try:
        rows = _rows(path)
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(str(path), f"it is not a CSV file in UTF-8: {error}") from error
    if not rows:
        raise TraceError(str(path), "it holds no requests")
    rows.sort(key=lambda row: row[0])
    arrival = np.array([row[0] for row in rows], dtype=np.float64)
    prompt, output, group, prefix = np.array([row[1:] for row in rows], dtype=np.int64).T
    return Trace(arrival, prompt, output, group, prefix, f"{len(rows)} requests of {path.name}")


def _rows(path: Path) -> list[tuple[float, int, int, int, int]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            header = f"its header must name {', '.join(COLUMNS)}"
            raise TraceError(str(path), f"no column {', '.join(missing)}", header)
        return [_row(path, reader.line_num, values) for values in reader]


def _row(path: Path, line: int, values: dict[str, str]) -> tuple[float, int, int, int, int]:
    try:
        arrival = float(values["arrival"])
        prompt, output = int(values["prompt"]), int(values["output"])
        group = int(values.get("prefix_group") or NO_GROUP)
        prefix = int(values.get("prefix") or 0) if group >= 0 else 0
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}, line {line}", str(error)) from error
    good = np.isfinite(arrival) and prompt >= 1 and output >= 1 and prompt + output <= MAX_TOKENS
    if not good or not 0 <= prefix <= prompt or not NO_GROUP <= group <= MAX_TOKENS:
        raise TraceError(
            f"{path}, line {line}",
            f"arrival {arrival:g}, prompt {prompt}, output {output}, prefix_group {group}, prefix {prefix}",
            f"arrival must be finite, prompt and output at least 1 and together at most {MAX_TOKENS}, "
            f"0 <= prefix <= prompt, and the group {NO_GROUP} (none) or a number up to {MAX_TOKENS}",
        )
    return arrival, prompt, output, group, prefix

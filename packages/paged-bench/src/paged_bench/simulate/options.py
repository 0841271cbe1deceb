"""The simulator's options, checked before anything runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from paged_bench.errors import OptionError
from paged_bench.simulate.engine import Engine, TimeModel
from paged_bench.simulate.trace import Traffic

Options = TypeVar("Options", Traffic, Engine, TimeModel)


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What to replay, through what, and where to write it."""

    trace: Path | None
    traffic: Traffic
    engine: Engine
    times: TimeModel
    svg: Path | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the simulator's options."""
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="arrival,prompt,output[,prefix_group,prefix]"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw occupancy and queue over time")
    traffic, engine, times = Traffic(), Engine(), TimeModel()
    group = parser.add_argument_group("traffic, when there is no trace")
    group.add_argument("--requests", type=int, default=traffic.requests)
    group.add_argument("--rate", type=float, default=traffic.rate, help="arrivals a second (Poisson)")
    group.add_argument("--prompt", type=int, default=traffic.prompt, help="median prompt tokens (log-normal)")
    group.add_argument("--output", type=int, default=traffic.output, help="median output tokens (log-normal)")
    group.add_argument("--spread", type=float, default=traffic.spread, help="deviation of the logarithm")
    group.add_argument("--longest", type=int, default=traffic.longest, help="cut lengths here")
    group.add_argument("--shared", type=float, default=traffic.shared, help="share with a common prefix")
    group.add_argument("--groups", type=int, default=traffic.groups, help="number of common prefixes")
    group.add_argument("--prefix", type=int, default=traffic.prefix, help="tokens of a common prefix")
    group.add_argument("--seed", type=int, default=traffic.seed)
    group = parser.add_argument_group("the pool and the batch")
    group.add_argument("--pages", dest="blocks", type=int, default=engine.blocks, help="usable pages")
    group.add_argument("--block-size", type=int, default=engine.block_size)
    group.add_argument("--max-batch", type=int, default=engine.max_batch, help="sequences at once")
    group.add_argument("--step-tokens", type=int, default=engine.step_tokens, help="prompt tokens a step")
    group.add_argument("--watermark", type=int, default=engine.watermark, help="pages admission leaves free")
    group.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false")
    group.add_argument("--optimistic", action="store_true", help="promise prompts only; preempt when short")
    group = parser.add_argument_group("the time of a step, in seconds")
    group.add_argument("--base", type=float, default=times.base, help="fixed part")
    group.add_argument("--per-token", type=float, default=times.per_token, help="for each token written")
    group.add_argument("--per-context", type=float, default=times.per_context, help="for each token read")


def read_options(values: argparse.Namespace) -> SimulateOptions:
    """The checked options.

    Raises:
        OptionError: a value is out of range.
    """
    given = vars(values)
    traffic, engine, times = _pick(Traffic, given), _pick(Engine, given), _pick(TimeModel, given)
    limits = {
        "--pages": (engine.blocks, 1, 2**27 - 2),
        "--max-batch": (engine.max_batch, 1, 2**20),
        "--step-tokens": (engine.step_tokens, 1, 2**31 - 1),
        "--watermark": (engine.watermark, 0, engine.blocks - 1),
        "--base": (times.base, 0, 1e6),
        "--per-token": (times.per_token, 0, 1e6),
        "--per-context": (times.per_context, 0, 1e6),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise OptionError(name, f"{value:g} was given, it must lie in [{low:g}, {high:g}]")
    size = engine.block_size
    if size < 16 or size & (size - 1) or engine.blocks * size >= 2**31 - size:
        raise OptionError(
            "--block-size",
            f"{size} was given, it must be a power of two of at least 16",
            "and the pool's slots int32",
        )
    return SimulateOptions(values.trace, traffic, engine, times, values.svg)


def _pick(kind: type[Options], given: dict[str, object]) -> Options:
    """An instance of `kind` from the parsed values of the same names, whose types argparse has settled."""
    return kind(**{item.name: given[item.name] for item in fields(kind)})  # type: ignore[arg-type] # mypy sees object

"""The demo's options, and nothing heavier: parsing them imports neither NumPy nor a model reader."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoOptions:
    """What the command line asked for; None where a default depends on the rest."""

    words: tuple[str, ...]
    prompts: Path | None
    model: Path | None
    layout: str
    backend: str
    block_size: int
    dtype: str | None
    max_new: int | None
    ignore_eos: bool
    json: bool
    pages: int | None
    max_batch: int
    stagger: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `paged-bench demo`."""
    parser.add_argument(
        "words", nargs="*", metavar="PROMPT", help="text to continue; without any, ten built-in ones"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="more prompts, one a line")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a llama-architecture GGUF file")
    parser.add_argument(
        "--layout", choices=("separate", "latent"), default="latent", help="cache layout (latent)"
    )
    parser.add_argument(
        "--backend", choices=("auto", "oracle", "cuda"), default="auto", help="who attends (auto)"
    )
    parser.add_argument(
        "--block-size", type=int, choices=(16, 32, 64, 128), default=16, help="tokens a page (16)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="element type of the caches"
    )
    parser.add_argument("--max-new", type=_positive, metavar="N", help="most new tokens of each prompt (32)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    parser.add_argument("--json", action="store_true", help="print one JSON array and nothing else")
    parser.add_argument(
        "--pages",
        type=_positive,
        metavar="N",
        help="pages in the pool (for 8 prompts or more, fewer than they want)",
    )
    parser.add_argument(
        "--max-batch", type=_positive, metavar="N", default=8, help="most sequences in a step (8)"
    )
    parser.add_argument(
        "--stagger", type=_natural, metavar="N", default=1, help="steps between two arrivals (1)"
    )


def read_options(values: argparse.Namespace) -> DemoOptions:
    """The parsed values under their types."""
    names = DemoOptions.__dataclass_fields__
    return DemoOptions(**{name: getattr(values, name) for name in names} | {"words": tuple(values.words)})


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _natural(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{value} is not between {least} and 1000000")
    return value

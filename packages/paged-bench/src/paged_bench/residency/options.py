"""The options of `paged-bench residency`, and nothing heavier."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

PROMPT = "The capital of France is"


@dataclass(frozen=True)
class ResidencyOptions:
    """What the command line asked for."""

    prompt: str
    model: Path | None
    backend: str
    shapes: tuple[str, ...]
    new: int
    min_bucket: int
    json: bool
    svg: Path | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("prompt", nargs="?", default=PROMPT, help=f"text to continue ({PROMPT!r})")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a llama-architecture GGUF file")
    parser.add_argument(
        "--backend", choices=("auto", "fake", "cuda"), default="auto", help="whose memory it is (auto)"
    )
    parser.add_argument(
        "--shape",
        dest="shapes",
        action="append",
        choices=("0.5b", "14b"),
        help="whose cache: qwen2.5-0.5b or -14b; may be given twice (both)",
    )
    parser.add_argument("--new", type=_count, metavar="N", default=48, help="tokens to decode (48)")
    parser.add_argument(
        "--min-bucket", type=_count, metavar="N", default=8, help="tokens that forced growth starts from (8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the report as well")


def read_options(values: argparse.Namespace) -> ResidencyOptions:
    """The parsed values under their types."""
    names = [name for name in ResidencyOptions.__dataclass_fields__ if name != "shapes"]
    shapes = tuple(dict.fromkeys(values.shapes or ("0.5b", "14b")))
    return ResidencyOptions(shapes=shapes, **{name: getattr(values, name) for name in names})


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 1 <= value <= 512:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and 512")
    return value

"""The prompts of a run: the built-in ones, those of the command line, those of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paged_bench.errors import PromptError

DEFAULT_MAX_NEW = 32

# Text and most new tokens. The lengths differ on purpose: sequences end at different steps, and the
# long prompt takes several steps of prefill while the others decode.
BUILT_IN: tuple[tuple[str, int], ...] = (
    ("The capital of France is", 24),
    ("Once upon a time, in a small village,", 48),
    ("<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n", 26),
    ("The three primary colors are", 20),
    (
        "A page table maps the tokens of a sequence to fixed-size pages of memory. A sequence takes a new "
        "page when its last page is full, and gives all of them back when it ends. Because every page has "
        "the same size, any free page serves any sequence. In short, the advantage of paging is that",
        40,
    ),
    ("Water boils at", 14),
    ("def fibonacci(n):", 36),
    ("The opposite of hot is", 10),
    ("In the year 1969,", 44),
    ("<|im_start|>user\nName two planets.<|im_end|>\n<|im_start|>assistant\n", 32),
)


def gather_prompts(words: Sequence[str], file: Path | None, max_new: int | None) -> list[tuple[str, int]]:
    """The prompts of a run in their order, each with its limit of new tokens.

    Args:
        words: Prompts of the command line.
        file: A file with one prompt a line, served after `words`; or None.
        max_new: Limit for every prompt; None takes the default (for a built-in prompt, its own).

    Raises:
        PromptError: An empty prompt or file, or a file that cannot be read as text.
    """
    given = [*_checked(words), *(_read(file) if file is not None else ())]
    prompts = [(text, DEFAULT_MAX_NEW) for text in given] if words or file is not None else list(BUILT_IN)
    return [(text, limit if max_new is None else max_new) for text, limit in prompts]


def _checked(words: Sequence[str]) -> Sequence[str]:
    for place, text in enumerate(words, start=1):
        if not text:
            raise PromptError(f"prompt {place}", "is empty", "write at least one character")
    return words


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(
            f"prompts file {file}", error.strerror or str(error), "give a readable file"
        ) from error
    except UnicodeDecodeError as error:
        raise PromptError(
            f"prompts file {file}", f"is not UTF-8 text (byte {error.start})", "save it as UTF-8"
        ) from error
    lines = text.rstrip("\n").split("\n") if text.strip() else []
    if not lines:
        raise PromptError(f"prompts file {file}", "holds no prompt", "write one prompt a line")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise PromptError(f"prompts file {file}", f"line {number} is empty", "write one prompt a line")
    return lines

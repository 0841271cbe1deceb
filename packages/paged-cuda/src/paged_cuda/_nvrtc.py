"""NVRTC behind one typed function: source text in, machine code and the compiler's log out.

Needs no GPU and no driver. Only real architectures are accepted, as a virtual one yields an empty cubin.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from paged_cuda.errors import CompileError

# cuda-bindings 13.0 fills its table of functions at the first call and lets a second thread look into it
# before it is full.
_first_call = threading.Lock()


class Compiled(NamedTuple):
    """What one compilation gave."""

    cubin: bytes
    log: str


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's (major, minor). The first call loads the library and must come before all others.

    Raises:
        CompileError: The NVRTC library cannot be loaded.
    """
    with _first_call:
        return _load()


@cache
def _load() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise CompileError("nvrtc", "NVRTC", _one_line(error), "pip install nvidia-cuda-nvrtc") from error
    return int(major), int(minor)


def _one_line(error: RuntimeError) -> str:
    return " ".join(str(error).split())


def compile_to_cubin(source: str, name: str, options: Sequence[str]) -> Compiled:
    """Compile `source`, called `name` in messages.

    Raises:
        CompileError: NVRTC refuses the source or an option; `got` holds its log.
    """
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _log(program)
        if int(status) != 0:
            raise CompileError(
                "compile", name, f"{status.name}\n{log}", "a source and options that NVRTC accepts"
            )
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = _buffer(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if size == 0:
        raise CompileError("compile", name, "an empty cubin", "a real architecture such as sm_80")
    return Compiled(cubin[: int(size)], log)


def _buffer(size: int) -> bytes:
    """Return bytes for NVRTC to write to, which Python has given to nobody else.

    Python keeps one object for each single byte: writing an empty log's end to `b" "` would change every
    space that the process prints.
    """
    return bytes(max(int(size), 2))


def _log(program: object) -> str:
    from cuda.bindings import nvrtc

    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = _buffer(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.decode(errors="replace").strip("\0 \n")

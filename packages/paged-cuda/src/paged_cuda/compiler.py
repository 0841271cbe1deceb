"""Signatures to cubins: compiled by NVRTC in parallel, checked, and cached on disk.

CUBIN only, for a real architecture: it loads on any driver that knows the GPU, where PTX of a newer
compiler does not. The key of an entry covers the expanded source, the options and NVRTC's version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paged_cuda._nvrtc import compile_to_cubin, nvrtc_version
from paged_cuda.cubin_cache import CubinCache
from paged_cuda.errors import CompileError
from paged_cuda.resources import Resources, enforce, parse_log
from paged_cuda.signature import KernelSignature
from paged_cuda.sources import kernel_source
from paged_cuda.variants import variant_of

# NVRTC's own cache gives no log on a hit, and the log is where registers and spills stand.
_OPTIONS = ("--std=c++17", "-default-device", "--no-cache", "--ptxas-options=-v")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code of one signature for one architecture.

    Attributes:
        signature: What was compiled.
        architecture: Such as `sm_90a`.
        cubin: The code.
        resources: Registers and memory, by ptxas.
        cached: Whether it came from the disk.
    """

    signature: KernelSignature
    architecture: str
    cubin: bytes
    resources: Resources
    cached: bool


def architecture_of(major: int, minor: int) -> str:
    """Return the architecture to compile for on a GPU of this compute capability.

    Raises:
        CompileError: The GPU is older than any kernel here.
    """
    if major < 8:
        raise CompileError(
            "capability", f"compute capability {major}.{minor}", "too old", "8.0 (Ampere) or newer"
        )
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def compile_kernel(
    signature: KernelSignature, architecture: str, cache: CubinCache | None = None
) -> CompiledKernel:
    """Return the machine code of `signature`, from `cache` where it is there.

    Raises:
        CompileError: The source does not compile, or the code breaks a bound of its variant.
    """
    if not architecture.startswith("sm_"):
        raise CompileError(
            "architecture", signature.symbol, architecture, "a real architecture such as sm_90a"
        )
    source = kernel_source(signature.source)
    options = _options(signature, architecture)
    name = f"{signature.symbol}.{architecture}.{_key(source, options)}"
    found = cache.load(name) if cache is not None else None
    if found is not None:
        return CompiledKernel(signature, architecture, *found, cached=True)
    compiled = compile_to_cubin(source, signature.source, options)
    resources = parse_log(compiled.log, f"{signature.symbol} for {architecture}")
    enforce(variant_of(signature), resources, architecture)
    if cache is not None:
        cache.store(name, compiled.cubin, resources)
    return CompiledKernel(signature, architecture, compiled.cubin, resources, cached=False)


def compile_kernels(
    jobs: Iterable[tuple[KernelSignature, str]], cache: CubinCache | None = None
) -> list[CompiledKernel]:
    """Compile (signature, architecture) pairs in parallel; the order of the result is the order of `jobs`.

    NVRTC runs outside the interpreter lock, so threads scale with the cores.

    Raises:
        CompileError: The first job, in order, that fails.
    """
    work = list(jobs)
    if work:
        nvrtc_version()  # where the library is missing, only the first call says so
    if len(work) <= 1:
        return [compile_kernel(signature, architecture, cache) for signature, architecture in work]
    with ThreadPoolExecutor(max_workers=min(len(work), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda job: compile_kernel(job[0], job[1], cache), work))


def _options(signature: KernelSignature, architecture: str) -> tuple[str, ...]:
    macros = tuple(f"-D{name}={value}" for name, value in sorted(signature.macros.items()))
    return (f"--gpu-architecture={architecture}", *_OPTIONS, *macros)


def _key(source: str, options: tuple[str, ...]) -> str:
    parts = ("1", *map(str, nvrtc_version()), *options, source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]

"""The kernel of contiguous.cu: its arguments, and its way onto a GPU."""

from __future__ import annotations

import ctypes
from importlib import resources

from paged_cuda._driver import Launcher
from paged_cuda._nvrtc import compile_to_cubin
from paged_cuda.compiler import architecture_of
from paged_cuda.device import Device

_THREADS = 128
SYMBOL = "contiguous_decode"


class Params(ctypes.Structure):
    """`Params` of contiguous.cu."""

    _fields_ = (
        ("query", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("key_cache", ctypes.c_uint64),
        ("value_cache", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("extent", ctypes.c_uint64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("group", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


def load_kernel(device: Device, head_size: int) -> int:
    """Compile and load contiguous.cu for this GPU; returns the driver's handle.

    Raises:
        CompileError: It does not compile.
        DriverError: The driver refuses the machine code.
    """
    source = resources.files("paged_bench.residency").joinpath("contiguous.cu").read_text(encoding="utf-8")
    options = (
        f"--gpu-architecture={architecture_of(*device.properties.capability)}",
        "--std=c++17",
        "-default-device",
        f"-DHEAD_SIZE={head_size}",
    )
    cubin = compile_to_cubin(source, "contiguous.cu", options).cubin
    with device:
        return device.driver.get_function(device.driver.load_module(cubin), SYMBOL)


def launcher(device: Device, function: int, kv_heads: int, params: Params) -> Launcher:
    """A launch of one block for each key-value head, over what `params` holds at that moment."""
    grid, block = (kv_heads, 1, 1), (_THREADS, 1, 1)
    return device.driver.launcher(function, grid, block, 0, (params,))

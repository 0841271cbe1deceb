"""What this machine offers, told without importing any part of CUDA.

Standard library only, beside NumPy, which importing the package needs. Every probe is guarded: its failure is
a line of the report.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib import metadata

from paged_cuda.cache_folder import default_folder

Report = dict[str, object]
_PACKAGES = (
    "paged-cuda",
    "paged-schema",
    "numpy",
    "cuda-core",
    "cuda-bindings",
    "cuda-pathfinder",
    "nvidia-cuda-nvrtc",
)


def _guarded(probe: Callable[[], object]) -> object:
    try:
        return probe()
    except Exception as error:  # a report must not die of what it reports
        return f"failed: {type(error).__name__}: {error}"


def _packages() -> Report:
    found: Report = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _driver() -> Report:
    try:
        library = _library()
    except OSError:
        return {"found": False, "advice": "install an NVIDIA driver, or run on the CPU with paged_oracle"}
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    report: Report = {"found": True, "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}
    if version.value < 13000:
        report["advice"] = "update the driver: kernels are built by a CUDA 13 compiler"
    return report


def _devices() -> list[Report]:
    try:
        library = _library()
    except OSError:
        return []
    status, count = library.cuInit(0), ctypes.c_int()
    if status != 0:
        raise RuntimeError(f"cuInit returned {status}; check CUDA_VISIBLE_DEVICES and the driver")
    library.cuDeviceGetCount(ctypes.byref(count))
    return [_device(library, ordinal) for ordinal in range(count.value)]


def _device(library: ctypes.CDLL, ordinal: int) -> Report:
    name, device, nbytes = ctypes.create_string_buffer(128), ctypes.c_int(), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(device), ordinal)
    library.cuDeviceGetName(name, 128, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    # CU_DEVICE_ATTRIBUTE: 75/76 capability, 16 multiprocessors, 97 opt-in shared memory a block.
    capability = (attribute(75), attribute(76))
    return {
        "name": name.value.decode(),
        "capability": "{}.{}".format(*capability),
        "supported": capability >= (8, 0),
        "multiprocessors": attribute(16),
        "shared_bytes": attribute(97),
        "memory_bytes": nbytes.value,
    }


def _nvrtc() -> Report:
    try:
        files = metadata.files("nvidia-cuda-nvrtc") or []
    except metadata.PackageNotFoundError:
        files = []
    libraries = sorted(file.name for file in files if ".so" in file.name or file.name.endswith(".dll"))
    report: Report = {"libraries": libraries}
    return report if libraries else report | {"advice": "pip install nvidia-cuda-nvrtc"}


def _cache() -> Report:
    folder = default_folder()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "folder": str(folder),
        "writable": nearest.is_dir() and os.access(nearest, os.W_OK),
        "cubins": len(list(folder.glob("*.cubin"))) if folder.is_dir() else 0,
        "free_bytes": shutil.disk_usage(nearest).free,
    }


def examine() -> Report:
    """Return the whole report as plain data."""
    report: Report = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _guarded(_packages),
        "driver": _guarded(_driver),
        "devices": _guarded(_devices),
        "nvrtc": _guarded(_nvrtc),
        "cache": _guarded(_cache),
    }
    driver, devices = report["driver"], report["devices"]
    report["usable"] = (
        isinstance(driver, dict)
        and "advice" not in driver
        and isinstance(devices, list)
        and any(device["supported"] for device in devices)
    )
    return report


def render(report: Report, *, as_json: bool) -> str:
    """Return the report as JSON or as one line a fact."""
    if as_json:
        return json.dumps(report, indent=2, sort_keys=True)
    lines = []
    for name, value in report.items():
        if isinstance(value, dict):
            lines += [f"{name}.{key}: {item}" for key, item in value.items()]
        elif isinstance(value, list):
            lines += [f"{name}[{index}]: {item}" for index, item in enumerate(value)] or [f"{name}: none"]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)

"""Which hand-overs through shared memory compute-sanitizer's racecheck follows.

usage: python tests-gpu/racecheck_patterns.py

Runs itself under racecheck, one kernel of `racecheck_patterns.cu` a process, and counts the hazards reported
for each. The first is a race; the other reported ones are right by the memory model, but rest on one
lane's arrival for its warp. Exit status 1: the tool does not treat them as the kernels' names say.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cu")
NAMES = re.findall(r"^PATTERN\((\w+)", SOURCE.read_text(encoding="utf-8"), re.MULTILINE)


def launch(name: str) -> None:
    """Run one kernel; the child of compute-sanitizer."""
    from paged_cuda._nvrtc import compile_to_cubin, nvrtc_version
    from paged_cuda.compiler import architecture_of
    from paged_cuda.device import DeviceMemory, resolve_device

    nvrtc_version()
    device = resolve_device(0)
    options = [f"--gpu-architecture={architecture_of(*device.properties.capability)}", "--std=c++17"]
    cubin = compile_to_cubin(SOURCE.read_text(encoding="utf-8"), SOURCE.name, options).cubin
    source, out = DeviceMemory(device, 4096), DeviceMemory(device, 128)
    arguments = [ctypes.c_uint64(memory.pointer) for memory in (source, out)]
    with device:
        device.driver.fill(source.pointer, 1, source.nbytes, 0)
        function = device.driver.get_function(device.driver.load_module(cubin), name)
        device.driver.launcher(function, (1, 1, 1), (64, 1, 1), 0, tuple(arguments))(0)
        device.driver.synchronize(0)


def main() -> int:
    wrong = 0
    for name in NAMES:
        command = ["compute-sanitizer", "--tool", "racecheck", sys.executable, __file__, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards", done.stdout)
        if done.returncode or summary is None:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        reported = int(summary[1]) > 0
        wrong += reported != name.startswith("reported")
        print(f"{name}: {summary[1]} hazards")
    return int(wrong > 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        launch(sys.argv[1])
    else:
        sys.exit(main())

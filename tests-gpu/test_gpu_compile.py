"""What compiling and loading do where a driver is present."""

import time
from pathlib import Path
from typing import Any

from paged_cuda import CubinCache, Device, PagedAttention, Stream
from paged_cuda.compiler import architecture_of, compile_kernel
from parity import bounds_of, call_of, paths_for
from problems import Case, build


def test_compiling_again_tells_the_resources_again(device: Device) -> None:
    """NVRTC keeps a cache of its own beside a driver, and a hit in it has no log."""
    problem = build(Case((1,), (5,)))
    op = PagedAttention(call_of(problem), bounds_of(problem), device=device)
    architecture = architecture_of(*device.properties.capability)
    for spec in op._step.launches:
        first, second = (compile_kernel(spec.signature, architecture) for _ in range(2))
        assert first.resources == second.resources
        assert first.cubin == second.cubin


def test_prepare_times_are_recorded(stream: Stream, tmp_path: Path, facts: dict[str, Any]) -> None:
    """Figures for the record: a new device object loads everything again."""
    problem = build(Case((1,), (5,)))
    for kernel in paths_for(call_of(problem), stream.device):
        for label in ("cold", "warm from disk"):
            device = Device(stream.device.driver, 0)
            op = PagedAttention(
                call_of(problem),
                bounds_of(problem),
                device=device,
                kernel=kernel,
                cache=CubinCache(tmp_path / kernel),
            )
            start = time.perf_counter()
            op.prepare()
            facts[f"prepare ms, {label}, {kernel}"] = round((time.perf_counter() - start) * 1e3, 1)
        assert all(loaded.compiled.cached for loaded in op._kernels)

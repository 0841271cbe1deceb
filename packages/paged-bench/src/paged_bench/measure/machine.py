"""The machine that a run measures on, as something that tests can replace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from paged_cuda import require_driver
from paged_cuda._driver import Driver
from paged_cuda._nvrtc import nvrtc_version

from paged_bench.measure.counters import Counters, CudaCounters, GpuFacts
from paged_bench.measure.nvml import GpuState, Nvml
from paged_bench.record import Gpu


@dataclass(frozen=True)
class Machine:
    """How to reach a GPU and its state.

    Attributes:
        driver: Opens the driver, or raises `NoDriver`.
        counters: Makes the instruments; called after the driver was opened.
        look: Returns the state of the GPU with a UUID.
        sleep: Waits.
    """

    driver: Callable[[], Driver]
    counters: Callable[[], Counters]
    look: Callable[[str], GpuState]
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def real(cls) -> Machine:
        """Return the machine that this process runs on."""
        nvml: list[Nvml] = []

        def look(uuid: str) -> GpuState:
            if not nvml:
                nvml.append(Nvml())
            return nvml[0].state(uuid)

        return cls(require_driver, CudaCounters, look)


def gpu_block(driver: Driver, ordinal: int, facts: GpuFacts) -> Gpu:
    """Return the record's block of a GPU, without its state."""
    properties = driver.properties(ordinal)
    return Gpu(
        name=properties.name,
        uuid_sha256=facts.uuid_sha256,
        compute_capability="{}.{}".format(*properties.capability),
        multiprocessors=properties.multiprocessors,
        l2_bytes=facts.l2_bytes,
        memory_bytes=facts.memory_bytes,
        driver="{}.{}".format(*driver.version()),
        nvrtc="{}.{}".format(*nvrtc_version()),
    )

"""Whose memory the report is about: the fake driver's, in this process, or a GPU's."""

from __future__ import annotations

from typing import Protocol

from paged_kv.vmm import CaptureGate, FakeVmmDriver, VmmDriver

from paged_bench.demo.config import LlamaConfig
from paged_bench.residency.attention import Beside, Residents
from paged_bench.residency.cache import GrowingCache
from paged_bench.residency.host_reader import HostReader
from paged_bench.residency.lane import Lane
from paged_bench.residency.probe import Probe
from paged_bench.residency.shapes import KvShape, Variant


class Machine(Protocol):
    """Makes lanes and caches over one kind of memory."""

    @property
    def name(self) -> str:
        """`fake` or `cuda`."""
        ...

    @property
    def device(self) -> str:
        """What it is, for people."""
        ...

    @property
    def granularity(self) -> int:
        """Bytes of a granule."""
        ...

    def lane(self, variant: Variant, shape: KvShape, config: LlamaConfig, longest: int) -> Lane:
        """A cache with the model's attention over it, for a sequence of at most `longest` tokens."""
        ...

    def cache(self, variant: Variant, shape: KvShape) -> tuple[GrowingCache, VmmDriver]:
        """A cache alone, and the driver to ask what it takes."""
        ...

    def probe(self, shape: KvShape, tokens: int) -> Probe | None:
        """A kernel over whole caches of up to `tokens` tokens, or None where no kernel runs."""
        ...


class FakeMachine:
    """Host memory behind the driver that refuses what a real one forbids."""

    name = "fake"
    device = "host memory, no GPU"
    _STREAM = 1

    def __init__(self) -> None:
        self._gate = CaptureGate()
        self.granularity = FakeVmmDriver().granularity()[1]

    def lane(self, variant: Variant, shape: KvShape, config: LlamaConfig, longest: int) -> Lane:
        """As `Machine.lane`."""
        driver = FakeVmmDriver(backed=True)
        cache = GrowingCache(variant, shape, driver, self._STREAM, self._gate)
        residents = Residents.of(config, shape)
        reader = HostReader(driver, self._STREAM, config.head_size**-0.5)
        return Lane(variant, shape, residents, cache, reader, Beside(config, residents, longest))

    def cache(self, variant: Variant, shape: KvShape) -> tuple[GrowingCache, VmmDriver]:
        """As `Machine.cache`."""
        driver = FakeVmmDriver()
        return GrowingCache(variant, shape, driver, self._STREAM, self._gate), driver

    def probe(self, shape: KvShape, tokens: int) -> Probe | None:
        """As `Machine.probe`: no kernel runs here."""
        return None

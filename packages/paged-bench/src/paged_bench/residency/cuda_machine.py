"""A GPU's memory, behind the real driver; importing this needs the CUDA package, using it a GPU."""

from __future__ import annotations

from paged_cuda import CudaVmmDriver, Stream
from paged_cuda.device import DeviceLike
from paged_kv.vmm import PROCESS_GATE, VmmDriver

from paged_bench.demo.config import LlamaConfig
from paged_bench.residency.attention import Beside, Residents
from paged_bench.residency.cache import GrowingCache
from paged_bench.residency.cuda_probe import CudaProbe
from paged_bench.residency.cuda_reader import CudaReader
from paged_bench.residency.kernel import load_kernel
from paged_bench.residency.lane import Lane
from paged_bench.residency.probe import Probe
from paged_bench.residency.shapes import KvShape, Variant

# mypy holds the driver against the protocol here: the packages that define the two do not know each other.
_conforms: type[VmmDriver] = CudaVmmDriver


class CudaMachine:
    """One GPU.

    Args:
        device: A GPU, its ordinal, or None for the current one.

    Raises:
        NoDriver: There is no usable driver or GPU.
    """

    name = "cuda"

    def __init__(self, device: DeviceLike = None) -> None:
        self._stream = Stream(device)
        self._driver = CudaVmmDriver(self._stream.device)
        self._kernels: dict[int, int] = {}

    @property
    def device(self) -> str:
        """The GPU's name."""
        return self._stream.device.properties.name

    @property
    def granularity(self) -> int:
        """Bytes of a granule, as the driver recommends."""
        return self._driver.granularity()[1]

    def lane(self, variant: Variant, shape: KvShape, config: LlamaConfig, longest: int) -> Lane:
        """As `Machine.lane`."""
        cache, _ = self.cache(variant, shape)
        residents, size = Residents.of(config, shape), config.head_size
        if size not in self._kernels:
            self._kernels[size] = load_kernel(self._stream.device, size)
        reader = CudaReader(
            self._kernels[size],
            self._stream,
            kv_heads=residents.kv_heads,
            group=residents.group,
            head_size=size,
            max_tokens=longest,
        )
        return Lane(variant, shape, residents, cache, reader, Beside(config, residents, longest))

    def cache(self, variant: Variant, shape: KvShape) -> tuple[GrowingCache, VmmDriver]:
        """As `Machine.cache`."""
        cache = GrowingCache(variant, shape, self._driver, self._stream.handle, PROCESS_GATE)
        return cache, self._driver

    def probe(self, shape: KvShape, tokens: int) -> Probe | None:
        """As `Machine.probe`."""
        return CudaProbe(shape, tokens, self._stream)

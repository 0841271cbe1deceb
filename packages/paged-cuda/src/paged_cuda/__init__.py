"""CUDA kernels for ONNX Runtime's PagedAttention, compiled by NVRTC without a toolkit.

A `PagedAttention` is made of a checked call and `Bounds`, prepared once and then run, eagerly or in a
`CapturedGraph`. It attends on tensor cores where they serve the call (`sm90` on Hopper, `sm80`), else by the
`baseline` kernel.

Importing this touches no GPU and opens no library; `require_driver` and the constructors do.
"""

from paged_cuda._driver import require_driver
from paged_cuda.arrays import DeviceArray
from paged_cuda.attention import PagedAttention
from paged_cuda.bounds import Bounds
from paged_cuda.cubin_cache import CubinCache
from paged_cuda.device import Device
from paged_cuda.device_plan import DeviceIndexPlan
from paged_cuda.errors import (
    ArgumentMismatch,
    CacheWarning,
    CompileError,
    DriverError,
    GraphClosed,
    NoDriver,
    NotPrepared,
    PagedCudaError,
)
from paged_cuda.explain import Explanation
from paged_cuda.graph import CapturedGraph
from paged_cuda.stream import Stream
from paged_cuda.violations import Violations
from paged_cuda.vmm_driver import CudaVmmDriver
from paged_cuda.workspace import Workspace

__all__ = [
    "ArgumentMismatch",
    "Bounds",
    "CacheWarning",
    "CapturedGraph",
    "CompileError",
    "CubinCache",
    "CudaVmmDriver",
    "Device",
    "DeviceArray",
    "DeviceIndexPlan",
    "DriverError",
    "Explanation",
    "GraphClosed",
    "NoDriver",
    "NotPrepared",
    "PagedAttention",
    "PagedCudaError",
    "Stream",
    "Violations",
    "Workspace",
    "require_driver",
]

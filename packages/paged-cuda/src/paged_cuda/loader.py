"""Machine code onto a GPU, once a process.

Modules are never unloaded: a graph, ours or somebody else's, may outlive every Python object that knew the
kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from paged_cuda.compiler import CompiledKernel, architecture_of, compile_kernels
from paged_cuda.cubin_cache import CubinCache
from paged_cuda.device import Device
from paged_cuda.signature import KernelSignature


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel ready to launch.

    Attributes:
        compiled: Its machine code and resources.
        function: The driver's handle.
    """

    compiled: CompiledKernel
    function: int


_loaded: dict[tuple[Device, KernelSignature], LoadedKernel] = {}
_lock = threading.Lock()


def load_kernels(
    device: Device, signatures: Iterable[KernelSignature], cache: CubinCache | None = None
) -> list[LoadedKernel]:
    """Compile in parallel what is cold, load it on `device`, and return all in order.

    Raises:
        CompileError: A kernel does not compile.
        DriverError: The driver refuses the machine code.
    """
    wanted = list(signatures)
    with _lock:
        cold = [signature for signature in dict.fromkeys(wanted) if (device, signature) not in _loaded]
        architecture = architecture_of(*device.properties.capability)
        for compiled in compile_kernels([(signature, architecture) for signature in cold], cache):
            with device:
                module = device.driver.load_module(compiled.cubin)
                function = device.driver.get_function(module, compiled.signature.symbol)
            _loaded[device, compiled.signature] = LoadedKernel(compiled, function)
        return [_loaded[device, signature] for signature in wanted]

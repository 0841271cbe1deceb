"""From a call to the kernels it needs: the only place that knows macros and symbols.

A signature holds what is fixed at compile time. What a kernel reads at run time (extents, strides, scale,
masks) is not part of it, so a handful of signatures serves every call of a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paged_schema import Call

ElementType = Literal["float16", "bfloat16"]
_SHORT: dict[ElementType, str] = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, order=True)
class KernelSignature:
    """One kernel as it is compiled and loaded.

    Attributes:
        kernel: Name of the source, `kernels/<kernel>.cu`.
        dtype: Element type of query, key, cache and output.
        constants: Further compile-time constants by macro name, such as `(("ROW_TILE", 16),)`.
        debug: Whether the kernel counts violations of the contract that only the device can see.

    Example:
        >>> KernelSignature("append", "bfloat16").symbol
        'append_bf16'
    """

    kernel: str
    dtype: ElementType
    constants: tuple[tuple[str, int], ...] = ()
    debug: bool = False

    @property
    def source(self) -> str:
        """The file under `kernels/`."""
        return f"{self.kernel}.cu"

    @property
    def symbol(self) -> str:
        """The entry point's name, unique among all signatures."""
        parts = [self.kernel, _SHORT[self.dtype]]
        parts += [f"{name.lower()}{value}" for name, value in self.constants]
        return "_".join([*parts, "debug"] if self.debug else parts)

    @property
    def macros(self) -> dict[str, str]:
        """The `-D` definitions the source is compiled with."""
        macros = {
            "SYMBOL": self.symbol,
            "BF16": str(int(self.dtype == "bfloat16")),
            "DEBUG": str(int(self.debug)),
        }
        return macros | {name: str(value) for name, value in self.constants}


def element_type(call: Call) -> ElementType:
    """Return the call's element type; `Capability.paged_cuda` admits only these two."""
    return "bfloat16" if call.dtype == "bfloat16" else "float16"


def append_signature(call: Call, *, debug: bool) -> KernelSignature:
    """Return the kernel that rotates and writes the new rows of `call`."""
    return KernelSignature("append", element_type(call), debug=debug)


def baseline_signature(call: Call, *, debug: bool) -> KernelSignature:
    """Return the baseline attend kernel for `call`."""
    return KernelSignature("baseline_latent", element_type(call), debug=debug)

"""Every kernel variant that ships, with the bounds its machine code must keep.

CI compiles exactly this list for exactly these architectures, so what a user can load has been compiled
before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from paged_cuda.signature import ElementType, KernelSignature

# Compute capability 9.0 loads sm_90a: only there do Hopper's own instructions exist, and no other GPU
# shares 9.0.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")


@dataclass(frozen=True, slots=True)
class Variant:
    """A signature and what its compilation must satisfy.

    Attributes:
        signature: The kernel.
        max_local_bytes: Largest stack frame, spills included, in bytes a thread.
        max_registers: Most registers a thread may use.
        architectures: Where it ships; empty means everywhere.
    """

    signature: KernelSignature
    max_local_bytes: int = 0
    max_registers: int = 255
    architectures: tuple[str, ...] = ()

    def ships_for(self, architecture: str) -> bool:
        """Return whether this variant is compiled for `architecture`."""
        return not self.architectures or architecture in self.architectures


def _baseline() -> list[Variant]:
    return [
        Variant(KernelSignature(kernel, dtype, debug=debug), max_registers=128)
        for kernel in ("append", "baseline_latent")
        for dtype in get_args(ElementType)
        for debug in (False, True)
    ]


VARIANTS: tuple[Variant, ...] = tuple(_baseline())
_BY_SIGNATURE = {variant.signature: variant for variant in VARIANTS}


def variant_of(signature: KernelSignature) -> Variant:
    """Return the shipped variant of `signature`.

    Raises:
        KeyError: The signature is not shipped, which is a defect of this package.
    """
    return _BY_SIGNATURE[signature]


def variants_for(architecture: str) -> tuple[Variant, ...]:
    """Return all variants that ship for `architecture`."""
    return tuple(variant for variant in VARIANTS if variant.ships_for(architecture))

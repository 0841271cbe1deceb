"""Every kernel variant that ships, with the bounds its machine code must keep.

CI compiles exactly this list for exactly these architectures, so what a user can load has been compiled
before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from paged_cuda.signature import ElementType, KernelSignature
from paged_cuda.sm90_shape import ROW_TILE, shape_for
from paged_cuda.split_plan import (
    PAIRED_PARTIALS,
    ROW_PARTIALS,
    TALL_PARTIALS,
    Partials,
    padded_v_head_size,
)
from paged_cuda.split_shape import ROW_TILES, shapes_for

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


# (head_size, v_head_size) of known models and of the edges: DeepSeek and GLM, 512 without rotary, the demo's
# model, and widths that pad. What is not here compiles on demand.
_HEAD_SIZES = (
    (576, 512),
    (512, 512),
    (384, 192),
    (320, 256),
    (192, 128),
    (192, 100),
    (160, 128),
    (64, 64),
    (24, 8),
)
_TALL_HEAD_SIZES = ((576, 512), (192, 128))
# Shared memory that a block may opt in to, of GPUs that have less than Hopper.
OPT_IN_BYTES = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_120": 101_376}
_HOPPER_BYTES = 232_448


# What NVRTC 13.0 keeps in local memory on sm_100: a few words of the tallest tile of the widest rows, which
# uses all registers there are, read once a tile (13.5: half of it); and of what a warp of `combine` knows of
# a line of 192 columns, read before and after its parts (13.5: nothing).
_LOCAL_BYTES = 16


def _local_bytes(signature: KernelSignature) -> int:
    constants = dict(signature.constants)
    tallest = (constants.get("HEAD_SIZE"), constants.get("ROW_TILE")) == (576, 64)
    ragged = signature.kernel == "combine" and constants["V_HEAD_SIZE"] == 192
    return _LOCAL_BYTES if tallest or ragged else 0


def _split() -> list[Variant]:
    where: dict[KernelSignature, list[str]] = {}
    for architecture in ARCHITECTURES:
        for dtype in get_args(ElementType):
            for signature in _split_signatures(dtype, OPT_IN_BYTES.get(architecture, _HOPPER_BYTES)):
                where.setdefault(signature, []).append(architecture)
    return [
        _limited(signature, tuple(dict.fromkeys(shipped)), _local_bytes(signature))
        for signature, shipped in where.items()
    ]


# Registers a thread. `combine` gets what the mma.sync kernels of 16 rows leave of a Hopper multiprocessor for
# its 128 threads, beside the wide one and the narrow one. Two blocks of 256 threads of `combine_paired` share
# one after the wgmma kernel, beside which nothing fits.
_REGISTERS = {"combine": 80, "combine_paired": 128}
_NARROW_COMBINE_REGISTERS = 64


def _limited(signature: KernelSignature, architectures: tuple[str, ...], local_bytes: int = 0) -> Variant:
    most = _REGISTERS.get(signature.kernel, 255)
    if signature.kernel == "combine" and padded_v_head_size(dict(signature.constants)["V_HEAD_SIZE"]) == 128:
        most = _NARROW_COMBINE_REGISTERS
    return Variant(signature, local_bytes, most, architectures)


def _combines(
    partials: Partials, dtype: ElementType, sizes: tuple[int, int], row_tile: int
) -> Iterator[KernelSignature]:
    for column_parts, worker in partials.workers(sizes[1], apart=partials.paired):
        # Of other sizes the coarsest and the finest; what lies between compiles on demand.
        if sizes in _TALL_HEAD_SIZES or column_parts == (8 if worker == partials.threads else 1):
            yield partials.signature(
                dtype, sizes[1], row_tile=row_tile, column_parts=column_parts, worker=worker
            )


def _split_signatures(dtype: ElementType, shared_bytes: int) -> Iterator[KernelSignature]:
    for threads in (256, 1024):
        yield KernelSignature("schedule", dtype, (("THREADS", threads),))
    for sizes in _HEAD_SIZES:
        for row_tile in ROW_TILES if sizes in _TALL_HEAD_SIZES else (16, 32):
            shapes = shapes_for(
                row_tile, *sizes, shared_bytes=shared_bytes, shared_bytes_multiprocessor=shared_bytes + 1024
            )
            if shapes:
                yield shapes[0].signature(dtype, *sizes)
                partials = ROW_PARTIALS if row_tile == 16 else TALL_PARTIALS
                yield from _combines(partials, dtype, sizes, row_tile)


def _hopper() -> list[Variant]:
    found = []
    for dtype in get_args(ElementType):
        for sizes in _HEAD_SIZES:
            shape = shape_for(*sizes, _HOPPER_BYTES)
            if shape:
                attend = shape.signature(dtype, *sizes)
                for signature in (attend, *_combines(PAIRED_PARTIALS, dtype, sizes, ROW_TILE)):
                    found.append(_limited(signature, ("sm_90a",)))
    return found


_ALL = {variant.signature: variant for variant in (*_hopper(), *_baseline(), *_split())}
VARIANTS: tuple[Variant, ...] = tuple(_ALL.values())
_BY_SIGNATURE = {variant.signature: variant for variant in VARIANTS}
# What nobody compiled before may touch local memory a little, and is right all the same: 64-row tiles of the
# widest values take 80 bytes with NVRTC 13.0.
_ON_DEMAND_LOCAL_BYTES = 96


def variant_of(signature: KernelSignature) -> Variant:
    """Return the variant of `signature`, with the bounds of an unlisted head size if it is not listed."""
    return _BY_SIGNATURE.get(signature) or Variant(signature, _ON_DEMAND_LOCAL_BYTES)


def variants_for(architecture: str) -> tuple[Variant, ...]:
    """Return all variants that ship for `architecture`."""
    return tuple(variant for variant in VARIANTS if variant.ships_for(architecture))

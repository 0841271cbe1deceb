"""What single backends of ONNX Runtime round on top of what they all round.

Invariant: emulating a backend never changes what is written to a cache, only what attention makes of it.

ONNX Runtime answers a SEPARATE call with one of several kernels, picked by the sizes of the whole batch. They
share the roundings of ``"ort"``; some round the softmax weights to T before they meet the values,
FlashAttention applies a head sink to its already rounded output, and the two that read a gathered copy of a
quantised cache hold that copy in T. Emulation reproduces the golden files of those kernels to the value or
nearly so; it is off by default, because a result would then depend on which other sequences share the call.

The weights are rounded relative to the running maximum, so which tile of keys a kernel was in matters. We
round by `tiles.KEY_CHUNK`, ascending; for contexts beyond that some weights may round to the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BackendName = Literal["paged-decode", "flash", "memory-efficient", "cudnn"]


@dataclass(frozen=True)
class Backend:
    """What a backend does on top of what all do: where it rounds to T, and what it makes of a missing block.

    Attributes:
        weights: softmax weights, before they meet the values.
        copies: the dequantised rows of a quantised cache.
        sink: the output before the head sink scales it; it is rounded again after.
        gathers: it attends to a gathered copy, in which a position without a block is a row of zeros that
            takes part with a logit of 0, instead of being skipped.
        takes_sink: it has a head sink at all.
    """

    weights: bool = False
    copies: bool = False
    sink: bool = False
    gathers: bool = False
    takes_sink: bool = True


COMMON = Backend()
BACKENDS: dict[BackendName, Backend] = {
    "paged-decode": COMMON,
    "flash": Backend(weights=True, copies=True, sink=True, gathers=True),
    "memory-efficient": Backend(weights=True, copies=True, gathers=True, takes_sink=False),
    "cudnn": Backend(weights=True, takes_sink=False),
}

"""Which of ORT's CUDA backends serves a call, in ORT's order of attempts, and why the others do not.

A condition that needs a size which is not known counts as met: "nothing known rules it out".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paged_schema.call import Call
from paged_schema.eligibility import (
    Problem,
    cudnn,
    flash_gather,
    flash_paged,
    int4_speculative,
    latent,
    memory_efficient,
    paged_decode,
    xqa,
)
from paged_schema.facts import known
from paged_schema.inputs import Dim


@dataclass(frozen=True, slots=True)
class BackendVerdict:
    """One backend and what rules it out; it may serve the call when `reasons` is empty.

    Attributes:
        backend: Name of the backend.
        serves: Whether this is the backend that ORT picks.
        reasons: Why it cannot, or why an earlier one is picked.
    """

    backend: str
    serves: bool
    reasons: tuple[str, ...] = ()


def problem_of(call: Call, *, sm: int = 80, tokens: Dim = None, batch: Dim = None) -> Problem:
    """Describe a checked call for backend selection.

    Args:
        call: A checked call.
        sm: Compute capability as major * 10 + minor.
        tokens: New tokens of a step, where the call leaves them open.
        batch: Sequences of a step, where the call leaves them open.
    """
    return Problem(
        minor=int(call.ort.partition(".")[2]),
        sm=sm,
        dtype=call.dtype,
        cache_dtype=call.cache_dtype,
        latent=call.layout == "LATENT",
        head_size=call.head_size,
        v_head_size=call.v_head_size,
        group_size=call.group_size,
        block_size=call.block_size,
        tokens=call.tokens if known(call.tokens) is not None else tokens,
        batch=call.batch if known(call.batch) is not None else batch,
        sink=call.has_head_sink,
        windowed=call.local_window_size != -1,
        softcapped=call.softcap > 0,
        causal=call.causal,
        metadata=call.has_metadata,
        per_channel=call.k_quant_type == call.v_quant_type == "PER_CHANNEL",
    )


UNQUANTISED: Final = (
    ("cuDNN", cudnn),
    ("Flash", flash_paged),
    ("paged decode", paged_decode),
    ("memory-efficient", memory_efficient),
)
QUANTISED_DECODE: Final = (("XQA", xqa), ("paged decode", paged_decode))
QUANTISED_PREFILL: Final = (
    ("XQA", xqa),
    ("Flash over a gathered copy", flash_gather),
    ("memory-efficient", memory_efficient),
)


def order(p: Problem) -> tuple[tuple[str, Callable[[Problem], list[str]]], ...]:
    """Return each backend that ORT tries for this call, in order, with the test that rules it out."""
    if p.latent:
        return (("LATENT", latent),)
    if not p.quantised:
        return UNQUANTISED
    if p.decode is None:
        return QUANTISED_DECODE + QUANTISED_PREFILL[1:]
    if (p.decode or int4_speculative(p)) and (p.causal or p.minor != 30):
        return QUANTISED_DECODE
    return QUANTISED_PREFILL


def attempts(p: Problem) -> tuple[tuple[str, list[str]], ...]:
    """Return each backend that ORT tries for this call, in order, with what rules it out."""
    return tuple((name, test(p)) for name, test in order(p))


def explain(p: Problem) -> tuple[BackendVerdict, ...]:
    """Return ORT's backends in the order of their attempts; at most one serves."""
    verdicts: list[BackendVerdict] = []
    chosen = ""
    for name, reasons in attempts(p):
        serves = not reasons and not chosen
        if not reasons and chosen:
            reasons = [f"{chosen} is tried first"]
        chosen = name if serves else chosen
        verdicts.append(BackendVerdict(name, serves, tuple(reasons)))
    return tuple(verdicts)


def explain_call(
    call: Call, *, sm: int = 80, tokens: Dim = None, batch: Dim = None
) -> tuple[BackendVerdict, ...]:
    """Return which of ORT's CUDA backends serves a call, and why not the others."""
    return explain(problem_of(call, sm=sm, tokens=tokens, batch=batch))

"""The rows of the suites: the shapes that peers are known on, and those that the project's targets name.

`quick` is a cross-section for a first look, `standard` the whole table, `full` adds stacks of whole models.
`tiles` tries row tiles that the operator would not choose by itself, `small` two of them where there is
little to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from paged_bench.measure.suite import CaseSpec

_HEADS = (16, 64, 128)
_RAGGED_SEED = 318  # 128 lengths of 534,161 keys together, the total that the peers are known on
_DECODE = (
    *((1, 4096), (1, 32_768), (1, 131_072), (16, 8192), (64, 4096)),
    *((128, 4096), (128, 8192), (256, 1024)),
)


def decode(batch: int, context: int, heads: int, **sizes: object) -> CaseSpec:
    """Return a batch of equal lengths that brings one token a sequence."""
    # mypy cannot tell which field each of `sizes` goes to; their types are those of the tables below.
    return CaseSpec("decode", (context,) * batch, (1,) * batch, heads, **sizes)  # type: ignore[arg-type]


def _narrow(batch: int, context: int, heads: int, **sizes: object) -> CaseSpec:
    return decode(batch, context, heads, head_size=192, v_head_size=128, **sizes)


def ragged(heads: int) -> CaseSpec:
    """Return 128 lengths, uniform in 256 to 8,192."""
    draw = random.Random(_RAGGED_SEED)
    lengths = tuple(draw.randrange(256, 8193) for _ in range(128))
    return CaseSpec("ragged", lengths, (1,) * 128, heads)


def speculative(query: int, heads: int) -> CaseSpec:
    """Return 128 sequences of 4,096 keys with `query` new tokens each."""
    return CaseSpec("speculative", (4096,) * 128, (query,) * 128, heads)


def mixed(batch: int, context: int, prefill: int, heads: int) -> CaseSpec:
    """Return decoding sequences and one that brings `prefill` tokens."""
    return CaseSpec("mixed", (context,) * batch, (*(1,) * (batch - 1), prefill), heads)


def prefill(heads: int, head_size: int = 576, v_head_size: int = 512) -> CaseSpec:
    """Return one sequence of 4,096 new tokens."""
    return CaseSpec("prefill", (4096,), (4096,), heads, head_size, v_head_size)


def stack(model: str, layers: int, heads: int, batch: int, context: int) -> CaseSpec:
    """Return one decode step of all layers of a model."""
    title = f"{model}, {layers} layers, {heads} heads, {batch} x {context:,}"
    return CaseSpec("model", (context,) * batch, (1,) * batch, heads, layers=layers, title=title)


def quick() -> tuple[CaseSpec, ...]:
    """Return a cross-section: each group once, each head count and size once."""
    return (
        decode(1, 4096, 16),
        decode(1, 131_072, 16),
        decode(64, 4096, 16),
        decode(64, 4096, 16, rotary_dim=0),
        decode(64, 4096, 64),
        decode(64, 4096, 128),
        decode(64, 4096, 16, block_size=16),
        decode(64, 4096, 16, dtype="float16"),
        _narrow(64, 4096, 16),
        ragged(16),
        speculative(2, 16),
        mixed(64, 4096, 2048, 16),
        prefill(16, 192, 128),
    )


def standard() -> tuple[CaseSpec, ...]:
    """Return the peers' table and every row of the project's targets."""
    return (
        *(decode(batch, context, heads) for batch, context in _DECODE for heads in _HEADS),
        *(decode(128, 4096, heads, block_size=size) for size in (16, 32) for heads in (16, 128)),
        *(decode(1, 32_768, 16, block_size=size) for size in (16,)),
        *(decode(128, 4096, heads) for heads in (12, 24, 48, 96)),
        *(decode(64, 4096, heads, dtype="float16") for heads in _HEADS),
        *(decode(128, 4096, heads, weight_terms=terms) for heads in (64, 128) for terms in (1, 2)),
        decode(128, 4096, 16, split_rows=1024),
        decode(128, 4096, 16, rotary_dim=0),
        *(speculative(query, heads) for query, heads in ((2, 16), (2, 128), (4, 16))),
        *(ragged(heads) for heads in (16, 128)),
        *(mixed(64, 4096, 2048, heads) for heads in (16, 128)),
        *(mixed(128, 8192, 512, heads) for heads in (16, 128)),
        *(_narrow(*shape, heads) for shape in ((64, 4096), (128, 8192)) for heads in (16, 64)),
        _narrow(128, 8192, 16, block_size=16),
        *(prefill(heads) for heads in (16, 128)),
        prefill(16, 192, 128),
    )


def models() -> tuple[CaseSpec, ...]:
    """Return whole stacks and the ranks of their tensor-parallel halves; what fits 141 GB of memory.

    A latent cache is not divided among ranks, so the rank's row has the same bytes and fewer heads. 32 x
    131,072 and 128 x 32,768 would need 295 to 377 GB and are left out. Shape by shape, so that a run that is
    cut short has every model.
    """
    shapes = ((1, 4096), (32, 4096), (1, 32_768), (128, 4096), (1, 131_072), (32, 32_768))
    kinds = (
        ("GLM-5.2", 78, 64),
        ("GLM-5.2 rank", 78, 16),
        ("DeepSeek-V3", 61, 128),
        ("DeepSeek-V3 rank", 61, 16),
    )
    return tuple(stack(*kind, *shape) for shape in shapes for kind in kinds)


def tiles() -> tuple[CaseSpec, ...]:
    """Return every row tile of the kernels, in prefill and in decode."""
    shapes = (prefill(16), decode(128, 4096, 64), decode(128, 4096, 16))
    return tuple(replace(shape, row_tile=rows) for shape in shapes for rows in (16, 32, 48, 64))


def small() -> tuple[CaseSpec, ...]:
    """Return small steps, each with 16-row tiles and with 64-row ones: mma.sync and wgmma."""
    ends = [(1, 1024, 64), (1, 4096, 64), (1, 6144, 64), (1, 8192, 64), (4, 1024, 64), (64, 64, 64)]
    ends += [(1, 1024, 128), (1, 3072, 128), (1, 4096, 128), (1, 8192, 32)]
    between = [(1, 2048, 64), (8, 1024, 64), (8, 256, 64), (1, 2048, 128), (4, 256, 128)]
    between += [(1, 4096, 32), (1, 16_384, 32), (1, 4096, 96)]
    several = (((4096,), (4,), 16), ((256,), (16,), 64), ((128,), (128,), 16), ((512,), (128,), 16))
    shapes = (
        *(decode(*shape) for shape in (*ends, *between)),
        *(_narrow(*shape) for shape in (*ends, *between)),
        *(decode(*shape, head_size=448, v_head_size=384) for shape in ends),
        *(decode(*shape, head_size=320, v_head_size=256) for shape in ends),
        *(CaseSpec("speculative", *shape) for shape in several),
    )
    return tuple(replace(shape, row_tile=rows) for shape in shapes for rows in (16, 64))


_SUITES: dict[str, Callable[[], tuple[CaseSpec, ...]]] = {
    "quick": quick,
    "standard": standard,
    "full": lambda: (*standard(), *models()),
    "tiles": tiles,
    "small": small,
}
SUITES = tuple(_SUITES)


def cases_of(suite: str) -> tuple[CaseSpec, ...]:
    """Return the cases of `suite` in the order of their definition, each once."""
    return tuple({spec.id: spec for spec in _SUITES[suite]()}.values())

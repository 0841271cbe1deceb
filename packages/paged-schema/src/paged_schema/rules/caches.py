"""RUN: the two caches, or the one."""

from __future__ import annotations

from typing import Final

from paged_schema.facts import Facts, int32, known
from paged_schema.rules.registry import KERNELS, Fault, rule
from paged_schema.rules.shapes import dim_fault, rank_fault

MIN_BLOCK: Final = 16
MAX_INT4_HEAD: Final = 1024


@rule("R08a", "run", "key_cache has rank 4", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return rank_fault("key_cache", f.key_cache, 4)


@rule("R08b", "run", "the block size is a power of two of at least 16", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    size = known(f.bs)
    if size is None or (int32(size) >= MIN_BLOCK and int32(size).bit_count() == 1):
        return None
    return Fault("key_cache", f"block size {size}", "a power of two of at least 16")


@rule(
    "R08c",
    "run",
    "key_cache ends in (kv_num_heads, head_size), halved for INT4",
    "INVALID_ARGUMENT",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    return (
        dim_fault("key_cache", f.key_cache, 2, f.kvh, "kv_num_heads")
        or dim_fault("key_cache", f.key_cache, 3, _stored(f), "the stored head size")
    )  # fmt: skip


@rule(
    "R08d", "run", "SEPARATE: value_cache has the shape of key_cache", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    if f.latent:
        return None
    return (
        rank_fault("value_cache", f.value_cache, 4)
        or dim_fault("value_cache", f.value_cache, 0, known(f.nb), "the blocks of key_cache")
        or dim_fault("value_cache", f.value_cache, 1, known(f.bs), "the block size of key_cache")
        or dim_fault("value_cache", f.value_cache, 2, f.kvh, "kv_num_heads")
        or dim_fault("value_cache", f.value_cache, 3, _stored(f), "the stored head size")
    )


@rule("I01", "run", "INT4: the layout is SEPARATE", "FAIL", since=30, providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return (
        Fault("kv_cache_layout", "LATENT", "SEPARATE with a uint8 (INT4) cache")
        if f.int4 and f.latent
        else None
    )


@rule("I03", "run", "INT4: the head size is at most 1024", "FAIL", since=30, providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if not f.int4 or f.hs is None or f.hs <= MAX_INT4_HEAD:
        return None
    return Fault("query", f"head size {f.hs}", f"at most {MAX_INT4_HEAD} with a uint8 (INT4) cache")


def _stored(f: Facts) -> int | None:
    if f.hs is None:
        return None
    return (f.hs + 1) // 2 if f.int4 else f.hs

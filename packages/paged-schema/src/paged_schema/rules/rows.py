"""RUN: head counts, and the rows of query, key and value in each mode."""

from __future__ import annotations

from typing import Final

from paged_schema.facts import Facts, known
from paged_schema.rules.registry import CUDA, KERNELS, Fault, Rule, group, rule
from paged_schema.rules.shapes import dim_fault, dim_of, rank_fault

MAX_THREADS: Final = 1024


@rule(
    "R01",
    "run",
    "num_heads is at most 1024, the device's threads a block",
    "INVALID_ARGUMENT",
    providers=CUDA,
)
def _(f: Facts) -> Fault | None:
    return None if f.nh <= MAX_THREADS else Fault("num_heads", f.nh, f"at most {MAX_THREADS}")


@rule("X03", "run", "kv_num_heads is not 0 when cut to 32 bits", "CRASH", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.kvh != 0:
        return None
    return Fault(
        "kv_num_heads", f.attributes.kv_num_heads, "below 2**31; ORT divides by its low 32 bits and dies"
    )


@rule(
    "R02", "run", "kv_num_heads divides num_heads, both cut to 32 bits", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    return None if f.nh % f.kvh == 0 else Fault("kv_num_heads", f.kvh, f"a divisor of {f.nh}")


@rule("R03a", "run", "LATENT: key is present", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return Fault("key", "nothing", "the latent rows") if f.latent and f.key is None else None


@rule("R03b", "run", "LATENT: value is absent", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.latent and f.value is not None:
        return Fault("value", str(f.value), "absent; a latent row holds key and value")
    return None


@group(
    Rule("R03c", "run", "LATENT: query has rank 2", "INVALID_ARGUMENT", providers=KERNELS),
    Rule("R04a", "run", "unpacked: query has rank 2", "INVALID_ARGUMENT", providers=KERNELS),
    Rule("R05a", "run", "packed: query has rank 2", "INVALID_ARGUMENT", providers=KERNELS),
)
def _(f: Facts) -> Fault | None:
    # Only a node whose file declares no query shape comes here with another rank.
    fault = rank_fault("query", f.query, 2)
    return fault and fault._replace(rule="R03c" if f.latent else "R05a" if f.packed else "R04a")


@rule("X06", "run", "the heads of a query row are not 0 when cut to 32 bits", "CRASH", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.row_heads != 0:
        return None
    heads = (f.attributes.num_heads, f.attributes.kv_num_heads)
    return Fault(
        "num_heads", heads, "head counts below 2**31; ORT divides by the low 32 bits of their sum and dies"
    )


@rule(
    "R03d", "run", "LATENT: the query width is a multiple of num_heads", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    if not f.latent or f.hidden is None or f.hidden % f.nh == 0:
        return None
    return Fault("query", f.hidden, f"a width that is a multiple of num_heads {f.nh}")


@rule("R03e", "run", "LATENT: the head size is a multiple of 8", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _eights(f) if f.latent else None


@rule(
    "R03f", "run", "LATENT: key is (tokens, kv_num_heads * head_size)", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    if not f.latent:
        return None
    width = None if f.hs is None else f.kvh * f.hs
    return (
        rank_fault("key", f.key, 2)
        or dim_fault("key", f.key, 0, known(f.tokens), "the tokens of query")
        or dim_fault("key", f.key, 1, width, "kv_num_heads * head_size")
    )


@rule(
    "R04g", "run", "unpacked: the query width is a multiple of num_heads", "INVALID_ARGUMENT",
    since=31, providers=KERNELS,
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    if f.packed or f.hidden is None or f.hidden % f.nh == 0:
        return None
    return Fault("query", f.hidden, f"a width that is a multiple of num_heads {f.nh}")


@rule("R04b", "run", "unpacked: the head size is a multiple of 8", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    # LATENT has asked for the same; packed asks under its own id.
    return None if f.packed else _eights(f)


@rule("R04c", "run", "unpacked: value is present", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.latent or f.packed or f.value is not None:
        return None
    return Fault("value", "nothing", "the value rows, as key is present")


@rule(
    "R04d", "run", "unpacked: key has rank 2 and the tokens of query", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    return rank_fault("key", f.key, 2) or dim_fault("key", f.key, 0, known(f.tokens), "the tokens of query")


@rule("R04e", "run", "unpacked: key is kv_num_heads * head_size wide", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    width = dim_of(f.key, 1)
    if f.latent or width is None:
        return None
    if width % f.kvh:
        return Fault("key", width, f"a width that is a multiple of kv_num_heads {f.kvh}")
    if f.hs is None or width == f.kvh * f.hs:
        return None
    return Fault("key", width, f"{f.kvh * f.hs}, kv_num_heads {f.kvh} * head size {f.hs}")


@rule("R04f", "run", "unpacked: value has rank 2 and the shape of key", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.packed:
        return None
    return (
        rank_fault("value", f.value, 2)
        or dim_fault("value", f.value, 0, known(f.tokens), "the tokens of query")
        or dim_fault("value", f.value, 1, dim_of(f.key, 1), "the width of key")
    )


@rule(
    "R05d", "run", "packed: the width is a multiple of num_heads + 2 * kv_num_heads", "INVALID_ARGUMENT",
    since=31, providers=KERNELS,
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    # Where the row is not packed, R03d or R04g has asked the same.
    if f.hidden is None or f.hidden % f.row_heads == 0:
        return None
    return Fault("query", f.hidden, f"a width that is a multiple of {f.row_heads}")


@rule("R05b", "run", "packed: the head size is a multiple of 8", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _eights(f) if f.packed else None


@rule("R05c", "run", "packed: value is absent", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.packed and f.value is not None:
        return Fault("value", str(f.value), "absent, as key is absent and query holds all three")
    return None


def _eights(f: Facts) -> Fault | None:
    return None if f.hs is None or f.hs % 8 == 0 else Fault("query", f"head size {f.hs}", "a multiple of 8")

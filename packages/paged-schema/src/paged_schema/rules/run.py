"""RUN: the shape checks at the start of each execution, in their order.

A rule that needs a dimension which the model leaves symbolic or unknown is undecided, and passes.
"""

from __future__ import annotations

from typing import Final

from paged_schema.facts import Facts, int32, known
from paged_schema.inputs import Dim, TensorSpec
from paged_schema.rules.registry import CUDA, KERNELS, Fault, rule

MAX_THREADS: Final = 1024
MIN_BLOCK: Final = 16
MAX_INT4_HEAD: Final = 1024


def _rank_fault(name: str, spec: TensorSpec | None, rank: int) -> Fault | None:
    if spec is None or spec.shape is None or len(spec.shape) == rank:
        return None
    return Fault(name, f"rank {len(spec.shape)}", f"rank {rank}")


def dim_of(spec: TensorSpec | None, index: int) -> int | None:
    """Return one dimension of a tensor whose rank was checked, if it is known."""
    return None if spec is None or spec.shape is None else known(spec.shape[index])


def _dim_fault(
    name: str, spec: TensorSpec | None, index: int, expected: int | None, what: str
) -> Fault | None:
    got = dim_of(spec, index)
    # No size can equal a negative one, which only an overflow expects.
    if spec is None or expected is None or got == expected or (got is None and expected >= 0):
        return None
    return Fault(name, f"dimension {index} of {'?' if got is None else got}", f"{expected}, {what}")


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
        _rank_fault("key", f.key, 2)
        or _dim_fault("key", f.key, 0, known(f.tokens), "the tokens of query")
        or _dim_fault("key", f.key, 1, width, "kv_num_heads * head_size")
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
    return _rank_fault("key", f.key, 2) or _dim_fault("key", f.key, 0, known(f.tokens), "the tokens of query")


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
        _rank_fault("value", f.value, 2)
        or _dim_fault("value", f.value, 0, known(f.tokens), "the tokens of query")
        or _dim_fault("value", f.value, 1, dim_of(f.key, 1), "the width of key")
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


@rule("R06a", "run", "v_head_size is 0 or 1 to the head size", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.v_head_size == 0 or f.hs is None or 1 <= f.v_head_size <= f.hs:
        return None
    return Fault("v_head_size", f.v_head_size, f"0, or 1 to the head size {f.hs}")


@rule("R06b", "run", "a v_head_size below the head size needs LATENT", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.latent or not _narrow(f):
        return None
    return Fault("v_head_size", f.v_head_size, f"0 or the head size {f.hs} with SEPARATE")


@rule(
    "R06c",
    "run",
    "a v_head_size below the head size needs an explicit scale",
    "INVALID_ARGUMENT",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    if f.explicit_scale or not _narrow(f):
        return None
    given = "nothing" if f.attributes.scale is None else f.attributes.scale
    return Fault("scale", given, "a scale other than 0: 1/sqrt(head_size) is wrong for an absorbed latent")


@rule("R07a", "run", "LATENT: value_cache is absent", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _absent(f, "value_cache", f.value_cache)


@rule("R07b", "run", "LATENT: kv_num_heads is 1", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return Fault("kv_num_heads", f.kvh, "1 with LATENT") if f.latent and f.kvh != 1 else None


@rule("R07c", "run", "LATENT: head_sink is absent", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _absent(f, "head_sink", f.head_sink)


@rule("R07d", "run", "LATENT: the norm weights are absent", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _absent(f, "q_norm_weight", f.q_norm_weight) or _absent(f, "k_norm_weight", f.k_norm_weight)


@rule("R07e", "run", "LATENT: nothing quantises a value cache", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.latent and f.v_quant != "NONE":
        return Fault("v_quant_type", f.v_quant, "NONE with LATENT; k_quant_type describes the one cache")
    if f.latent and f.v_cache_dtype:
        return Fault(
            "v_cache_dtype", f.v_cache_dtype, "empty with LATENT; k_cache_dtype describes the one cache"
        )
    return _absent(f, "v_scale", f.v_scale)


@rule("R07f", "run", "SEPARATE: value_cache is present", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if f.latent or f.value_cache is not None:
        return None
    return Fault("value_cache", "nothing", "the value cache")


@rule("R08a", "run", "key_cache has rank 4", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _rank_fault("key_cache", f.key_cache, 4)


@rule("R08b", "run", "the block size is a power of two of at least 16", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    size = None if known(f.bs) is None else int32(known(f.bs) or 0)
    if size is None or (size >= MIN_BLOCK and size & (size - 1) == 0):
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
        _dim_fault("key_cache", f.key_cache, 2, f.kvh, "kv_num_heads")
        or _dim_fault("key_cache", f.key_cache, 3, _stored(f), "the stored head size")
    )  # fmt: skip


@rule(
    "R08d", "run", "SEPARATE: value_cache has the shape of key_cache", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    if f.latent:
        return None
    return (
        _rank_fault("value_cache", f.value_cache, 4)
        or _dim_fault("value_cache", f.value_cache, 0, known(f.nb), "the blocks of key_cache")
        or _dim_fault("value_cache", f.value_cache, 1, known(f.bs), "the block size of key_cache")
        or _dim_fault("value_cache", f.value_cache, 2, f.kvh, "kv_num_heads")
        or _dim_fault("value_cache", f.value_cache, 3, _stored(f), "the stored head size")
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


@rule(
    "R09a",
    "run",
    "cumulative_sequence_length has rank 1 and 2 entries or more",
    "INVALID_ARGUMENT",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    name = "cumulative_sequence_length"
    fault = _rank_fault(name, f.cumulative_sequence_length, 1)
    if fault is not None:
        return fault
    length = dim_of(f.cumulative_sequence_length, 0)
    return (
        None
        if length is None or length >= 2
        else Fault(name, f"length {length}", "batch + 1 entries, at least 2")
    )


@rule(
    "R09b", "run", "past_seqlens has rank 1 and one entry a sequence", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    return _vector("past_seqlens", f.past_seqlens, known(f.batch), "the batch")


@rule("R10", "run", "block_table has rank 2 and one row a sequence", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return (
        _rank_fault("block_table", f.block_table, 2)
        or _dim_fault("block_table", f.block_table, 0, known(f.batch), "the batch")
    )  # fmt: skip


@rule("R11", "run", "slot_mapping has rank 1 and one entry a token", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _vector("slot_mapping", f.slot_mapping, known(f.tokens), "the tokens of query")


@rule("R12", "run", "head_sink has rank 1 and one entry a query head", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _vector("head_sink", f.head_sink, f.nh, "num_heads")


@rule(
    "R13",
    "run",
    "norm weights come in pairs, of rank 1 and head_size entries",
    "INVALID_ARGUMENT",
    providers=KERNELS,
)
def _(f: Facts) -> Fault | None:
    if (f.q_norm_weight is None) != (f.k_norm_weight is None):
        missing = "q_norm_weight" if f.q_norm_weight is None else "k_norm_weight"
        return Fault(missing, "nothing", "both norm weights or neither")
    return (
        _vector("q_norm_weight", f.q_norm_weight, f.hs, "the head size")
        or _vector("k_norm_weight", f.k_norm_weight, f.hs, "the head size")
    )  # fmt: skip


@rule("R14a", "run", "cos_cache and sin_cache come together", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    if (f.cos_cache is None) == (f.sin_cache is None):
        return None
    return Fault(
        "cos_cache" if f.cos_cache is None else "sin_cache", "nothing", "both rotary caches or neither"
    )


@rule(
    "R14f", "run", "cos_cache and sin_cache have one shape", "INVALID_ARGUMENT", since=31, providers=KERNELS
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    cos, sin = _shape(f.cos_cache), _shape(f.sin_cache)
    if cos is None or sin is None:
        return None
    same = len(cos) == len(sin) and all(
        known(a) is None or known(b) is None or a == b for a, b in zip(cos, sin, strict=True)
    )
    return None if same else Fault("sin_cache", str(f.sin_cache), f"the shape of cos_cache, {f.cos_cache}")


@rule("X01", "run", "the rotary caches have rank 2 or more", "CRASH", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    for name, spec in (("cos_cache", f.cos_cache), ("sin_cache", f.sin_cache)):
        if spec is not None and spec.shape is not None and len(spec.shape) < 2:
            return Fault(
                name, f"rank {len(spec.shape)}", "rank 2: (rows, rotary_dim / 2); ORT aborts on less"
            )
    return None


@rule(
    "R14b", "run", "rotary caches: the head size is a multiple of 16", "INVALID_ARGUMENT", providers=KERNELS
)
def _(f: Facts) -> Fault | None:
    if f.cos_cache is None or f.hs is None or f.hs % 16 == 0:
        return None
    return Fault(
        "cos_cache", f"head size {f.hs}", "a head size that is a multiple of 16, or no rotary caches"
    )


@rule(
    "R14d", "run", "rotary caches: the width is a multiple of 8, at most half a head", "INVALID_ARGUMENT",
    providers=KERNELS,
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    for name, spec in (("cos_cache", f.cos_cache), ("sin_cache", f.sin_cache)):
        width = dim_of(spec, 1)
        if width is None:
            continue
        if width % 8:
            return Fault(name, f"width {width}", "a multiple of 8")
        if f.hs is not None and width > f.hs // 16 * 8:
            return Fault(name, f"width {width}", f"at most {f.hs // 16 * 8}, half the head size {f.hs}")
    return None


@rule("R14e", "run", "cos_cache and sin_cache have one width", "INVALID_ARGUMENT", providers=KERNELS)
def _(f: Facts) -> Fault | None:
    return _dim_fault("sin_cache", f.sin_cache, 1, dim_of(f.cos_cache, 1), "the width of cos_cache")


@rule(
    "R15", "run", "rotary_offset is a multiple of 8, and the range lies in the head", "INVALID_ARGUMENT",
    providers=KERNELS,
)  # fmt: skip
def _(f: Facts) -> Fault | None:
    offset = f.rotary_offset
    if offset % 8:
        return Fault("rotary_offset", offset, "a multiple of 8")
    if f.hs is None or f.rd is None or offset + f.rd <= f.hs:
        return None
    return Fault("rotary_offset", f"{offset} + rotary dimension {f.rd}", f"at most the head size {f.hs}")


def _shape(spec: TensorSpec | None) -> tuple[Dim, ...] | None:
    return None if spec is None else spec.shape


def _eights(f: Facts) -> Fault | None:
    return None if f.hs is None or f.hs % 8 == 0 else Fault("query", f"head size {f.hs}", "a multiple of 8")


def _narrow(f: Facts) -> bool:
    return f.v_head_size != 0 and f.hs is not None and f.v_head_size != f.hs


def _absent(f: Facts, name: str, spec: TensorSpec | None) -> Fault | None:
    return Fault(name, str(spec), "absent with LATENT") if f.latent and spec is not None else None


def _stored(f: Facts) -> int | None:
    if f.hs is None:
        return None
    return (f.hs + 1) // 2 if f.int4 else f.hs


def _vector(name: str, spec: TensorSpec | None, length: int | None, what: str) -> Fault | None:
    return _rank_fault(name, spec, 1) or _dim_fault(name, spec, 0, length, what)

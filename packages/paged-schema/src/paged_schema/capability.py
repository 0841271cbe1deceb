"""What a backend implements, as data, and the one way to ask whether it serves a call.

A capability never judges validity: it is asked about a `Call`, which is valid by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from paged_schema.attributes import PagedAttentionAttributes
from paged_schema.call import Call
from paged_schema.errors import NotImplementedMode
from paged_schema.facts import float32, int32, known, minor_of

T_ALL: Final = frozenset({"float16", "bfloat16"})
CACHES_ALL: Final = T_ALL | {"int8", "float8e4m3fn", "uint8"}
MODES_ALL: Final = frozenset({"separate", "packed", "latent"})
FEATURES: Final[dict[str, Callable[[Call], bool]]] = {
    "softcap": lambda call: call.softcap > 0,
    "local_window": lambda call: call.local_window_size > 0,
    "narrower_v_head_size": lambda call: call.v_head_size != call.head_size,
    "rotary_offset": lambda call: call.rotary_offset != 0,
    "head_sink": lambda call: call.has_head_sink,
    "qk_norm": lambda call: call.has_qk_norm,
    "quantized_cache": lambda call: call.k_quant_type != "NONE" or call.v_quant_type != "NONE",
    "slot_mapping": lambda call: call.has_slot_mapping,
    "attention_metadata": lambda call: call.has_metadata,
    "non_causal": lambda call: not call.causal,
    "interleaved_rotary": lambda call: call.rotary and call.rotary_interleaved,
    "inactive_softcap": lambda call: _given_but_off(call.attributes.softcap) and call.softcap == 0,
    "inactive_local_window": lambda call: (
        int32(call.attributes.local_window_size) not in (-1, call.local_window_size)
    ),
    "other_letter_case": lambda call: not _in_schema_case(call.attributes),
}
"""The optional parts of the operator, and when a call uses them.

The last three change no result: they are values that most backends treat as "off", or as the same word.
"""
HARMLESS: Final = frozenset({"inactive_softcap", "inactive_local_window", "other_letter_case"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that a backend takes; None leaves one to ORT's own rules.

    Attributes:
        max_num_heads: Most query heads.
        head_size_multiple: The head size is a multiple of this.
        rotary_table_rank: Rank of the rotary tables.
    """

    max_num_heads: int | None = None
    head_size_multiple: int = 1
    rotary_table_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Capability:
    """What one backend implements.

    Attributes:
        name: Name for messages.
        modes: Calling modes.
        dtypes: Element types of query and output.
        cache_dtypes: Element types of the caches; `same` stands for the query's.
        features: Names out of `FEATURES`.
        limits: Sizes.

    >>> Capability.paged_cuda().supports("local_window"), Capability.paged_cuda().supports("head_sink")
    (True, False)
    """

    name: str
    modes: frozenset[str] = MODES_ALL
    dtypes: frozenset[str] = T_ALL
    cache_dtypes: frozenset[str] = frozenset({"same"})
    features: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)

    def supports(self, feature: str) -> bool:
        """Return whether one of `FEATURES` is implemented."""
        return feature in self.features

    def unsupported(self, call: Call) -> tuple[str, ...]:
        """Return every mode that the call uses and this backend lacks, in a fixed order."""
        found = [f"mode {call.mode}"] if call.mode not in self.modes else []
        if call.dtype not in self.dtypes | {"undefined"}:
            found.append(f"dtype {call.dtype}")
        if not self._takes_cache(call):
            found.append(f"cache dtype {call.cache_dtype}")
        found += [name for name, used in FEATURES.items() if name not in self.features and used(call)]
        return tuple(found + _over_limits(call, self.limits))

    def _takes_cache(self, call: Call) -> bool:
        if call.cache_dtype == "undefined" or call.cache_dtype in self.cache_dtypes:
            return True
        return "same" in self.cache_dtypes and call.cache_dtype == call.dtype

    @classmethod
    def webgpu_separate(cls, version: str = "1.31") -> Capability:
        """ORT's WebGPU kernel: fp16 SEPARATE; window and sink from 1.31 on.

        It goes by the attributes as written: any softcap but 0, any window but -1 before 1.31, and names in
        another letter case are as good as in use.
        """
        features = {"interleaved_rotary"}
        if minor_of(version) >= 31:
            features |= {"local_window", "inactive_local_window", "head_sink"}
        return cls(
            f"ORT {version} WebGPU",
            frozenset({"separate", "packed"}),
            frozenset({"float16"}),
            frozenset({"same"}),
            frozenset(features),
        )

    @classmethod
    def glm_dense_mla_latent(cls) -> Capability:
        """The dense-MLA subset: one latent head in fp16 or bf16; no quantisation, sink or norms."""
        features = {"local_window", "softcap", "narrower_v_head_size", "rotary_offset", "slot_mapping"}
        features |= {"attention_metadata", "interleaved_rotary"} | HARMLESS
        return cls("dense MLA, LATENT", frozenset({"latent"}), features=frozenset(features))

    @classmethod
    def ort_cuda(cls, version: str = "1.31") -> Capability:
        """ORT's CUDA kernels, all of them; `paged_schema.backends.explain` says which one serves."""
        minor = minor_of(version)
        features = set(FEATURES)
        if minor < 30:
            features -= {"non_causal"}
        caches = CACHES_ALL if minor >= 30 else CACHES_ALL - {"uint8"}
        return cls(
            f"ORT {version} CUDA", cache_dtypes=caches - T_ALL | {"same"}, features=frozenset(features)
        )

    @classmethod
    def paged_cuda(cls) -> Capability:
        """This project's CUDA op: LATENT in fp16 or bf16, unquantised, without sink or norms."""
        features = frozenset(FEATURES) - {"head_sink", "qk_norm", "quantized_cache"}
        limits = Limits(max_num_heads=1024, head_size_multiple=8, rotary_table_rank=2)
        return cls("paged-cuda", frozenset({"latent"}), features=features, limits=limits)


def require(call: Call, capability: Capability) -> None:
    """Raise unless the backend implements everything that the call uses.

    Raises:
        NotImplementedMode: With every unsupported mode in `modes`.
    """
    modes = capability.unsupported(call)
    if modes:
        expected = f"what {capability.name} implements"
        raise NotImplementedMode("select", "N03", capability.name, ", ".join(modes), expected, modes=modes)


def _given_but_off(value: float | None) -> bool:
    return value is not None and float32(value) != 0


def _in_schema_case(attributes: PagedAttentionAttributes) -> bool:
    types = (attributes.k_quant_type, attributes.v_quant_type)
    dtypes = (attributes.k_cache_dtype, attributes.v_cache_dtype)
    return all(name == name.upper() for name in types) and all(name == name.lower() for name in dtypes)


def _over_limits(call: Call, limits: Limits) -> list[str]:
    found = []
    if limits.max_num_heads is not None and call.num_heads > limits.max_num_heads:
        found.append(f"{call.num_heads} query heads above {limits.max_num_heads}")
    size = known(call.head_size)
    if size is not None and (size == 0 or size % limits.head_size_multiple):
        found.append(f"head size {size} not a multiple of {limits.head_size_multiple}")
    if limits.rotary_table_rank is not None:
        for name in ("cos_cache", "sin_cache"):
            spec = getattr(call.inputs, name)
            if spec is not None and spec.shape is not None and len(spec.shape) != limits.rotary_table_rank:
                found.append(f"{name} of rank {len(spec.shape)}")
    return found

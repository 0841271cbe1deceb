"""The caches whose memory is reported: how many bytes of which shape, and how they grow.

A shape is that of a known model. A variant is one way to hold it: the order of tokens and heads, growth in
place or by copying, graphs or none, and the smallest capacity that growth starts from.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_kv.vmm import KvCacheGeometry, KvLayout

ELEMENT_SIZE = 2  # float16


@dataclass(frozen=True)
class KvShape:
    """The key-value cache of a model.

    Attributes:
        name: The model.
        layers: Its blocks; each has a binding for keys and one for values.
        kv_heads: Key-value heads.
        head_dim: Channels of a head.
        capacity: Most tokens of a sequence, for which addresses are reserved.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    capacity: int

    def geometry(self, layout: KvLayout) -> KvCacheGeometry:
        """The bindings of one sequence in `layout`."""
        return KvCacheGeometry.uniform(
            layout,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            capacity=self.capacity,
            element_size=ELEMENT_SIZE,
        )

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ELEMENT_SIZE


SHAPES = {
    "0.5b": KvShape("qwen2.5-0.5b", layers=24, kv_heads=2, head_dim=64, capacity=512),
    "14b": KvShape("qwen2.5-14b", layers=48, kv_heads=8, head_dim=128, capacity=32_768),
}


@dataclass(frozen=True)
class Variant:
    """One way to hold a cache.

    Attributes:
        head_major: Each head's tokens lie together; otherwise each token's heads do.
        in_place: Addresses are reserved once and memory is committed behind them; otherwise a growth
            allocates, copies and frees.
        capture: Decode steps run as a captured graph.
        min_bucket: The smallest capacity, in tokens.
        fixed_stride: Head-major with the stride of the whole reservation instead of the capacity's, so that
            no stripe ever moves, and every head takes granules of its own.
    """

    head_major: bool
    in_place: bool
    capture: bool
    min_bucket: int
    fixed_stride: bool = False

    @property
    def layout(self) -> KvLayout:
        """The layout as the planner knows it; sequence-major in place has a fixed stride anyhow."""
        if self.head_major:
            return KvLayout.HEAD_MAJOR if self.fixed_stride else KvLayout.HEAD_MAJOR_BUCKET
        return KvLayout.SEQ_MAJOR if self.in_place else KvLayout.SEQ_MAJOR_BUCKET

    @property
    def label(self) -> str:
        """The variant in words, without the bucket."""
        order = "head-major" if self.head_major else "sequence-major"
        stride = ", fixed stride" if self.fixed_stride else ""
        return f"{order}, {'in place' if self.in_place else 'reallocated'}{stride}"


def variants(min_bucket: int, longest: int) -> tuple[Variant, ...]:
    """Every variant of the report: forced growth from `min_bucket`, and controls that never grow.

    Args:
        min_bucket: Where forced growth starts, in tokens.
        longest: The length of the decoded sequence; the controls start with room for it.
    """
    forced = [
        Variant(head_major, in_place, capture, min_bucket)
        for in_place in (True, False)
        for capture in (True, False)
        for head_major in (True, False)
    ]
    enough = 1 << (longest - 1).bit_length()
    controls = [Variant(head_major, True, True, enough) for head_major in (True, False)]
    return (*forced, *controls)

"""Which common prefixes could share physical granules, by layout, and how little that is.

Only whole granules can be mapped twice, so a prefix is worth sharing once one of its contiguous fragments
fills a granule. Pages, which a block table shares, need one block of tokens instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_kv.errors import InvalidGeometry
from paged_kv.geometry import INT64_MAX, as_size

from .geometry import KvCacheGeometry


@dataclass(frozen=True, slots=True)
class Shareability:
    """Fragments of one row of a cache, and the granules that a common prefix could share.

    Attributes:
        fragments: contiguous pieces that a row's tokens lie in, over all bindings.
        contiguous_bytes_per_token: what one token adds to each of them.
        granularity: bytes a granule; 0 when nothing can be shared.

    Example:
        >>> seq = Shareability(fragments=96, contiguous_bytes_per_token=2_048, granularity=2 << 20)
        >>> seq.tokens_for_first_granule, seq.is_shareable(1_000), seq.map_operations(2_048)
        (1024, False, 192)
    """

    fragments: int
    contiguous_bytes_per_token: int
    granularity: int

    def __post_init__(self) -> None:
        as_size("fragments", self.fragments, 1, INT64_MAX)
        as_size("contiguous_bytes_per_token", self.contiguous_bytes_per_token, 1, INT64_MAX)
        as_size("granularity", self.granularity, 0, INT64_MAX)

    @classmethod
    def of(cls, geometry: KvCacheGeometry, granularity: int) -> Shareability:
        """The fragments of `geometry`, whose bindings are alike.

        Raises:
            InvalidGeometry: they are not: a token lengthens some of their fragments by more than others.
        """
        first = geometry.bindings[0]
        sizes = {binding.contiguous_bytes_per_token for binding in geometry.bindings}
        if len(sizes) > 1:
            raise InvalidGeometry(
                f"a token adds from {min(sizes)} to {max(sizes)} bytes to a fragment; ask for each kind of "
                "binding by itself",
                minimum=min(sizes),
                maximum=max(sizes),
            )
        fragments = sum(binding.fragments for binding in geometry.bindings)
        return cls(fragments, first.contiguous_bytes_per_token, granularity)

    @property
    def tokens_for_first_granule(self) -> int | None:
        """The shortest prefix of which anything can be shared; None when nothing ever can."""
        return -(-self.granularity // self.contiguous_bytes_per_token) if self.granularity else None

    def fragment_bytes(self, tokens: int) -> int:
        """Bytes of a prefix of `tokens` in each fragment."""
        return as_size("tokens", tokens, 0, INT64_MAX) * self.contiguous_bytes_per_token

    def is_shareable(self, tokens: int) -> bool:
        """Whether a fragment of the prefix fills a granule."""
        return self.granularity > 0 and self.fragment_bytes(tokens) >= self.granularity

    def shared_granules(self, tokens: int) -> int:
        """Whole granules of one fragment that the prefix fills."""
        return self.fragment_bytes(tokens) // self.granularity if self.granularity else 0

    def duplicated_bytes(self, tokens: int) -> int:
        """Bytes of one fragment that every sharer keeps for itself."""
        return self.fragment_bytes(tokens) - self.shared_granules(tokens) * self.granularity

    def map_operations(self, tokens: int) -> int:
        """Mappings that one borrower needs."""
        return self.fragments * self.shared_granules(tokens)

    def physical_bytes(self, tokens: int, sharers: int, *, shared_tokens: int = 0) -> int:
        """Physical bytes of `sharers` rows of `tokens`, of which a prefix of `shared_tokens` is common."""
        as_size("sharers", sharers, 0, INT64_MAX)
        if not self.granularity:
            return sharers * self.fragments * self.fragment_bytes(tokens)
        each = -(-self.fragment_bytes(tokens) // self.granularity)
        common = min(self.shared_granules(shared_tokens), each)
        return self.fragments * (sharers * (each - common) + common) * self.granularity

    def saved_bytes(self, tokens: int, sharers: int) -> int:
        """What sharing a common prefix of `tokens` saves."""
        common = self.shared_granules(tokens) * self.granularity * self.fragments
        return max(0, as_size("sharers", sharers, 0, INT64_MAX) - 1) * common

"""What a case is: the sizes of one step, what it must move and compute, and the name it keeps for ever.

Invariant: the id follows from the definition alone, so that records of different days and machines match.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal

from paged_bench.record import Shape, Work

Group = Literal["decode", "speculative", "ragged", "mixed", "prefill", "model"]
_SHORT = {"bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class CaseSpec:
    """One step of the operator.

    Attributes:
        group: Which table it belongs to.
        context_lens: Keys of each sequence, the new ones included.
        query_lens: New tokens of each sequence.
        heads: Query heads.
        head_size: Channels of a key; the last `rotary_dim` of them are rotated.
        v_head_size: Channels of a value, the first of the same row.
        block_size: Tokens of a page.
        dtype: Of query, cache and output.
        rotary_dim: Rotated channels; 0 for none.
        weight_terms: 16-bit terms of a softmax weight, an option of the operator; None for its own choice.
        split_rows: Fixed split, an option of the operator; 0 for none.
        row_tile: Packed query rows of a block, an option of the operator; None for its own choice.
        layers: Layers of a stack, each with a cache of its own; 1 is the operator alone.
        title: For people; empty for one made of the sizes.
    """

    group: Group
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    heads: int
    head_size: int = 576
    v_head_size: int = 512
    block_size: int = 64
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    rotary_dim: int = 64
    weight_terms: int | None = None
    split_rows: int = 0
    row_tile: int | None = None
    layers: int = 1
    title: str = ""

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.context_lens)

    @property
    def tokens(self) -> int:
        """New tokens of the step."""
        return sum(self.query_lens)

    @property
    def uniform(self) -> bool:
        """Whether all sequences are of one length and bring equally many tokens."""
        return len(set(self.context_lens)) == len(set(self.query_lens)) == 1

    @property
    def parameters(self) -> dict[str, int]:
        """What the record says of a case beside its shape."""
        chosen = {"weight_terms": self.weight_terms, "row_tile": self.row_tile}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"rotary_dim": self.rotary_dim, "split_rows": self.split_rows, **given}

    @cached_property
    def id(self) -> str:
        """The stable name."""
        parts = [
            *("latent", f"{self.head_size}-{self.v_head_size}", _SHORT[self.dtype], f"h{self.heads}"),
            *(f"p{self.block_size}", self.group, f"b{self.batch}", f"c{_extent(self.context_lens)}"),
        ]
        if max(self.query_lens) > 1:
            parts.append(f"q{_extent(self.query_lens)}")
        if self.layers > 1:
            parts.append(f"l{self.layers}")
        parts += ["norope"] * (not self.rotary_dim)
        parts += [f"terms{self.weight_terms}"] * (self.weight_terms is not None)
        parts += [f"split{self.split_rows}"] * bool(self.split_rows)
        parts += [f"tile{self.row_tile}"] * (self.row_tile is not None)
        return "/".join(parts)

    @cached_property
    def label(self) -> str:
        """The name for people."""
        if self.title:
            return self.title
        text = f"{self.batch} x {_extent(self.context_lens, ',')}, {self.heads} heads"
        text += f", q {_extent(self.query_lens, ',')}" * (max(self.query_lens) > 1)
        text += f", {self.head_size}/{self.v_head_size}" * (self.head_size != 576)
        text += f", page {self.block_size}" * (self.block_size != 64)
        text += ", float16" * (self.dtype == "float16")
        text += f", weights of {self.weight_terms} terms" * (self.weight_terms is not None)
        text += f", fixed split {self.split_rows}" * bool(self.split_rows)
        text += f", row tile {self.row_tile}" * (self.row_tile is not None)
        return text + ", no rotary" * (not self.rotary_dim)

    @cached_property
    def work(self) -> Work:
        """KV bytes once and the operations of both products under the causal mask, of all layers."""
        pairs = sum(
            q * (n - q) + q * (q + 1) // 2 for n, q in zip(self.context_lens, self.query_lens, strict=True)
        )
        return Work(
            bytes=2 * self.head_size * sum(self.context_lens) * self.layers,
            operations=2 * self.heads * (self.head_size + self.v_head_size) * pairs * self.layers,
        )

    @property
    def shape(self) -> Shape:
        """The sizes as the record names them."""
        contexts, queries = self.context_lens, self.query_lens
        return Shape(
            layout="LATENT",
            dtype=self.dtype,
            cache_dtype=self.dtype,
            heads=self.heads,
            head_size=self.head_size,
            v_head_size=self.v_head_size,
            block_size=self.block_size,
            batch=self.batch,
            context=sum(contexts) / self.batch,
            context_range=None if len(set(contexts)) == 1 else (min(contexts), max(contexts)),
            query=self.tokens / self.batch,
            query_range=None if len(set(queries)) == 1 else (min(queries), max(queries)),
        )

    def pages(self) -> tuple[int, int]:
        """Return the pages that a step only reads, and those that it writes to, over all sequences."""
        old = [(n - q) // self.block_size for n, q in zip(self.context_lens, self.query_lens, strict=True)]
        return sum(old), sum(
            -(-n // self.block_size) - p for n, p in zip(self.context_lens, old, strict=True)
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return 2 * self.head_size * self.block_size


def _extent(values: tuple[int, ...], thousands: str = "") -> str:
    low, high = (f"{value:{thousands}}" for value in (min(values), max(values)))
    return low if low == high else f"{low}-{high}"


def digest(specs: Iterable[CaseSpec]) -> str:
    """Return the SHA-256 of the definitions, titles left out."""
    text = json.dumps([asdict(replace(spec, title="")) for spec in specs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

"""Names for content: a chain of SHA-256 digests, one a full block.

``root = SHA-256(canonical key)`` and ``digest[i] = SHA-256(digest[i - 1] || tokens of block i)``, tokens as
little-endian int32. The key holds everything that shapes the cache bytes, so equal digests mean equal tokens
from the first one on under the same model, dtype, layout, adapter, images and tenant, in every process and on
every machine. Python's own `hash` names nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from .errors import InvalidLength
from .geometry import INT32_MAX, check_block_size, is_integer

SCHEMA = "paged-kv/1"

HashFunction = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """The default block hash."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What must be equal for two sequences to share cached content, besides their tokens.

    Attributes:
        model: a fingerprint of weights and architecture.
        dtype: the cache's element type, quantisation included.
        layout: ``"SEPARATE"`` or ``"LATENT"``.
        layers: which layers the cache covers.
        adapter: LoRA or other adapter id.
        multimodal: content ids of images and audio, in prompt order.
        tenant: a salt that keeps tenants from seeing each other's hits.
    """

    model: str
    dtype: str
    layout: str
    layers: str = ""
    adapter: str = ""
    multimodal: tuple[str, ...] = ()
    tenant: str = ""

    def root(self, block_size: int) -> bytes:
        """The digest that every chain of this key starts from."""
        record = {"schema": SCHEMA, "block_size": block_size, **asdict(self)}
        return sha256(json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())


class PrefixChain:
    """The block digests of one token sequence, extended as it grows.

    Example:
        >>> key = CacheKey(model="demo", dtype="float16", layout="LATENT")
        >>> chain = PrefixChain(key, block_size=16)
        >>> chain.extend(range(40))
        >>> chain.num_tokens, len(chain.digests)
        (40, 2)
    """

    __slots__ = ("_hash", "_root", "_tokens", "block_size", "digests", "histories")

    def __init__(self, key: CacheKey, block_size: int, *, hash_function: HashFunction = sha256) -> None:
        check_block_size(block_size)
        self.block_size = block_size
        self.digests: list[bytes] = []
        # What the digests stand for, in SHA-256: the same list unless another hash function names the blocks.
        self.histories: list[bytes] = self.digests if hash_function is sha256 else []
        self._root = key.root(block_size)
        self._tokens = bytearray()
        self._hash = hash_function

    @property
    def is_sha256(self) -> bool:
        """Whether the chain uses the default hash."""
        return self._hash is sha256

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those of the last partial block included."""
        return len(self._tokens) // 4

    def extend(self, tokens: Sequence[int] | range | npt.NDArray[np.integer]) -> None:
        """Append token ids and hash the blocks that they fill.

        Raises:
            InvalidLength: a token id is not an integer that fits in int32; nothing is appended.
        """
        try:
            wide = np.asarray(tokens)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidLength(f"token ids must be a flat sequence of integers: {error}") from error
        if wide.size and (wide.dtype.kind not in "iu" or wide.ndim != 1):
            raise InvalidLength("token ids must be a flat sequence of integers", dtype=str(wide.dtype))
        if wide.size and (int(wide.min()) < -INT32_MAX - 1 or int(wide.max()) > INT32_MAX):
            raise InvalidLength("a token id does not fit in int32", low=int(wide.min()), high=int(wide.max()))
        added = wide.astype("<i4").tobytes()
        data = bytes(self._tokens[len(self.digests) * 4 * self.block_size :]) + added
        digests = self._hash_blocks(data, self.digests, self._hash)
        histories = [] if self.is_sha256 else self._hash_blocks(data, self.histories, sha256)
        self._tokens += added
        self.digests += digests
        self.histories += histories

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens after the first `num_tokens`.

        Raises:
            InvalidLength: not an integer, negative, or more than there are.
        """
        if not is_integer(num_tokens) or not 0 <= num_tokens <= self.num_tokens:
            raise InvalidLength(
                f"cannot keep {num_tokens!r} of {self.num_tokens} tokens",
                given=repr(num_tokens),
                maximum=self.num_tokens,
            )
        del self._tokens[4 * num_tokens :]
        del self.digests[num_tokens // self.block_size :]
        del self.histories[num_tokens // self.block_size :]

    def _hash_blocks(self, data: bytes, known: list[bytes], function: HashFunction) -> list[bytes]:
        digest, width = known[-1] if known else self._root, 4 * self.block_size
        digests = []
        for start in range(0, len(data) - width + 1, width):
            digest = function(digest + data[start : start + width])
            digests.append(digest)
        deque(map(hash, digests), maxlen=0)  # bytes keep their hash: paid here, not in the lookup
        return digests

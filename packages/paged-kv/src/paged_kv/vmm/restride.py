"""Moving the stripes of a packed head-major cache to a larger stride, in place, so that it can be taken back.

Stripe ``s`` (a row's head) lies at ``s * old`` and goes to ``s * new``; stripe 0 stays. Moved from the last
to the first, no stripe overwrites one that is still to be moved, and copied back in reverse, every byte is
where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from paged_kv.errors import ContentLost, DriverCallFailed

from .driver import DriverCalls
from .geometry import BindingGeometry


def stripe_moves(binding: BindingGeometry, old: int, new: int) -> Iterator[tuple[int, int, int]]:
    """Copies that take a binding from a stride of `old` tokens to `new`: target, source and bytes.

    No copy overlaps itself: a stripe that moves by less than its length goes in pieces, last piece first.

    Example:
        >>> from paged_kv.vmm import KvLayout
        >>> small = BindingGeometry(KvLayout.HEAD_MAJOR_BUCKET, 64, kv_heads=3, head_dim=1, element_size=1)
        >>> list(stripe_moves(small, 8, 16)), list(stripe_moves(small, 8, 12))[-2:]
        ([(32, 16, 8), (16, 8, 8)], [(16, 12, 4), (12, 8, 4)])
    """
    unit = binding.bytes_per_head
    for stripe in reversed(range(1, binding.batch * binding.kv_heads)):
        source, shift, end = stripe * old * unit, stripe * (new - old) * unit, old * unit
        while end > 0:
            piece = min(shift, end)
            end -= piece
            yield source + shift + end, source + end, piece


class CopyJournal:
    """Copies on one stream that are copied back if the block is left by an exception."""

    def __init__(self, calls: DriverCalls, stream: int) -> None:
        self._calls, self._stream = calls, stream
        self._done: list[tuple[int, int, int]] = []

    @property
    def copied_bytes(self) -> int:
        """Bytes copied so far."""
        return sum(nbytes for _, _, nbytes in self._done)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes that do not overlap.

        Raises:
            DriverCallFailed: the copy was refused.
        """
        self._calls("move", self._calls.driver.copy_on_device, target, source, nbytes, self._stream)
        self._done.append((target, source, nbytes))

    def __enter__(self) -> CopyJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        left = len(self._done)
        try:
            for target, source, nbytes in reversed(self._done):
                self._calls("undo", self._calls.driver.copy_on_device, source, target, nbytes, self._stream)
                left -= 1
        except DriverCallFailed as second:
            raise ContentLost(
                f"{left} of {len(self._done)} copies could not be taken back: the cache's tokens are not "
                "where they were; release it",
                copies=len(self._done),
                left=left,
            ) from second

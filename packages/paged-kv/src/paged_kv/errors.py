# ruff: noqa: N818 -- the names are those of the rules that they report
"""Every error of the package: a base, five branches, few leaves.

Each error also is a built-in (``ValueError`` or ``RuntimeError``), carries its numbers in ``numbers``,
names its rule (the class name) in ``rule``, and survives pickling. An error means that nothing was changed,
except for `RangeQuarantined` and `ContentLost`, which say what could not be taken back.
Outcomes that an engine meets in normal work (no room now, no room ever) are values, not errors: see
`paged_kv.outcomes`.
"""

from __future__ import annotations

Number = int | str | bool | tuple[int, ...] | None


class KvError(Exception):
    """Base of all errors of `paged_kv`.

    Attributes:
        numbers: what was given and what was required, by name.
    """

    numbers: dict[str, Number]

    def __init__(self, message: str, **numbers: Number) -> None:
        super().__init__(message)
        self.numbers = numbers

    @property
    def rule(self) -> str:
        """The name of the rule that was broken."""
        return type(self).__name__

    def __reduce__(self) -> tuple[object, tuple[type[KvError], str, dict[str, Number]]]:
        return _rebuild, (type(self), str(self), self.numbers)


def _rebuild(kind: type[KvError], message: str, numbers: dict[str, Number]) -> KvError:
    return kind(message, **numbers)


class KvConfigError(KvError, ValueError):
    """The pool cannot be built as asked."""


class InvalidGeometry(KvConfigError):
    """A size is missing, negative or inconsistent."""


class PagedInvalidBlockSize(KvConfigError):
    """The block size is not a power of two of at least 16."""


class PagedSlotOverflow(KvConfigError):
    """``num_blocks * block_size`` slots do not fit in int32."""


class PagedBlockIdOverflow(KvConfigError):
    """The block ids do not fit in int32."""


class UnsupportedSink(KvConfigError):
    """Attention sinks keep pages that a block table cannot express."""


class InvalidWindow(KvConfigError):
    """A sliding window must be zero (none) or positive."""


class InvalidTenant(KvConfigError):
    """A tenant is named by a string."""


class StorageAlreadyOwned(KvConfigError):
    """A second authority over one cache would hand every page out twice."""


class UnverifiedHash(KvConfigError):
    """A hash function that is not SHA-256 needs a manager with verify_tokens."""


class KvHandleError(KvError, ValueError):
    """A handle, step or epoch is used where it is not valid."""


class UnknownSequence(KvHandleError):
    """The handle was never given out by this manager."""


class StaleSequenceHandle(KvHandleError):
    """The sequence behind the handle was released."""


class RowBusy(KvHandleError):
    """The row belongs to an open step or an unconfirmed swap."""


class RowNotEmpty(KvHandleError):
    """The operation needs a row without tokens."""


class NoFreeRow(KvHandleError):
    """All sequence rows are taken."""


class StepOpen(KvHandleError):
    """Only one step may be open at a time."""


class StepClosed(KvHandleError):
    """The step was already committed or rolled back."""


class EpochOutOfOrder(KvHandleError):
    """Epochs complete in order, after they were committed."""


class StalePlan(KvHandleError):
    """A row of the plan changed after the plan was made."""


class HitClosed(KvHandleError):
    """The pins were already attached or dropped."""


class ForeignClaim(KvHandleError):
    """The hit, pins or swap were not given out by this manager."""


class SwapClosed(KvHandleError):
    """The swap was already confirmed or cancelled."""


class Reentrancy(KvError, RuntimeError):
    """An event callback called back into the manager."""


class WrongThread(KvError, RuntimeError):
    """The manager has one owner thread."""


class KvPositionError(KvError, ValueError):
    """A length or position is out of range."""


class InvalidLength(KvPositionError):
    """A length is negative, too large, or not an integer."""


class PositionEvicted(KvPositionError):
    """The position lies before the pages that the row still holds."""


class PagedQueryExceedsContext(KvPositionError):
    """The query is longer than the context whose last part it is."""


class AcceptedOutOfRange(KvPositionError):
    """More tokens accepted than the step wrote."""


class KvPlanRefused(KvError, ValueError):
    """An index plan that would be wrong is not made."""


class PagedNonContiguousSequence(KvPlanRefused):
    """The row gave up pages in front of its window."""


class PageNotResident(KvPlanRefused):
    """The row's pages are not on the device."""


class PagedMissingPages(KvPlanRefused):
    """The context needs more pages than the row has."""


class PagedSharedWrite(KvPlanRefused):
    """The query would write into a page that others can read."""


class PagedDuplicateRequest(KvPlanRefused):
    """A row appears twice in one batch."""


class PagedTableTooNarrow(KvPlanRefused):
    """The block table has fewer columns than the widest row."""


class PagedBufferTooSmall(KvPlanRefused):
    """The caller's buffers hold fewer rows or tokens than the batch."""


class KvOwnershipError(KvError, RuntimeError):
    """A page is given back by someone who does not hold it."""


class PageDoubleFree(KvOwnershipError):
    """The page is not live."""


class PageNotOwned(KvOwnershipError):
    """The page does not belong to the row."""


class PinUnderflow(KvOwnershipError):
    """The page has no open pin."""


class SharedPageNotSwappable(KvOwnershipError):
    """A page that others use cannot move to the host."""


class PrefixMismatch(KvOwnershipError):
    """The chain of digests does not describe the row's pages."""


class InvariantViolation(KvError, RuntimeError):
    """`KVCacheManager.check` found a state that must not exist."""


class VmmError(KvError, RuntimeError):
    """Virtual memory behind a cache cannot be had, or not now."""


class CapacityUnavailable(VmmError):
    """A grant does not cover what is to be mapped."""


class CommitOutOfRange(VmmError, ValueError):
    """More tokens or bytes than were reserved."""


class CaptureInProgress(VmmError):
    """Memory must not be mapped, unmapped or created by the thread that captures a graph."""


class WorkInFlight(VmmError):
    """Work that was launched may still touch what is to be unmapped."""


class DriverCallFailed(VmmError):
    """A driver call failed; everything that led to it was undone."""


class RangeQuarantined(VmmError):
    """Granules could not be unmapped: they stay billed and are never used again.

    After it, the granules in ``numbers`` are out of service; nothing else is different.
    """


class GrantOpen(VmmError):
    """This thread already holds a grant, and waiting for it would never end."""


class GrantSettled(VmmError, ValueError):
    """The grant was already settled or rolled back."""


class ForeignGrant(VmmError, ValueError):
    """The grant, lease or holder belongs to another governor, or another holder."""


class GrantOverrun(VmmError, ValueError):
    """More bytes settled, mapped or given back than there are."""


class LeaseReturned(VmmError, ValueError):
    """The lease was already given back."""


class GranularityMismatch(VmmError, ValueError):
    """A granule is not a power of two, or not what the driver or the arena works with."""


class ForeignHandle(VmmError, ValueError):
    """The physical handle was not created by this pool, or is given back twice."""


class ForeignPlan(VmmError, ValueError):
    """The commit plan was made for another arena, or before its state changed."""


class ArenaClosed(VmmError, ValueError):
    """The arena, pool or storage was closed."""


class LayoutRefused(VmmError, ValueError):
    """The layout cannot grow, or be shared, in this way."""


class GraphOutOfOrder(VmmError, ValueError):
    """A graph is captured before it is warm, or replayed before it is captured."""


class ContentLost(VmmError):
    """Copies of a growth could not be taken back: the tokens of the cache are not where they were."""

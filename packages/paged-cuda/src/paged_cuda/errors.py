"""Everything this package can refuse, and why.

Each error carries the rule and the numbers as fields, survives pickling, and says what was given, what is
required and what to do. Modes without a kernel are `paged_schema.NotImplementedMode`, raised before any of
these.
"""

from __future__ import annotations


class PagedCudaError(Exception):
    """Base of this package's errors.

    Attributes:
        rule: Stable name of the rule that decided, such as `shape`.
        subject: The argument, signature, file or driver call at fault.
        got: What was given.
        expected: What is required, and what to do about it, in words.
    """

    def __init__(self, rule: str, subject: str, got: object, expected: str) -> None:
        super().__init__(rule, subject, got, expected)
        self.rule = rule
        self.subject = subject
        self.got = got
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.subject}: got {self.got}; required: {self.expected} [{self.rule}]"


class NoDriver(PagedCudaError, RuntimeError):  # noqa: N818
    """There is no usable NVIDIA driver or GPU in this machine."""


class DriverError(PagedCudaError, RuntimeError):
    """A driver call failed; `subject` is the call and `got` the driver's name for the failure.

    Attributes:
        code: The driver's number for the failure, where a driver gave one.
    """

    code: int | None = None


class CompileError(PagedCudaError, RuntimeError):
    """A kernel did not compile, or its code must not ship; `got` holds the compiler's words."""


class NotPrepared(PagedCudaError, RuntimeError):  # noqa: N818
    """Something must be prepared before it can run or be captured; `subject` names it."""


class ArgumentMismatch(PagedCudaError, ValueError):  # noqa: N818
    """An array or a number does not fit the call, the bounds, or the other arrays. Nothing was launched."""


class GraphClosed(PagedCudaError, RuntimeError):  # noqa: N818
    """A captured graph was used before its capture ended or after it was closed."""


class CacheWarning(UserWarning):
    """The cubin cache on disk cannot be used; kernels are compiled again in each process."""

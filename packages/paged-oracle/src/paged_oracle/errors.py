"""What this package raises beyond the schema's own errors.

Invariant: every error here is raised before a cache is written.
"""

from __future__ import annotations


class OracleError(Exception):
    """Base of the errors of this package."""


class UndefinedInputError(OracleError, ValueError):
    """A value that ONNX Runtime does not check and that leaves its result undefined (``strict=True`` only).

    Attributes:
        rule: id of the rule, such as ``"S09"``; see `strict`.
        subject: the input that breaks it.
        got: what was found, with its position.
        expected: what the rule asks for.
    """

    def __init__(self, rule: str, subject: str, got: str, expected: str) -> None:
        super().__init__(rule, subject, got, expected)
        self.rule = rule
        self.subject = subject
        self.got = got
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.subject}: {self.got}; strict mode requires {self.expected} [{self.rule}]"


class UnusableArrayError(OracleError, ValueError):
    """An input that is no plain NumPy array, that cannot be read as heads, or a cache that is read-only.

    Attributes:
        subject: the input.
        got: what was given.
        expected: what is needed.
    """

    def __init__(self, subject: str, got: str, expected: str) -> None:
        super().__init__(subject, got, expected)
        self.subject = subject
        self.got = got
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.subject}: got {self.got}, need {self.expected}"


class UnusableOptionError(OracleError, ValueError):
    """An option of `paged_attention` that does not exist or does not fit the call.

    Attributes:
        option: the parameter.
        got: what was given.
        expected: what is possible.
    """

    def __init__(self, option: str, got: str, expected: str) -> None:
        super().__init__(option, got, expected)
        self.option = option
        self.got = got
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.option}={self.got!r}: must be {self.expected}"

"""The two ways a node can be refused: it is invalid, or nobody implements it.

Every error carries the stage and the rule that decided, so that a program can act on it without reading text.
"""

from __future__ import annotations

from typing import Final, Literal

Stage = Literal["load", "build", "run", "select"]
MAX_BITS: Final = 1024
Status = Literal["INVALID_GRAPH", "FAIL", "EXCEPTION", "INVALID_ARGUMENT", "NOT_IMPLEMENTED", "CRASH"]


class PagedSchemaError(Exception):
    """Base of this package's errors.

    Attributes:
        stage: Where ORT refuses: `load`, `build`, `run` or `select`.
        rule: Stable rule id, such as `L14`.
        subject: The attribute, input or output at fault.
        got: What was given: numbers, text and tuples of them as they are, anything else as text.
        expected: What is required, in words.
        status: ORT's status class; `CRASH` where ORT dies instead of answering.
    """

    def __init__(
        self,
        stage: Stage,
        rule: str,
        subject: str,
        got: object,
        expected: str,
        status: Status = "INVALID_ARGUMENT",
    ) -> None:
        got = _kept(got)
        super().__init__(stage, rule, subject, got, expected, status)
        self.stage = stage
        self.rule = rule
        self.subject = subject
        self.got = got
        self.expected = expected
        self.status = status

    def __str__(self) -> str:
        return f"{self.rule} ({self.stage}) {self.subject}: got {_shown(self.got)}; required: {self.expected}"

    def __eq__(self, other: object) -> bool:
        # As text, for a NaN that was given is the same NaN in a copy.
        return isinstance(other, type(self)) and repr(self.args) == repr(other.args)

    def __hash__(self) -> int:
        return hash((type(self), self.rule, self.subject, self.expected))


class InvalidArgument(PagedSchemaError, ValueError):  # noqa: N818 - ONNX Runtime's own name
    """The node, or what is bound to it, breaks a rule of the contract."""


class NotImplementedMode(PagedSchemaError, NotImplementedError):  # noqa: N818 - as above
    """The node is valid, but the provider or backend has no kernel for it.

    Attributes:
        modes: Every mode in use that is not implemented.
    """

    def __init__(
        self,
        stage: Stage,
        rule: str,
        subject: str,
        got: object,
        expected: str,
        status: Status = "NOT_IMPLEMENTED",
        modes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(stage, rule, subject, got, expected, status)
        self.args = (*self.args, modes)
        self.modes = modes


class UnreadableModel(PagedSchemaError, ValueError):  # noqa: N818 - as above
    """The file is no ONNX model, or its structure is too large to audit."""


def _kept(value: object) -> object:
    # An error is pickled, copied, compared and printed, whatever was given.
    if isinstance(value, tuple | list):
        return type(value)(map(_kept, value)) if type(value) in (tuple, list) else _shown(value)
    if type(value) is int:
        return value if value.bit_length() <= MAX_BITS else "an int too large to print"
    return value if value is None or type(value) in (str, bool, float) else _shown(value)


def _shown(value: object, limit: int = 200) -> str:
    # Python refuses to print an integer of more than 4,300 digits, and an error must never fail itself.
    try:
        text = value if isinstance(value, str) and value else repr(value)
    except ValueError:
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

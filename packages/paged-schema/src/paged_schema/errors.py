"""The two ways a node can be refused: it is invalid, or nobody implements it.

Every error carries the stage and the rule that decided, so that a program can act on it without reading text.
"""

from __future__ import annotations

from typing import Literal

Stage = Literal["load", "build", "run", "select"]
Status = Literal["INVALID_GRAPH", "FAIL", "EXCEPTION", "INVALID_ARGUMENT", "NOT_IMPLEMENTED", "CRASH"]


class PagedSchemaError(Exception):
    """Base of this package's errors.

    Attributes:
        stage: Where ORT refuses: `load`, `build`, `run` or `select`.
        rule: Stable rule id, such as `L14`.
        subject: The attribute, input or output at fault.
        got: What was given.
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
        return isinstance(other, type(self)) and self.args == other.args

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
        self.args = (stage, rule, subject, got, expected, status, modes)
        self.modes = modes


class UnreadableModel(PagedSchemaError, ValueError):  # noqa: N818 - as above
    """The file is no ONNX model, or its structure is too large to audit."""


def _shown(value: object, limit: int = 200) -> str:
    # Python refuses to print an integer of more than 4,300 digits, and an error must never fail itself.
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

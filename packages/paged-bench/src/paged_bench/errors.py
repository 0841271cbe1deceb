"""What can go wrong before or during a run, as types whose message is one line of advice.

Every error here is a user's error or a property of the machine: the command line prints its message
on one line and exits with status 2. Nothing in this module is raised for a bug.
"""

from __future__ import annotations


class BenchError(Exception):
    """Base of all errors of this package.

    Attributes:
        subject: The thing at fault: a tensor, a key, a file, a prompt or an option.
        problem: What was found and what is required.
        advice: What to do about it; may be empty.
    """

    def __init__(self, subject: str, problem: str, advice: str = "") -> None:
        super().__init__(subject, problem, advice)
        self.subject = subject
        self.problem = problem
        self.advice = advice

    def __str__(self) -> str:
        text = f"{self.subject}: {self.problem}"
        return f"{text}; {self.advice}" if self.advice else text


class ModelFileError(BenchError, ValueError):
    """A model file that is absent, broken, or of a kind that this demo does not read."""


class PromptError(BenchError, ValueError):
    """A prompt that is empty, unreadable, or longer than the pool or the model can hold."""


class OptionError(BenchError, ValueError):
    """Options that do not go together."""


class BackendError(BenchError, RuntimeError):
    """The asked-for backend cannot run on this machine."""


class RecordError(BenchError, ValueError):
    """A record of measurements that is of another version, truncated, edited by hand, or not one."""


class ComparisonError(BenchError, ValueError):
    """Two records that say nothing about each other: other machines, other kinds, or no case in common."""


class MeasurementError(BenchError, RuntimeError):
    """A GPU on which nothing can be measured now, or a measurement whose own result is wrong."""


__all__ = [
    "BackendError",
    "BenchError",
    "ComparisonError",
    "MeasurementError",
    "ModelFileError",
    "OptionError",
    "PromptError",
    "RecordError",
]

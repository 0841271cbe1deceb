"""The rule type and the ordered registry that `check`, the docs, the tests and the mutation proof walk.

The order of registration is the order in which ORT meets the rules; the first that fails decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from paged_schema.errors import Stage, Status
from paged_schema.facts import Facts

FIRST_MINOR: Final = 29
LAST_MINOR: Final = 32
STAGES: Final[tuple[Stage, ...]] = ("load", "build", "run", "select")
ALL: Final = frozenset({"cuda", "webgpu", "cpu", "paged-cuda"})
KERNELS: Final = frozenset({"cuda", "webgpu", "paged-cuda"})
CUDA: Final = frozenset({"cuda", "paged-cuda"})


class Fault(NamedTuple):
    """Why a rule does not hold. `rule` is empty when the step has only one rule."""

    subject: str
    got: object
    expected: str
    rule: str = ""


Test = Callable[[Facts], Fault | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition of the contract.

    Attributes:
        id: Stable id, such as `L14`.
        stage: `load`, `build`, `run` or `select`.
        statement: What must hold, in one line.
        status: What ORT answers with when it does not.
        since: First ORT minor version that has the rule.
        until: Last ORT minor version that has it.
        providers: Execution providers that have it.
    """

    id: str
    stage: Stage
    statement: str
    status: Status
    since: int = FIRST_MINOR
    until: int = LAST_MINOR
    providers: frozenset[str] = ALL

    @property
    def anchor(self) -> str:
        """Fragment of this rule in the rules page."""
        return f"rule-{self.id.lower()}"

    @property
    def versions(self) -> str:
        """The ORT versions that have the rule, in words."""
        if self.since == self.until:
            return f"1.{self.since}"
        return f"1.{self.since} to 1.{self.until}"


@dataclass(frozen=True, slots=True)
class Step:
    """One test and the rules that it decides; several where ORT interleaves them over a list of inputs."""

    rules: tuple[Rule, ...]
    test: Test


_steps: list[Step] = []


def rule(
    id: str,  # noqa: A002 - the name that the registry, the docs and the errors use
    stage: Stage,
    statement: str,
    status: Status,
    *,
    since: int = FIRST_MINOR,
    until: int = LAST_MINOR,
    providers: frozenset[str] = ALL,
) -> Callable[[Test], Test]:
    """Register the decorated test under one rule."""
    return group(Rule(id, stage, statement, status, since, until, providers))


def group(*rules: Rule) -> Callable[[Test], Test]:
    """Register the decorated test under several rules that share version range and providers."""

    def register(test: Test) -> Test:
        _steps.append(Step(rules, test))
        return test

    return register


def steps() -> tuple[Step, ...]:
    """Return every step in order."""
    return tuple(_steps)


def all_rules() -> tuple[Rule, ...]:
    """Return every rule in order."""
    return tuple(rule for step in _steps for rule in step.rules)


@lru_cache(maxsize=64)
def steps_for(minor: int, provider: str, stages: tuple[Stage, ...] = STAGES) -> tuple[Step, ...]:
    """Return the steps that one version and provider has in some stages, in order."""
    return tuple(
        step
        for step in _steps
        if step.rules[0].since <= minor <= step.rules[0].until
        and provider in step.rules[0].providers
        and step.rules[0].stage in stages
    )

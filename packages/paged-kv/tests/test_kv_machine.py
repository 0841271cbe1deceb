"""Every public operation, in any order, against the plain model and the cache that tells on aliasing."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from paged_kv.testing import KvDriver


class DrawnChoices:
    """Choices that hypothesis makes, and can shrink."""

    def __init__(self) -> None:
        self.data: st.DataObject

    def one(self, items):
        return self.data.draw(st.sampled_from(list(items)))

    def between(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))


class SeededChoices:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, items):
        return self.random.choice(list(items))

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


class KvMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        blocks=st.integers(2, 14),
        null_page=st.booleans(),
        watermark=st.integers(0, 1),
        host_blocks=st.sampled_from([8, 3, 0]),
        missing=st.sampled_from([None, None, 0, 3]),
    )
    def build(
        self, data, blocks: int, null_page: bool, watermark: int, host_blocks: int, missing: int | None
    ) -> None:
        self.choices = DrawnChoices()
        self.driver = KvDriver(
            self.choices,
            blocks=blocks,
            null_page=null_page,
            watermark=watermark,
            host_blocks=host_blocks,
            initial=None if missing is None else max(0, blocks - missing),
        )

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        self.choices.data = data
        self.driver.act()
        self.driver.assert_agreement()


KvMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestKvMachine = KvMachine.TestCase


@pytest.mark.parametrize("seed", range(40))
def test_long_walks_agree_with_the_model(seed: int) -> None:
    choices = SeededChoices(seed)
    blocks = choices.between(2, 14)
    driver = KvDriver(
        choices,
        blocks=blocks,
        initial=choices.between(0, blocks) if seed % 3 == 0 else None,
        null_page=bool(seed % 2),
        watermark=seed % 3 % 2,
        host_blocks=choices.one((0, 3, 8)),
        verify_tokens=seed % 5 == 0,
    )
    for _ in range(200):
        driver.act()
        driver.assert_agreement()

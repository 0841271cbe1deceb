"""The README's examples give what it says they give."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from paged_schema.cli import main
from paged_schema.rules import all_rules

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_is_a_doctest() -> None:
    result = doctest.testfile(str(README), module_relative=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.failed == 0
    assert result.attempted > 8


def test_every_rule_has_an_anchor_in_the_rules_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert all(f"({rule.anchor})=" in page for rule in all_rules())
    assert page.index("## load") < page.index("## build") < page.index("## run") < page.index("## select")

"""The example workflow runs commands that exist, with options that they have."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from paged_bench.cli import _parser

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = (ROOT / "examples" / "ci" / "gpu.yml").read_text(encoding="utf-8")


def commands(program: str) -> list[list[str]]:
    """Return the words after the program in every line that starts it, continued lines joined."""
    lines = re.sub(r"\\\n\s*", " ", WORKFLOW).splitlines()
    found = [shlex.split(line.partition(f"/{program} ")[2]) for line in lines if f"/{program} " in line]
    assert found
    return found


@pytest.mark.parametrize("words", commands("paged-bench"), ids=" ".join)
def test_every_command_is_understood(words: list[str]) -> None:
    assert callable(_parser().parse_args(words).run)


def test_every_session_exists() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {words[words.index("-s") + 1] for words in commands("nox")} <= known


def test_the_op_is_right_before_it_is_timed_and_no_text_of_a_pull_request_becomes_a_command() -> None:
    assert WORKFLOW.index("gpu_parity") < WORKFLOW.index("paged-bench ab")
    assert "PAGED_REQUIRE_GPU" in WORKFLOW
    scripts = re.findall(r"run: (?:\|\n((?:          .*\n|\n)+)|(.*)\n)", WORKFLOW)
    assert len(scripts) == 4
    assert not [script for script in scripts if "${{" in "".join(script)]

"""What the pages say is so: the commands exist, and the examples run and print what is written below them."""

import ast
import doctest
import itertools
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / "README.md", *sorted((ROOT / "packages").glob("*/README.md"))]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# No machine that runs these tests can run this page's scripts; they are still compiled.
NEEDS_GPU = {ROOT / "packages" / "paged-cuda" / "README.md"}

FENCE = re.compile(r"^(?P<mark>```+)(?P<language>[\w-]*)\n(?P<body>.*?)^(?P=mark)$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A Python script and what it must print (None: whatever)."""

    where: str
    body: str
    output: str | None


def scripts(path: Path) -> list[Example]:
    """Return the page's scripts, each with the text block that follows it at once."""
    text = path.read_text(encoding="utf-8")
    fences = [*FENCE.finditer(text), None]
    found = []
    for fence, after in itertools.pairwise(fences):
        if fence and fence["language"] == "python" and ">>> " not in fence["body"]:
            shown = after["body"] if after and after["language"] == "text" else None
            line = text.count("\n", 0, fence.start()) + 1
            found.append(Example(f"{path.relative_to(ROOT)}:{line}", fence["body"], shown))
    return found


def interactive(path: Path) -> str:
    """Return the page's interactive examples as one session: a later one may use an earlier one's names."""
    fences = FENCE.finditer(path.read_text(encoding="utf-8"))
    return "\n".join(fence["body"] for fence in fences if ">>> " in fence["body"])


SCRIPTS = [(path, script) for path in READMES for script in scripts(path)]
SESSIONS = [path for path in READMES if interactive(path)]


def sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any("nox.session" in ast.unparse(d) for d in f.decorator_list)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_a_session(path: Path) -> None:
    named = re.findall(r"\bnox\b[^\n`|]*? -s (\w+)", path.read_text(encoding="utf-8"))
    assert set(named) <= sessions()


def test_every_session_is_documented() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {name for name in sessions() if f"| `nox -s {name}` |" not in text} == set()


def test_the_readme_needs_exactly_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [fence["body"].splitlines() for fence in FENCE.finditer(text) if fence["language"] == "console"]
    assert shown[0] == ["$ pip install nox uv && nox -s demo", "$ nox -s tests"]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_readme_has_an_example(path: Path) -> None:
    assert scripts(path) or interactive(path) or "```console" in path.read_text(encoding="utf-8")


def assert_session(text: str, where: str) -> None:
    """Run a session's examples, at least one, and compare what each prints."""
    test = doctest.DocTestParser().get_doctest(text, {}, where, where, 0)
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert result.failed == 0, "".join(report)
    assert result.attempted > 0, f"{where} has no example"


def assert_script(example: Example, folder: Path) -> None:
    """Run an example in an interpreter of its own and compare what it prints."""
    command = [sys.executable, "-W", "error", "-c", example.body]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    if example.output is not None:
        assert result.stdout == example.output


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_interactive_examples_print_what_they_say(path: Path) -> None:
    assert_session(interactive(path), str(path.relative_to(ROOT)))


@pytest.mark.parametrize(("path", "script"), SCRIPTS, ids=[script.where for _, script in SCRIPTS])
def test_scripts_run_and_print_what_they_say(path: Path, script: Example, tmp_path: Path) -> None:
    assert compile(script.body, script.where, "exec")
    if path not in NEEDS_GPU:
        assert_script(script, tmp_path)


def test_a_wrong_output_is_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        assert_script(Example("here", "print(1)", "2\n"), tmp_path)
    with pytest.raises(AssertionError):
        assert_session(">>> 1 + 1\n3\n", "here")
    with pytest.raises(AssertionError, match="no example"):
        assert_session("", "here")

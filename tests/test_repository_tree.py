"""What may stand in a tracked file, and what every package must carry."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = sorted((ROOT / "packages").iterdir())

# A path that exists on one machine only. The look-behind lets a folder of the same name and URLs pass.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|work|Users|tmp|farm)/|[A-Za-z]:\\+Users\\", re.ASCII)
# Built from parts, because this file is tracked too.
INDEX_HOST = re.compile("|".join(("py" + r"pi\.org", "python" + "hosted", "npm" + "js", "deb" + r"\.debian")))
INDEX_SETTING = re.compile(r"index-url|default-index|find-links|^\s*\[\[tool\.uv\.index", re.MULTILINE)


def tracked() -> list[Path]:
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name]


def text_of(path: Path) -> str:
    """Return a tracked file's text; binary files and files deleted in the work tree have none."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return ""


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {line.strip()[:120]}"
        for path in tracked()
        for line in text_of(path).splitlines()
        if pattern.search(line)
    ]


def test_no_lock_file_is_tracked() -> None:
    assert [path.name for path in tracked() if path.name in ("uv.lock", "pylock.toml")] == []


def test_no_tracked_file_holds_a_machine_path() -> None:
    assert lines_matching(MACHINE_PATH) == []


def test_no_tracked_file_names_a_package_index() -> None:
    assert lines_matching(INDEX_HOST) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("**/pyproject.toml")), ids=lambda path: path.parent.name)
def test_no_project_sets_an_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "index" not in tomllib.loads(text).get("tool", {}).get("uv", {})
    assert INDEX_SETTING.search(text) is None


def test_constraints_are_pins_without_urls() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 50
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.!+]+( ; .+)?", line)] == []
    assert [line for line in lines if "://" in line or "--hash" in line] == []


@pytest.mark.parametrize(
    "line",
    ["see /" + "home/me/x", '"/' + 'root/.cache"', "C:" + r"\Users\me", "cd /" + "work/main", "/" + "tmp/x"],
)
def test_the_path_pattern_catches_paths(line: str) -> None:
    assert MACHINE_PATH.search(line)


@pytest.mark.parametrize(
    "line", ["packages/" + "root/x", "https://example.com/" + "home/x", "and/or", "a/" + "work/b"]
)
def test_the_path_pattern_lets_others_pass(line: str) -> None:
    assert not MACHINE_PATH.search(line)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_every_package_carries_its_licence_and_its_types(member: Path) -> None:
    assert (member / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (member / "src" / member.name.replace("-", "_") / "py.typed").is_file()
    assert (member / "README.md").stat().st_size > 0

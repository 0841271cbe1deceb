"""The members are one release train: the tools that check and move it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(tool: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(tool), *arguments], capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree with the tools, the members' project files and their first modules, free to be edited."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    packages = ROOT / "packages"
    for file in [*packages.glob("*/pyproject.toml"), *packages.glob("*/src/*/__init__.py")]:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return tmp_path


def edit(copy: Path, member: str, old: str, new: str) -> None:
    file = copy / "packages" / member / "pyproject.toml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_the_tree_is_in_step() -> None:
    result = run(ROOT / "tools" / "check_versions.py")
    assert (result.returncode, result.stdout) == (0, "all versions are in step\n")


@pytest.mark.parametrize(
    ("member", "old", "new"),
    [
        ("paged-kv", '\nversion = "', '\nversion = "9.'),
        ("paged-bench", "paged-kv==", "paged-kv~="),
        ("paged-cuda", '"paged-schema==', '"paged-schema==9.'),
        ("paged-oracle", '"paged-schema==', '"paged-schema[onnx]>='),
    ],
)
def test_a_member_out_of_step_is_named(copy: Path, member: str, old: str, new: str) -> None:
    edit(copy, member, old, new)
    result = run(copy / "tools" / "check_versions.py", str(copy))
    assert result.returncode == 1
    assert member in result.stdout


def test_a_stale_version_in_a_source_is_named(copy: Path) -> None:
    first = "src/paged_kv/__init__.py"
    (copy / "packages/paged-kv" / first).write_text('__version__ = "0.0.9"\n', encoding="utf-8")
    result = run(copy / "tools" / "check_versions.py", str(copy))
    assert (result.returncode, "paged-kv: __version__ is '0.0.9'" in result.stdout) == (1, True)


def test_a_bump_moves_all_of_them(copy: Path) -> None:
    assert run(copy / "tools" / "bump.py", "7.8.9").returncode == 0
    assert run(copy / "tools" / "check_versions.py", str(copy)).returncode == 0
    texts = [file.read_text(encoding="utf-8") for file in copy.glob("packages/*/pyproject.toml")]
    assert all('\nversion = "7.8.9"\n' in text for text in texts)
    assert any('"paged-schema==7.8.9"' in text for text in texts)


def test_a_malformed_version_changes_nothing(copy: Path) -> None:
    before = {file: file.read_bytes() for file in copy.glob("packages/*/pyproject.toml")}
    assert run(copy / "tools" / "bump.py", "next").returncode == 2
    assert {file: file.read_bytes() for file in before} == before

"""What a user installs: a wheel holds every module, its kernels, its type marker and its licence."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = sorted(path.name for path in (ROOT / "packages").iterdir())


def build(member: str, folder: Path) -> Path:
    """Build one wheel in this interpreter, without an isolated environment, so without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT / "packages" / member, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.mark.parametrize("member", MEMBERS)
def test_the_wheel_is_complete(member: str, tmp_path: Path) -> None:
    build(member, tmp_path)
    command = [sys.executable, str(ROOT / "tools" / "check_wheels.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("complete\n")


def test_a_wheel_without_its_kernels_is_caught(tmp_path: Path) -> None:
    whole = build("paged-cuda", tmp_path)
    with zipfile.ZipFile(whole) as archive:
        kept = {
            name: archive.read(name) for name in archive.namelist() if not name.endswith((".cu", ".typed"))
        }
    with zipfile.ZipFile(whole, "w") as archive:
        for name, data in kept.items():
            archive.writestr(name, data)
    command = [sys.executable, str(ROOT / "tools" / "check_wheels.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "py.typed" in result.stdout

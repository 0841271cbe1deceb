"""Check what `nox -s build` made: every wheel is typed, licensed, and carries its kernel sources.

Usage: `python tools/check_wheels.py DIST`.
"""

import re
import sys
import zipfile
from pathlib import Path

CACHE = re.compile(r"(^|/)(__pycache__|\.[^/]*)/")
ROOT = Path(__file__).resolve().parent.parent


def missing_from(wheel: Path) -> list[str]:
    """Return what the wheel lacks of its source tree, and its licence if that is not inside."""
    member = wheel.name.split("-")[0].replace("_", "-")
    source = ROOT / "packages" / member / "src"
    files = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    wanted = {path.as_posix() for path in files if not CACHE.search(path.as_posix())}
    with zipfile.ZipFile(wheel) as archive:
        present = set(archive.namelist())
    lacking = sorted(wanted - present)
    if not any(name.endswith("/licenses/LICENSE") for name in present):
        lacking.append("LICENSE")
    return lacking


def main(arguments: list[str]) -> int:
    """Print what is missing from each wheel of the folder; 0 when nothing is."""
    if len(arguments) != 1:
        print("usage: python tools/check_wheels.py DIST", file=sys.stderr)
        return 2
    wheels = sorted(Path(arguments[0]).glob("paged_*.whl"))
    if not wheels:
        print(f"no wheel of this project in {arguments[0]}; run nox -s build", file=sys.stderr)
        return 2
    found = {wheel.name: missing_from(wheel) for wheel in wheels}
    for name, lacking in found.items():
        print(f"{name}: {'complete' if not lacking else 'lacks ' + ', '.join(lacking)}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write constraints.txt: the exact versions that the sessions install, without hashes and without any URL.

Invariant: the file holds name==version lines with environment markers, nothing else, so that it says
the same whichever index a machine uses. Usage, with uv on the PATH: `python tools/export_constraints.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# The versions that nox installs. Made by tools/export_constraints.py; do not edit by hand.\n"
# Only what the sessions use: an extra that needs torch, say, would move the versions of the rest.
GROUPS = ("test", "lint", "types", "docs")
EXTRAS = ("onnx",)
FORMAT = ["--quiet", "--universal", "--python-version", "3.11", "--upgrade", "--no-header", "--no-annotate"]
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+]+( ; .+)?")


def command() -> list[str]:
    """Return the resolver's command: all members, our groups and extras, without the members themselves."""
    projects = sorted((ROOT / "packages").glob("*/pyproject.toml"))
    words = ["uv", "pip", "compile", *FORMAT, *map(str, projects)]
    for option, values in (
        ("--group", GROUPS),
        ("--extra", EXTRAS),
        ("--no-emit-package", [project.parent.name for project in projects]),
    ):
        words += [word for value in values for word in (option, value)]
    return words


def main() -> int:
    """Resolve, check each line and only then replace the file."""
    result = subprocess.run(command(), cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        print(f"uv found no solution:\n{result.stderr}", file=sys.stderr)
        return 2
    lines = result.stdout.splitlines()
    odd = [line for line in lines if not PINNED.fullmatch(line)]
    if odd or not lines:
        print(f"not a pinned version, so nothing was written: {odd[:3]}", file=sys.stderr)
        return 2
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"constraints.txt: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())

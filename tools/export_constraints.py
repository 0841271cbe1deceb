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
SCOPE = ["--all-packages", "--all-groups", "--all-extras", "--upgrade"]
FORMAT = ["--no-hashes", "--no-header", "--no-annotate", "--no-emit-workspace"]
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+]+( ; .+)?")


def main() -> int:
    """Resolve, check each line and only then replace the file."""
    result = subprocess.run(
        ["uv", "export", "--quiet", *SCOPE, *FORMAT], cwd=ROOT, capture_output=True, text=True
    )
    if result.returncode != 0:
        print(f"uv export failed:\n{result.stderr}", file=sys.stderr)
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

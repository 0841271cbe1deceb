"""Set the version of all members, and of their requirements on each other: `python tools/bump.py 0.2.0`.

Invariant: nothing is written unless the new version is well formed and every file could be read.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def bumped(text: str, members: list[str], version: str) -> str:
    """Return a pyproject.toml's text with the new version in the three places that hold one."""
    text = re.sub(r'^version = "[^"]*"$', f'version = "{version}"', text, flags=re.MULTILINE)
    names = "|".join(re.escape(member) for member in members)
    return re.sub(rf'"({names})(\[[^]]*\])?==[^"]*"', rf'"\1\2=={version}"', text)


def main(arguments: list[str]) -> int:
    """Rewrite each member's pyproject.toml."""
    if len(arguments) != 1 or not VERSION.fullmatch(arguments[0]):
        print(f"expected one version such as 0.2.0 or 0.2.0rc1, got {arguments}", file=sys.stderr)
        return 2
    files = sorted((ROOT / "packages").glob("*/pyproject.toml"))
    members = [file.parent.name for file in files]
    texts = {file: bumped(file.read_text(encoding="utf-8"), members, arguments[0]) for file in files}
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    print(f"{len(texts)} members at {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

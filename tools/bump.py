"""Set the version of all members, and of their requirements on each other: `python tools/bump.py 0.2.0`.

Invariant: nothing is written unless the new version is well formed and every file could be read.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def bumped(text: str, members: list[str], version: str) -> str:
    """Return the text with the new version wherever a project file or a package's source holds one."""
    text = re.sub(r'^(__version__|version) = "[^"]*"$', rf'\1 = "{version}"', text, flags=re.MULTILINE)
    names = "|".join(re.escape(member) for member in members)
    return re.sub(rf'"({names})(\[[^]]*\])?==[^"]*"', rf'"\1\2=={version}"', text)


def main(arguments: list[str]) -> int:
    """Rewrite each member's pyproject.toml."""
    if len(arguments) != 1 or not VERSION.fullmatch(arguments[0]):
        print(f"expected one version such as 0.2.0 or 0.2.0rc1, got {arguments}", file=sys.stderr)
        return 2
    projects = sorted((ROOT / "packages").glob("*/pyproject.toml"))
    members = [project.parent.name for project in projects]
    files = projects + sorted((ROOT / "packages").glob("*/src/*/__init__.py"))
    texts = {file: bumped(file.read_text(encoding="utf-8"), members, arguments[0]) for file in files}
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    print(f"{len(members)} members at {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

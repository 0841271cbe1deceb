"""Kernel sources as one self-contained text each.

A kernel includes only files of our own tree, written `#include "layout/params.cuh"` from the root of
`kernels/`. They are put in place here, each once, so that no header of a toolkit can take part in a
compilation.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from paged_cuda.errors import CompileError

ROOT = Path(__file__).parent / "kernels"
_INCLUDE = re.compile(r"^\s*#\s*include\b(.*)$")
_OWN = re.compile(r'^\s*"([\w./]+)"\s*(?://.*)?$')


@cache
def kernel_source(name: str, root: Path = ROOT) -> str:
    """Return `kernels/<name>` with every include in place and `#line` marks that keep error positions.

    Raises:
        CompileError: An include names a file outside our tree, or one that does not exist.
    """
    return "\n".join(_expand(name, root, set())) + "\n"


def _expand(name: str, root: Path, seen: set[str]) -> list[str]:
    if name in seen:
        return []
    seen.add(name)
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        raise CompileError("include", name, "no such file of our own", "a path under kernels/")
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
            continue
        own = _OWN.match(include[1])
        if own is None:
            raise CompileError(
                "include", f"{name}:{number}", line.strip(), 'only #include "..." of our own files'
            )
        lines += _expand(own[1], root, seen)
        lines.append(f'#line {number + 1} "{name}"')
    return lines


def sources_digest(root: Path = ROOT) -> str:
    """Return one SHA-256 over the names and bytes of all kernel sources, independent of where they lie."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.cu*"), key=lambda path: path.relative_to(root).as_posix()):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(
            path.relative_to(root).as_posix().encode() + b"\0" + str(len(text)).encode() + b"\0" + text
        )
    return digest.hexdigest()

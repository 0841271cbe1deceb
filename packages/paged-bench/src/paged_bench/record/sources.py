"""Which sources a record was measured with, and whether they are still the present ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from paged_cuda.sources import ROOT, kernel_source, sources_digest

from paged_bench.record.schema import Kernels, Record


def present_kernels(names: Iterable[str] | None = None) -> Kernels:
    """Return the digests of the kernel sources as they are now.

    Args:
        names: Kernel files to give digests of their own, includes in place; None takes every `.cu` file.
    """
    chosen = sorted(path.name for path in ROOT.glob("*.cu")) if names is None else sorted(set(names))
    return Kernels(digest=sources_digest(), files={name: _digest(kernel_source(name)) for name in chosen})


def stale_kernels(record: Record) -> tuple[str, ...]:
    """Return the kernel files that are not those the record was measured with; empty when all are.

    Only kernels that ran count, where the cases say which. A record without digests of single files is held
    against the one digest over all.
    """
    if record.kernels is None or record.kernels.digest == sources_digest():
        return ()
    if not record.kernels.files:
        return ("the kernel sources",)
    ran = {variant.kernel for case in record.cases for variant in case.variants} & record.kernels.files.keys()
    names = [name for name in record.kernels.files if not ran or name in ran]
    return tuple(name for name in names if _now(name) != record.kernels.files[name])


def package_digest(package: str) -> str:
    """Return one SHA-256 over the names and bytes of an importable package's Python files."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {package}", name=package)
    return tree_digest(Path(spec.submodule_search_locations[0]))


def tree_digest(root: Path) -> str:
    """Return one SHA-256 over the names and bytes of the Python files under `root`."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _now(name: str) -> str | None:
    return _digest(kernel_source(name)) if (ROOT / name).is_file() else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

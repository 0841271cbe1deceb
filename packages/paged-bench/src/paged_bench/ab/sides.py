"""The two source trees, and one turn of a suite over either.

Invariant: the benchmarks and `paged_bench` are those of the head on both sides, so that only the packages
under test differ; and what a turn imported is checked against the tree it was meant to import.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paged_bench.errors import BenchError
from paged_bench.record import Record, Revision, load, revision, tree_digest

UNDER_TEST = ("paged-schema", "paged-oracle", "paged-kv", "paged-cuda")


@dataclass(frozen=True)
class Side:
    """One of the two: its name, its tree and its commit."""

    name: str
    tree: Path
    revision: Revision | None

    def environment(self, head: Path) -> dict[str, str]:
        """Return the process environment in which the packages under test come from this tree."""
        sources = [self.tree / "packages" / name / "src" for name in UNDER_TEST]
        sources.append(head / "packages" / "paged-bench" / "src")
        inherited = [path for path in (os.environ.get("PYTHONPATH"),) if path]
        return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, sources), *inherited])}

    def check(self, record: Record, head: Path) -> None:
        """Make sure that a turn measured this tree, with the `paged_bench` of `head`, and no other.

        Raises:
            BenchError: It imported something else, or does not say what.
        """
        if not record.code:
            raise BenchError(f"the suite over the {self.name}", "does not say which code ran", "update it")
        for package, digest in record.code.items():
            folder = package.replace("_", "-")
            tree, whose = (self.tree, self.name) if folder in UNDER_TEST else (head, "head")
            if tree_digest(tree / "packages" / folder / "src" / package) != digest:
                problem = f"was not imported from the tree of the {whose}, or it changed meanwhile"
                raise BenchError(package, problem, "leave the tree alone, and uninstall other copies")


@contextmanager
def sides(root: Path, base: str) -> Iterator[tuple[Side, Side]]:
    """Check the base out beside the head, and take it away again.

    Raises:
        BenchError: `root` is no checkout of this project, or `base` names no commit.
    """
    if not (root / "packages" / "paged-bench").is_dir():
        raise BenchError(str(root), "is no source tree of these packages", "give it by --root")
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}")
    if commit is None:
        raise BenchError(f"--base {base}", "names no commit here", "fetch it, or see git log")
    with tempfile.TemporaryDirectory(prefix="paged-bench-") as folder:
        tree = Path(folder) / "base"
        if _git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit) is None:
            raise BenchError(f"--base {base}", "could not be checked out", "see git worktree list")
        try:
            yield Side("base", tree, Revision(commit=commit, dirty=False)), Side("head", root, revision(root))
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def turn(side: Side, head: Path, words: list[str], out: Path) -> Record:
    """Run a suite once over one side.

    Args:
        side: whose packages are measured.
        head: the tree whose benchmarks and `paged_bench` run.
        words: the subcommand and its options; `--out` is added.
        out: where the turn's record goes.

    Raises:
        BenchError: It could not run, or imported other packages than the side's.
    """
    command = [sys.executable, "-m", "paged_bench", *words, "--out", str(out)]
    environment = side.environment(head)
    done = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    # A suite that could not measure all of its cases ends with 1 or 2; what it did measure still compares.
    record = load(out) if out.is_file() and out.stat().st_size else None
    if record is None or done.returncode not in (0, 1, 2) or not any(case.series for case in record.cases):
        last = [f"status {done.returncode}", *done.stderr.strip().splitlines()][-1]
        told = last.removeprefix("paged-bench: error: ")
        raise BenchError(f"the suite over the {side.name}", told, "run it alone to see more")
    side.check(record, head)
    return record


def _git(root: Path, *words: str) -> str | None:
    command = ["git", "-c", f"safe.directory={root.resolve()}", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BenchError("git", str(error), "install it") from error
    return done.stdout.strip() if done.returncode == 0 else None

"""Remove one guard of paged_kv at a time and show that a named test notices.

Each mutation is applied to a copy of the package, and the named test is run against that copy. The script
fails when a guard's text is no longer there, when the test fails without the mutation, or when it passes
with it.

    python tools/mutate_kv.py            all guards
    python tools/mutate_kv.py fence pin  some of them
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "packages" / "paged-kv" / "src" / "paged_kv"
TESTS = ROOT / "packages" / "paged-kv" / "tests"


@dataclass(frozen=True)
class Mutation:
    """One guard, the text that is the guard, what replaces it, and the test that must fail."""

    name: str
    module: str
    guard: str
    without: str
    test: str


BUGS, SHARING, BAD = "test_kv_public_bugs.py::", "test_kv_sharing.py::", "test_kv_bad_input.py::"
MUTATIONS = (
    Mutation(
        "fence",
        "state.py",
        "return self.launched if self.launched > self.completed else 0",
        "return 0",
        BUGS + "test_13_a_page_freed_under_a_step_is_not_offered_before_the_step_completes",
    ),
    Mutation(
        "pin",
        "sharing.py",
        "state.pool.apply_pin(pins.pages)",
        "pass",
        BUGS + "test_01_a_hit_is_pinned_before_anyone_can_take_its_pages",
    ),
    Mutation(
        "copy-on-write",
        "reserve.py",
        "if not np.count_nonzero(marked):",
        "if True:",
        SHARING + "test_a_forked_row_copies_its_tail_before_it_writes",
    ),
    Mutation(
        "copy-on-write keeper",
        "reserve.py",
        'order = np.argsort(past[batch], kind="stable")',
        "order = np.arange(len(batch))",
        SHARING + "test_a_rollback_after_the_launch_hands_back_untouched_tokens",
    ),
    Mutation(
        "generation",
        "block_table.py",
        "generation = self.generation[slots] % GENERATION_MASK + 1",
        "generation = np.ones_like(slots)",
        BAD + "test_stale_handles_and_double_release",
    ),
    Mutation(
        "tail-first",
        "block_table.py",
        "column = ends[batch] - 1 - np.arange(int(ends[-1]) if len(ends) else 0) + start[batch]",
        "column = np.arange(int(ends[-1]) if len(ends) else 0) - (ends - lengths)[batch] + start[batch]",
        BUGS + "test_34_a_chain_loses_its_leaf_first",
    ),
    Mutation(
        "settled",
        "trim.py",
        "np.maximum(table.settled[slots] - window, 0)",
        "np.maximum(table.seq_len[slots] - window, 0)",
        BUGS + "test_14_a_window_is_freed_on_settled_tokens_only",
    ),
    Mutation(
        "promise",
        "reserve.py",
        "if needed <= available and (extra == 0 or extra <= free_for_all):",
        "if needed <= available:",
        SHARING + "test_a_row_without_a_promise_takes_only_what_is_left",
    ),
    Mutation(
        "hit leaves a token",
        "sharing.py",
        "limit = max(0, chain.num_tokens - 1) // state.geometry.block_size",
        "limit = chain.num_tokens // state.geometry.block_size",
        BUGS + "test_26_a_full_hit_leaves_a_token_to_compute",
    ),
    Mutation(
        "padding after a shrink",
        "index_buffers.py",
        "self._apply_lost(rows)",
        "pass",
        BUGS + "test_21_shrinking_from_112_rows_to_100_leaves_nothing_behind",
    ),
)


def run_test(test: str, package: Path) -> bool:
    """Whether the test passes against the package in this folder."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS / test)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{test} could not be run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def verdict(mutation: Mutation, folder: Path) -> str:
    """What happened with this guard: "caught", or what is wrong."""
    package = folder / mutation.name.replace(" ", "_")
    shutil.copytree(SOURCE, package / "paged_kv", ignore=shutil.ignore_patterns("__pycache__"))
    if not run_test(mutation.test, package):
        return "the test fails with the guard in place"
    module = package / "paged_kv" / mutation.module
    text = module.read_text(encoding="utf-8")
    if text.count(mutation.guard) != 1:
        return f"the guard stands {text.count(mutation.guard)} times in {mutation.module}, not once"
    module.write_text(text.replace(mutation.guard, mutation.without), encoding="utf-8")
    return "NOT CAUGHT" if run_test(mutation.test, package) else "caught"


def main(names: list[str]) -> int:
    """Try the named mutations, or all; 0 when every one was caught."""
    known = {mutation.name for mutation in MUTATIONS}
    if unknown := set(names) - known:
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for mutation in MUTATIONS:
            if names and mutation.name not in names:
                continue
            found = verdict(mutation, Path(folder))
            failures += found != "caught"
            print(f"{mutation.name:24} {found:12} {mutation.test}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

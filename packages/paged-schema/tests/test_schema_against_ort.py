"""The load-stage rules against the released ONNX Runtime, one child process a version.

Every generated model must get the same rule, status class and stage from ORT and from us. ORT's verdict is
read from a short fragment of its message; "no implementation" means that the model passed the load stage.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from paged_schema import InvalidArgument, NotImplementedMode
from paged_schema.declaration import Declaration, check_declaration
from paged_schema.onnx import make_model
from paged_schema.rules import all_rules
from paged_schema.testing.drafts import valid
from paged_schema.testing.faults import FAULTS
from paged_schema.testing.nodes import draw
from paged_schema.testing.ort import RELEASES, Answer, OrtProcess, environment

PASSED = "passed"
FRAGMENTS = {
    "L01": r"Required attribute '\w+' is missing",
    "L02": r"Mismatched attribute type",
    "L03": r"Unrecognized attribute",
    "L04": r"has input size \d+ not in range",
    "L05": r"has output size \d+ not in range",
    "L06": r"input \d+ is marked single but has an empty string",
    "L07": r"Type 'tensor\(\w+\)' of input parameter",
    "L08": r"Type parameter \(T\) of Optype",
    "L09": r"Type parameter \(T_CACHE\) of Optype",
    "L10": r"of output arg \(\w+\) of node \(\w+\) does not match expected type",
    "L11": r"kv_cache_layout must be",
    "L12": r"Input 0 \(query\) shall be 2 dimensions",
    "L13": r"Invalid hidden size or number of heads",
    "L14": r"must be divisible by \(num_heads \+ 2 \* kv_num_heads\)",
    "L15": r"num_heads must be a positive integer",
    "L16": r"Query hidden size must be divisible by num_heads",
    "L17": r"v_head_size must not exceed head_size",
    "L18": r"value_cache_out must be absent",
    "L19": r"must be both present or both absent",
    "L20": r"value_cache is required",
    "L21": r"KV cache inputs shall be 4 dimensions",
    "L22": r"Input 3 must have a non null shape",
    "L23": r"appeared multiple times",
    "L25": r"of 'attr' is required|data field mismatch",
    "L24": r"output 0 is marked single but has an empty string",
}
STATUS = {"InvalidGraph": "INVALID_GRAPH", "Fail": "FAIL", "Died": "CRASH"}
Loader = Callable[[str, Declaration], tuple[str, str]]


def cache_folder(root: Path) -> Path:
    return Path(os.environ.get("PAGED_SCHEMA_ORT_CACHE") or root / ".nox" / "onnxruntime")


def verdict_of(answer: Answer) -> tuple[str, str]:
    if (
        answer.outcome == "NotImplemented"
        and "Could not find an implementation for PagedAttention" in answer.text
    ):
        return PASSED, PASSED
    # A pass that casts float16 for CPU kernels runs after the load stage, and breaks the node before 1.32.
    if "InsertedPrecisionFreeCast_" in answer.text:
        return PASSED, PASSED
    if answer.outcome == "Died":
        return "X02", "CRASH"
    found = [rule for rule, fragment in FRAGMENTS.items() if re.search(fragment, answer.text)]
    assert len(found) == 1, f"ORT said what no rule expects: {answer}"
    return found[0], STATUS[answer.outcome]


def ours(declaration: Declaration, version: str) -> tuple[str, str]:
    try:
        check_declaration(declaration, ort=version, provider="cpu")
    except NotImplementedMode as error:
        return (PASSED, PASSED) if error.rule == "N01" else (error.rule, error.status)
    except InvalidArgument as error:
        return (error.rule, error.status) if error.stage == "load" else (error.rule, error.stage)
    raise AssertionError("ORT has no CPU kernel")


@pytest.fixture(scope="module")
def load(pytestconfig: pytest.Config) -> Iterator[Loader]:
    folder = cache_folder(pytestconfig.rootpath)
    children = {version: OrtProcess(environment(release, folder)) for version, release in RELEASES.items()}

    def ask(version: str, declaration: Declaration) -> tuple[str, str]:
        return verdict_of(children[version].load(make_model(declaration).SerializeToString()))

    yield ask
    for child in children.values():
        child.__exit__(None, None, None)


def disagreements(
    load: Loader, cases: Iterator[tuple[Declaration, tuple[str, ...]]], seen: Counter[str]
) -> list[str]:
    found = []
    for declaration, faults in cases:
        for version in RELEASES:
            theirs, mine = load(version, declaration), ours(declaration, version)
            seen[theirs[0]] += 1
            if theirs != mine:
                found.append(f"{version} {faults}: ORT {theirs}, we {mine}: {declaration}")
    return found


def test_valid_nodes_pass_the_load_stage_everywhere(load: Loader) -> None:
    seen: Counter[str] = Counter()
    cases = ((valid(Random(seed), int4=False).declaration(), ()) for seed in range(250))
    assert disagreements(load, cases, seen) == []
    assert set(seen) == {PASSED}


def test_every_single_fault_gets_the_verdict_of_ort(load: Loader) -> None:
    def cases() -> Iterator[tuple[Declaration, tuple[str, ...]]]:
        for name, edit in FAULTS.items():
            for seed in range(20):
                rng = Random(f"{name} {seed}")
                draft = valid(rng)
                edit(draft, rng)
                yield draft.declaration(), (name,)

    seen: Counter[str] = Counter()
    assert disagreements(load, cases(), seen) == []
    reachable = {rule.id for rule in all_rules() if rule.stage == "load"} | {PASSED}
    assert set(seen) == reachable, "the generator must reach every load-stage rule"


@pytest.mark.parametrize("faults", [2, 3])
def test_faults_together_get_the_rule_that_ort_meets_first(load: Loader, faults: int) -> None:
    cases = (draw(Random(seed), faults) for seed in range(1500))
    assert disagreements(load, cases, Counter()) == []

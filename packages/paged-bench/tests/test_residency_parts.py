"""The parts of the residency report that need no cache: attention, the planner's tables, text and drawing."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from paged_bench.demo.config import LlamaConfig
from paged_bench.residency.attention import Beside, Residents, attend, rotate
from paged_bench.residency.figure import figure
from paged_bench.residency.floors import floors, placements
from paged_bench.residency.results import CrossingResult, LaneResult, Report, StepResult
from paged_bench.residency.shapes import SHAPES, Variant, variants
from paged_bench.residency.text import render, table
from paged_kv.vmm import KvLayout

G = 2 << 20
SMALL, LARGE = SHAPES["0.5b"], SHAPES["14b"]


def plain_attention(query, keys, values, past, scale):
    """One token and head at a time, in float64."""
    tokens, heads, _ = query.shape
    group = heads // len(keys)
    output = np.empty(query.shape)
    for token in range(tokens):
        for head in range(heads):
            k, v = (array[head // group, : past + token + 1].astype(np.float64) for array in (keys, values))
            scores = k @ query[token, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            output[token, head] = weights @ v / weights.sum()
    return output


@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (1, 6), (5, 0), (3, 4)])
def test_attention_is_causal_and_grouped(tokens, past):
    rng = np.random.default_rng(tokens)
    query = rng.standard_normal((tokens, 6, 8)).astype(np.float32)
    keys, values = rng.standard_normal((2, 3, past + tokens, 8)).astype(np.float16)
    got = attend(query, keys, values, past, 0.3)
    np.testing.assert_allclose(got, plain_attention(query, keys, values, past, 0.3), rtol=2e-5, atol=2e-6)


def test_rotation_turns_pairs_and_leaves_the_rest():
    x = np.arange(8, dtype=np.float32).reshape(1, 1, 8)
    quarter = rotate(x, np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32))
    assert quarter.ravel().tolist() == [-2, -3, 0, 1, 4, 5, 6, 7]


def config(**changes):
    sizes = {"layers": 30, "width": 576, "hidden": 8, "heads": 9, "kv_heads": 3, "head_size": 64}
    rotary = {"rotary_dim": 64, "rope_base": 1e4, "rope_factor": 1.0}
    return LlamaConfig(**sizes | rotary | changes, epsilon=1e-5, context=512, vocabulary=9)


def test_the_model_fills_a_cache_as_far_as_both_go():
    assert Residents.of(config(), SMALL) == Residents(24, 2, 3)
    assert Residents.of(config(), LARGE) == Residents(30, 3, 3)
    small = Residents.of(config(), SMALL)
    assert [small.heads(layer) for layer in (0, 23, 24, 29)] == [2, 2, 0, 0]


def test_what_lies_beside_is_remembered():
    rng = np.random.default_rng(0)
    beside = Beside(config(layers=1), Residents(1, 2, 3), 6)
    keys, values = rng.standard_normal((2, 6, 1, 64)).astype(np.float16)
    query = rng.standard_normal((6, 3, 64)).astype(np.float32)
    first = beside.attend(0, query[:5], keys[:5], values[:5], 0)
    last = beside.attend(0, query[5:], keys[5:], values[5:], 5)
    whole = attend(query, keys.swapaxes(0, 1), values.swapaxes(0, 1), 0, 64**-0.5)
    np.testing.assert_allclose(np.concatenate((first, last)), whole, rtol=1e-5, atol=1e-6)


def test_layouts_part_by_the_number_of_heads_and_meet_again():
    curves = {
        floor.layout: dict(zip(floor.tokens, floor.granules, strict=True)) for floor in floors(LARGE, G)
    }
    head, seq, token = (curves[name] for name in ("head_major", "seq_major", "token_major"))
    assert (head[1], seq[1], token[1]) == (768, 96, 1)
    assert head[1] // seq[1] == LARGE.kv_heads
    assert head[8192] == seq[8192] == token[8192] == 768
    small = {floor.layout: floor.granules[0] for floor in floors(SMALL, G)}
    # Two heads of 32 KiB share a granule: the separation needs a stride of a granule.
    assert small == {"head_major": 48, "seq_major": 48, "token_major": 1}


def test_packing_takes_less_than_the_floor():
    aligned, packed = placements(SMALL, 64, G)
    assert (aligned.attributed_bytes, aligned.physical_bytes) == (48 * G, 48 * G)
    assert packed.attributed_bytes == 48 * G
    assert 3 * G <= packed.physical_bytes <= 4 * G
    assert packed.logical_bytes == 64 * 12_288


def test_variants_are_every_way_and_two_controls():
    found = variants(8, 52)
    assert len(set(found)) == len(found) == 10
    assert sum(variant.min_bucket == 64 for variant in found) == 2
    assert {variant.layout for variant in found if variant.in_place} == {
        KvLayout.HEAD_MAJOR_BUCKET,
        KvLayout.SEQ_MAJOR,
    }
    assert Variant(False, False, True, 8).layout is KvLayout.SEQ_MAJOR_BUCKET


def lane(shape, label, physical, **changes):
    steps = (
        StepResult(5, 8, "launch", G, False, True),
        StepResult(6, 8, "capture", 0, False, False),
        StepResult(7, 8, "replay", 0, False, False),
        StepResult(9, 16, "replay", 0, True, True),
    )
    facts = {"layout": "seq_major", "in_place": True, "capture": True, "min_bucket": 8}
    numbers = {"growth_events": 1, "kv_bytes_moved": 3, "actual_copy_bytes": 2, "captures": 1, "replays": 2}
    return LaneResult(
        shape=shape,
        label=label,
        attributed_bytes=48 * G,
        physical_bytes=physical,
        billed_bytes=physical,
        invalidations=2,
        growth_keeps=1,
        steps=steps,
        **facts | numbers | {"token_ids": (1, 2, 3, 4)} | changes,
    )


@pytest.fixture
def report():
    lanes = (lane("a & b", "one", 48 * G), lane("a & b", "two", G, capture=False), lane("c", "three", G))
    stages = (
        CrossingResult("one", "seq_major", 100, 1, 96 * G, 96 * G, 0, 1, 3, 0, None),
        CrossingResult("one", "seq_major", 4000, 4, 384 * G, 384 * G, 0, 1, 4, 1, True),
    )
    curves = (*floors(SMALL, G), *floors(LARGE, G))
    text = {"backend": "fake", "device": "d", "model": "m", "prompt": "p", "text": "t"}
    return Report(
        granularity=G,
        lanes=lanes,
        floors=curves,
        placements=placements(SMALL, 64, G),
        crossing_shape="14b",
        crossing=stages,
        **text,
    )


def test_the_text_holds_every_lane_and_counter(report):
    words = render(report)
    assert "the same tokens in all" in words
    assert words.count("1/2/2/1") == 3
    assert "100,663,296" in words
    differing = replace(report, lanes=(*report.lanes, lane("c", "four", G, token_ids=(9,))))
    assert "THE TOKENS DIFFER" in render(differing)


def test_a_table_aligns_words_left_and_numbers_right():
    assert table(("a", "b"), [("x", 1000), ("yy", 2)]).splitlines() == [
        "a       b",
        "---------",
        "x   1,000",
        "yy      2",
    ]


def test_json_is_the_whole_report(report):
    facts = json.loads(report.to_json())
    assert facts["format"] == 1
    assert facts["same_tokens"] is True
    assert facts["lanes"][0]["steps"][1]["access"] == "capture"
    assert report.to_json() == replace(report).to_json()


def test_the_drawing_is_sound_and_the_same_every_time(report):
    drawn = figure(report)
    assert drawn == figure(replace(report))
    root = ElementTree.fromstring(drawn)
    assert root.get("role") == "img"
    space = "{http://www.w3.org/2000/svg}"
    width, height = (float(word) for word in root.get("viewBox").split()[2:])
    for text in root.iter(f"{space}text"):
        assert 0 <= float(text.get("x")) <= width
        assert 0 <= float(text.get("y")) <= height
    # Told apart without colour: a dash for each curve, a shape for each event.
    dashes = {line.get("stroke-dasharray") for line in root.iter(f"{space}polyline")}
    assert len(dashes) == 3
    assert "prefers-color-scheme: dark" in drawn
    assert "#" not in drawn.split("</style>")[1]


def test_a_report_without_crossing_is_drawn_too(report):
    assert "across granules" not in render(replace(report, crossing=()))
    assert ElementTree.fromstring(figure(replace(report, crossing=()))) is not None

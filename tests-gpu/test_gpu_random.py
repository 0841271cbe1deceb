"""Random calls inside the contract against the oracle, a fixed number of them, fresh in every run.

The oracle takes nearly all of the time, so several processes share them.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cuda import Stream
from parity import GROUPS, Group, assert_parity
from problems import Case, build

# Each pair costs a compilation, so the random calls share these; `test_head_sizes` has more.
HEAD_SIZES = [
    (576, 512),
    (512, 512),
    (192, 128),
    (192, 128),
    (384, 192),
    (160, 128),
    (192, 100),
    (64, 64),
    (40, 33),
    (24, 8),
    (8, 1),
]
EXAMPLES = int(os.environ.get("PAGED_PARITY_EXAMPLES", "2000"))
PROCESSES = min(16, os.cpu_count() or 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_size, v_head_size = draw(st.sampled_from(HEAD_SIZES))
    rotary_dim = 16 * draw(st.integers(0, head_size // 16)) if head_size % 16 == 0 else 0
    rotary_offset = 8 * draw(st.integers(0, (head_size - rotary_dim) // 8)) if rotary_dim else 0
    block_size = 16 << draw(st.integers(0, 4))
    edge = st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 63, 64, 65])
    sequences = draw(
        st.lists(st.tuples(st.integers(0, 9), edge | st.integers(0, 200)), min_size=1, max_size=5)
    )
    q, past = tuple(s[0] for s in sequences), tuple(s[1] for s in sequences)
    slots = draw(st.booleans())
    tokens = sum(q)
    skipped = draw(st.sets(st.integers(0, tokens - 1), max_size=3)) if slots and tokens else set()
    return Case(
        q,
        past,
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        heads=draw(st.integers(1, 20) | st.sampled_from([63, 64, 65, 96])),
        head_size=head_size,
        v_head_size=v_head_size,
        block_size=block_size,
        rotary_dim=rotary_dim,
        rotary_offset=rotary_offset,
        interleaved=draw(st.booleans()),
        scale=draw(st.sampled_from([0.07, 0.25, 1e-3])),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0, 50.0])),
        window=draw(st.sampled_from([-1, -1, 0, 1, block_size - 1, 64, 1000])),
        causal=draw(st.sampled_from([True, True, False])),
        slots=slots,
        skipped=tuple(sorted(skipped)),
        spread=draw(st.sampled_from([1.0, 0.1])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def run_share(examples: int) -> tuple[int, dict[str, Group]]:
    """Run so many random calls in this process, and return how many there were and what was measured."""
    stream, done = Stream(0), 0
    GROUPS.clear()  # of an earlier share in this process

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def check(case: Case) -> None:
        nonlocal done
        assert_parity("random calls", build(case), stream)
        done += 1

    check()
    return done, dict(GROUPS)


def test_random_calls(stream: Stream, facts: dict[str, Any]) -> None:
    done = 0
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for share, groups in pool.map(run_share, [-(-EXAMPLES // PROCESSES)] * PROCESSES):
            done += share
            for name, group in groups.items():
                GROUPS.setdefault(name, Group()).add(group)
    facts["random calls"] = done
    assert done >= EXAMPLES

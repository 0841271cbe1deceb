"""Times the split path against the machine's own ceilings and writes a record.

usage: python tests-gpu/measure_split.py OUT.json

Every shape is first compared with float64 attention: first, middle and last sequence, output poisoned with
NaN. Times are medians of graph replays, attend and combine together as peers are timed, over as many sets of
queries, tables and outputs as pass 300 MB; block tables are random permutations of a pool. `step` is append,
schedule, attend and combine. The floor is the larger of KV bytes over the read rate and operations over the
matmul rate that the same run measured. Needs torch, for memory, ceilings and the reference.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from paged_bench.measure.suite import CaseSpec
from paged_bench.record import Case as RecordedCase
from paged_bench.record import (
    Ceiling,
    Correctness,
    Gpu,
    Record,
    Samples,
    Suite,
    Variant,
    capture,
    present_kernels,
    save,
)
from paged_cuda import Bounds, PagedAttention
from paged_cuda._nvrtc import nvrtc_version
from paged_cuda.device import Device, resolve_device
from paged_schema import Call, PagedAttentionAttributes, PagedAttentionInputs, check

SCALE = 192**-0.5
ROTATED_BYTES = 3e8
REPLAYS = 15
Case = tuple[str, int, int, int, int, list[int], list[int], dict[str, Any]]
_generator = torch.Generator(device="cuda").manual_seed(5)


def call_of(heads: int, head_size: int, v_head_size: int, block_size: int) -> Call:
    attributes = PagedAttentionAttributes(
        num_heads=heads, kv_num_heads=1, kv_cache_layout="LATENT", v_head_size=v_head_size, scale=SCALE
    )
    inputs = PagedAttentionInputs(
        query=f"bf16[t, {heads * head_size}]",
        key=f"bf16[t, {head_size}]",
        key_cache=f"bf16[n, {block_size}, 1, {head_size}]",
        cumulative_sequence_length="i32[b1]",
        past_seqlens="i32[b]",
        block_table="i32[b, m]",
        slot_mapping="i32[t]",
    )
    return check(attributes, inputs, ort="1.31")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, device="cuda").to(torch.bfloat16)


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def timed(launch: Any, stream: torch.cuda.Stream, calls: int) -> list[float]:
    """Capture `launch`, replay it, and return microseconds a call of each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch()  # libraries make their handles outside the capture
        with torch.cuda.graph(graph, stream=stream):
            launch()
        graph.replay()
        stream.synchronize()
        samples = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / calls)
    return samples


def ceilings() -> dict[str, float]:
    """Measure the read rate, the copy rate (bytes/s) and the bf16 matmul rate (operations/s)."""
    words = torch.randn(2**30, generator=_generator, device="cuda")
    other, stream = torch.empty_like(words), torch.cuda.Stream()
    a, b = normal(8192, 8192), normal(8192, 8192)
    read = statistics.median(timed(lambda: words.sum(), stream, 1))
    copy = statistics.median(timed(lambda: other.copy_(words), stream, 1))
    product = statistics.median(timed(lambda: a @ b, stream, 1))
    return {
        "read": words.nbytes / read * 1e6,
        "copy": 2 * words.nbytes / copy * 1e6,
        "matmul": 2 * 8192**3 / product * 1e6,
    }


class Set:
    """One rotated set of inputs with an operator of its own."""

    def __init__(self, case: Case, pool: torch.Tensor, stream: torch.cuda.Stream) -> None:
        _, heads, head_size, v_head_size, block_size, lengths, queries, options = case
        batch, tokens = len(lengths), sum(queries)
        blocks = [-(-length // block_size) for length in lengths]
        order = torch.randperm(pool.shape[0], generator=_generator, device="cuda").int()
        self.table = torch.full((batch, max(blocks)), -1, dtype=torch.int32, device="cuda")
        for row, begin in enumerate(itertools.accumulate([0, *blocks[:-1]])):
            self.table[row, : blocks[row]] = order[begin : begin + blocks[row]]
        self.query = normal(tokens, heads * head_size)
        self.output = torch.full((tokens, heads * v_head_size), math.nan, dtype=torch.bfloat16, device="cuda")
        self.operator = PagedAttention(
            call_of(heads, head_size, v_head_size, block_size),
            Bounds(batch, tokens, max(lengths)),
            **options,
        ).prepare()
        self.arrays = {
            "query": self.query,
            "key": normal(tokens, head_size),
            "key_cache": pool,
            "cumulative_sequence_length": integers([0, *itertools.accumulate(queries)]),
            "past_seqlens": integers([n - q for n, q in zip(lengths, queries, strict=True)]),
            "block_table": self.table,
            # Nothing is written: the pool stays as drawn, and append is timed on its reads alone.
            "slot_mapping": torch.full((tokens,), -1, dtype=torch.int32, device="cuda"),
            "output": self.output,
        }
        self.operator.run(**self.arrays, stream=stream.cuda_stream)

    def attend(self, stream: torch.cuda.Stream) -> None:
        """Launch attend and combine on a settled schedule."""
        self.operator._params.schedule_settled = 1
        for launch in self.operator._launchers[2:]:
            launch(stream.cuda_stream)

    def step(self, stream: torch.cuda.Stream) -> None:
        self.operator.run(**self.arrays, stream=stream.cuda_stream)


def worst_error(case: Case, pool: torch.Tensor, one: Set) -> float:
    """Return the largest relative error, by norm, of the sequences looked at, against float64 attention."""
    _, heads, head_size, v_head_size, block_size, lengths, queries, _ = case
    starts, worst = [0, *itertools.accumulate(queries)], 0.0
    if not torch.isfinite(one.output).all():
        raise SystemExit(f"{case[0]}: the output holds values that are not finite")
    for row in sorted({0, len(lengths) // 2, len(lengths) - 1}):
        length, query = lengths[row], queries[row]
        rows = (
            pool[one.table[row, : -(-length // block_size)].long()].reshape(-1, head_size)[:length].double()
        )
        for token in sorted({0, query // 2, query - 1}):
            seen = length - query + token + 1
            q = one.query[starts[row] + token].view(heads, head_size).double()
            weights = torch.softmax(q @ rows[:seen].T * SCALE, -1)
            want = weights @ rows[:seen, :v_head_size]
            got = one.output[starts[row] + token].view(heads, v_head_size).double()
            worst = max(worst, float((got - want).norm() / want.norm()))
    return worst


def measure(case: Case, pool: torch.Tensor, rates: dict[str, float]) -> dict[str, Any]:
    name, heads, head_size, v_head_size, block_size, lengths, queries, options = case
    kv_bytes = sum(lengths) * head_size * 2
    sets_wanted = max(1, min(64, math.ceil(ROTATED_BYTES / kv_bytes)))
    stream = torch.cuda.Stream()
    sets = [Set(case, pool, stream) for _ in range(sets_wanted)]
    stream.synchronize()
    error = worst_error(case, pool, sets[0])
    if error > 5e-3:
        raise SystemExit(f"{name}: relative error {error} before timing")
    rounds = max(1, math.ceil(8 / sets_wanted))
    loop = [one for _ in range(rounds) for one in sets]
    attend = timed(lambda: [one.attend(stream) for one in loop], stream, len(loop))
    step = timed(lambda: [one.step(stream) for one in loop], stream, len(loop))
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for n, q in zip(lengths, queries, strict=True))
    operations = 2 * heads * (head_size + v_head_size) * pairs
    floor = max(kv_bytes / rates["read"], operations / rates["matmul"]) * 1e6
    row = {
        "case": name,
        "heads": heads,
        "head_size": head_size,
        "v_head_size": v_head_size,
        "block_size": block_size,
        "options": options,
        "tiles": sets[0].operator.explain().tiles,
        "relative_error": error,
        "kv_bytes": kv_bytes,
        "operations": operations,
        "floor_us": floor,
        "attend_combine_us": statistics.median(attend),
        "step_us": statistics.median(step),
        "ratio_to_floor": statistics.median(attend) / floor,
        "attend_combine_samples_us": attend,
        "step_samples_us": step,
    }
    print(
        f"{name:30} h{heads:<4} floor {floor:8.1f}  attend+combine {row['attend_combine_us']:8.1f}",
        flush=True,
    )
    return row


def cases() -> list[Case]:
    draw = random.Random(7)
    ragged = [draw.randrange(256, 8193) for _ in range(128)]
    shapes = [
        ("1 x 4,096", [4096]),
        ("1 x 32,768", [32_768]),
        ("1 x 131,072", [131_072]),
        ("16 x 8,192", [8192] * 16),
        ("64 x 4,096", [4096] * 64),
        ("128 x 4,096", [4096] * 128),
        ("128 x 8,192", [8192] * 128),
        ("256 x 1,024", [1024] * 256),
        (f"ragged 128, {sum(ragged) * 1152 / 1e6:.0f} MB", ragged),
    ]
    found: list[Case] = []
    for name, lengths in shapes:
        found.append((name, 16, 576, 512, 64, lengths, [1] * len(lengths), {}))
    found.append(("128 x 4,096, page 16", 16, 576, 512, 16, [4096] * 128, [1] * 128, {}))
    found.append(
        ("128 x 4,096, fixed split", 16, 576, 512, 64, [4096] * 128, [1] * 128, {"split_rows": 1024})
    )
    for heads in (64, 128):
        for terms in (1, 2):
            options = {"weight_terms": terms}
            found.append(
                (f"128 x 4,096, {terms} terms", heads, 576, 512, 64, [4096] * 128, [1] * 128, options)
            )
    for name, lengths in shapes[4:7:2]:
        for terms in (1, 2):
            options = {"weight_terms": terms}
            found.append((f"{name}, {terms} terms", 16, 192, 128, 64, lengths, [1] * len(lengths), options))
    for row_tile in (16, 32, 48, 64):
        options = {"row_tile": row_tile}
        found.append((f"prefill 4,096, row tile {row_tile}", 16, 576, 512, 64, [4096], [4096], options))
    return found


def main(out: Path) -> None:
    device = resolve_device(0)
    rates = ceilings()
    print({name: f"{rate:.4g}" for name, rate in rates.items()}, flush=True)
    found: list[tuple[Case, dict[str, Any]]] = []
    pool = torch.empty(0)
    for case in sorted(cases(), key=lambda case: -case[2]):
        blocks = int(1.3e9) // (case[4] * case[2] * 2)
        if pool.shape[1:] != (case[4], 1, case[2]):
            pool = torch.empty(0)
            pool = normal(blocks, case[4], 1, case[2])
        found.append((case, measure(case, pool, rates)))
    save(as_record(found, rates, device), out)


def as_record(rows: list[tuple[Case, dict[str, Any]]], rates: dict[str, float], device: Device) -> Record:
    """Put the rows into the project's schema; ids are those of `paged-bench run` where it has the case."""
    sources = ("append.cu", "schedule.cu", "sm80_latent.cu", "combine.cu")
    gpu = Gpu(
        name=device.properties.name,
        compute_capability="{}.{}".format(*device.properties.capability),
        multiprocessors=device.properties.multiprocessors,
        driver="{}.{}".format(*device.driver.version()),
        nvrtc="{}.{}".format(*nvrtc_version()),
    )
    methods = {"read": "float32 sum over 4 GiB by torch", "copy": "copy of 4 GiB by torch, both ways counted"}
    methods["matmul"] = "8192 cubed by torch"
    return Record(
        kind="gpu",
        what="The LATENT split path, shapes and tiles that no user chooses: attention and the whole step.",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command="python tests-gpu/measure_split.py",
        suite=Suite(name="split path"),
        kernels=present_kernels(sources),
        environment=capture(gpu),
        ceilings=tuple(
            Ceiling(
                what=what, value=rate, dtype="bfloat16" if what == "matmul" else None, method=methods[what]
            )
            for what, rate in rates.items()
        ),
        cases=tuple(_as_case(case, row) for case, row in rows),
    )


def _as_case(case: Case, row: dict[str, Any]) -> RecordedCase:
    name, heads, head_size, v_head_size, block_size, lengths, queries, options = case
    group = "prefill" if max(queries) > 64 else "decode" if len(set(lengths)) == 1 else "ragged"
    given = {key: options[key] for key in ("weight_terms", "split_rows") if key in options}
    spec = CaseSpec(
        *(group, tuple(lengths), tuple(queries), heads, head_size, v_head_size, block_size),
        rotary_dim=0,
        **given,
    )
    tile = f"/rowtile{options['row_tile']}" if "row_tile" in options else ""
    series = (("attend+combine", "attend_combine_samples_us"), ("step", "step_samples_us"))
    return RecordedCase(
        id=spec.id + tile,
        title=name,
        group=group,
        shape=spec.shape,
        parameters=dict(options),
        work=spec.work,
        correctness=Correctness(
            reference="float64 attention of the first, middle and last sequence",
            relative_error=row["relative_error"],
        ),
        series=tuple(
            Samples(what=what, timing="graph", values=tuple(row[key]), l2="cold") for what, key in series
        ),
        variants=(Variant(kernel="sm80_latent.cu", description=row["tiles"]),),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

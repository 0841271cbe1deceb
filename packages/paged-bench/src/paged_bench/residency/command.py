"""`paged-bench residency`: one decode in every variant of every cache, the planner's tables, and growth."""

from __future__ import annotations

import sys

from paged_bench.demo.config import LlamaConfig, read_config
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.llama import Llama
from paged_bench.demo.model_file import locate
from paged_bench.demo.rope import read_tables
from paged_bench.demo.tokenizer import TextCodec
from paged_bench.demo.weights import read_weights
from paged_bench.errors import BackendError, OptionError, PromptError
from paged_bench.residency.crossing import crossing
from paged_bench.residency.decode import decode
from paged_bench.residency.figure import figure
from paged_bench.residency.floors import floors, placements
from paged_bench.residency.lane import Lane
from paged_bench.residency.machine import FakeMachine, Machine
from paged_bench.residency.options import ResidencyOptions
from paged_bench.residency.results import LaneResult, Report
from paged_bench.residency.shapes import SHAPES, KvShape, variants
from paged_bench.residency.text import render


def run(options: ResidencyOptions) -> int:
    """Decode, count, print and draw.

    Returns:
        The exit status: 0, or 1 when two caches did not decode the same tokens, which is a bug.

    Raises:
        BenchError: Bad input, or a backend that this machine cannot run.
        OSError: The picture cannot be written.
    """
    machine = select(options.backend)
    report = measure(options, machine)
    sys.stdout.write(report.to_json() + "\n" if options.json else render(report))
    if options.svg is not None:
        options.svg.write_text(figure(report), encoding="utf-8")
    return 0 if report.same_tokens else 1


def select(backend: str) -> Machine:
    """The machine that `backend` names; `auto` takes a GPU where there is one.

    Raises:
        BackendError: CUDA was asked for and there is no driver or GPU.
    """
    if backend == "fake":
        return FakeMachine()
    from paged_cuda import NoDriver

    from paged_bench.residency.cuda_machine import CudaMachine

    try:
        return CudaMachine()
    except NoDriver as error:
        if backend == "auto":
            return FakeMachine()
        advice = f"required is {error.expected}; --backend fake needs no GPU"
        raise BackendError("--backend cuda", f"{error.subject}: {error.got}", advice) from error


def measure(options: ResidencyOptions, machine: Machine) -> Report:
    """The report of one machine.

    Raises:
        BenchError: The model cannot be read, the text does not fit, or the memory is refused.
    """
    file = GgufFile(locate(options.model))
    config, codec = read_config(file), TextCodec(file)
    prompt_ids = codec.encode(options.prompt)
    if not prompt_ids:
        raise PromptError("the prompt", "is empty", "give a text to continue")
    shapes = [SHAPES[name] for name in options.shapes]
    longest = len(prompt_ids) + options.new - 1
    _admit(longest, options, config, shapes)
    model = Llama(config, read_weights(file, config))
    lanes = [
        machine.lane(variant, shape, config, longest)
        for shape in shapes
        for variant in variants(options.min_bucket, longest)
    ]
    decode(model, prompt_ids, lanes, options.new, read_tables(file, config, longest))
    results = [_finish(lane) for lane in lanes]
    granule = machine.granularity
    crossed = SHAPES["14b"]
    return Report(
        backend=machine.name,
        device=machine.device,
        model=file.path.name,
        prompt=options.prompt,
        text=codec.decode(list(results[0].token_ids)),
        granularity=granule,
        lanes=tuple(results),
        floors=tuple(floor for shape in SHAPES.values() for floor in floors(shape, granule)),
        placements=tuple(
            row
            for shape, tokens in ((SHAPES["0.5b"], 64), (SHAPES["0.5b"], 512), (crossed, 64))
            for row in placements(shape, tokens, granule)
        ),
        crossing_shape=crossed.name,
        crossing=crossing(machine, crossed) if crossed in shapes else (),
    )


def _finish(lane: Lane) -> LaneResult:
    result = lane.result()
    lane.close()
    return result


def _admit(longest: int, options: ResidencyOptions, config: LlamaConfig, shapes: list[KvShape]) -> None:
    """Refuse what no cache can hold, and heads that the caches have no room for."""
    if longest > (limit := min([config.context, *(shape.capacity for shape in shapes)])):
        raise PromptError(
            "the prompt",
            f"and {options.new} new tokens need a cache of {longest}, the limit is {limit}",
            "shorten it, or lower --new",
        )
    if options.min_bucket > min(shape.capacity for shape in shapes):
        raise OptionError("--min-bucket", f"is {options.min_bucket}, more than a cache can hold")
    if (narrowest := min(shape.head_dim for shape in shapes)) < config.head_size:
        raise OptionError(
            "--model", f"has heads of {config.head_size}, the caches have {narrowest}", "give another model"
        )

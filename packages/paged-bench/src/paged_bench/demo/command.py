"""`paged-bench demo`: everything that can be refused is refused before the first word of output."""

from __future__ import annotations

import sys

from paged_kv import KVCacheManager, PageGeometry
from rich.markup import escape

from paged_bench.console import PlainConsole
from paged_bench.demo.backend import BackendSpec
from paged_bench.demo.config import LlamaConfig, read_config
from paged_bench.demo.decoder import GreedyDecoder
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.layouts import LAYOUTS
from paged_bench.demo.llama import Llama
from paged_bench.demo.model_file import locate
from paged_bench.demo.options import DemoOptions
from paged_bench.demo.pool import pages_for, pool_geometry
from paged_bench.demo.progress import Progress
from paged_bench.demo.prompts import gather_prompts
from paged_bench.demo.report import json_array, summary
from paged_bench.demo.requests import Request
from paged_bench.demo.rope import read_tables
from paged_bench.demo.scheduler import Limits, Scheduler
from paged_bench.demo.select import Selection, select_backend
from paged_bench.demo.tokenizer import TextCodec
from paged_bench.demo.usage import RunTotals
from paged_bench.demo.weights import read_weights

# Prompt tokens of one step beyond one a sequence: keeps a step short while the others decode.
_PREFILL_TOKENS = 32


def run(options: DemoOptions) -> int:
    """Decode the prompts and report.

    Returns:
        The exit status, 0.

    Raises:
        BenchError: Bad input, or a backend that this machine cannot run.
    """
    # People read standard output, unless a program does: then progress goes to standard error.
    console = PlainConsole(stderr=options.json, highlight=False)
    prompts = gather_prompts(options.words, options.prompts, options.max_new)
    file = GgufFile(locate(options.model))
    config, codec = read_config(file), TextCodec(file)
    requests = [
        Request(index, text, tuple(codec.encode(text)), limit, index * options.stagger)
        for index, (text, limit) in enumerate(prompts)
    ]
    geometry = pool_geometry(requests, options.block_size, options.pages, config.context)
    selection = select_backend(
        options.backend, options.dtype, _spec(options, file, config, geometry, requests)
    )
    model = Llama(config, read_weights(file, config))
    console.print(_headline(file, selection, options), soft_wrap=True)
    decoder = GreedyDecoder(model, selection.backend)
    scheduler = Scheduler(
        KVCacheManager(
            geometry,
            max_sequences=options.max_batch,
            max_blocks_per_sequence=max(pages_for(request, options.block_size) for request in requests),
        ),
        requests,
        _limits(options),
        frozenset() if options.ignore_eos else codec.stop_ids,
    )
    totals = RunTotals()
    with Progress(console, scheduler.sequences, codec) as progress:
        for record in scheduler.steps(decoder):
            totals.add(record)
            progress.show(record)
    title = f"{file.path.name} on {selection.backend.name}, {options.layout}, {selection.dtype}"
    console.print(summary(totals, decoder.attention_seconds, geometry, title))
    if options.json:
        sys.stdout.write(json_array(scheduler.sequences, codec) + "\n")
    return 0


def _limits(options: DemoOptions) -> Limits:
    return Limits(options.max_batch, options.max_batch + _PREFILL_TOKENS)


def _spec(
    options: DemoOptions, file: GgufFile, config: LlamaConfig, geometry: PageGeometry, requests: list[Request]
) -> BackendSpec:
    longest = max(request.cache_tokens for request in requests)
    cos, sin = read_tables(file, config, longest)
    limits = _limits(options)
    return BackendSpec(
        layers=config.layers,
        layout=LAYOUTS[options.layout](config),
        geometry=geometry,
        dtype="float32",
        cos=cos,
        sin=sin,
        max_sequences=limits.sequences,
        max_tokens=limits.tokens,
        max_context=longest,
    )


def _headline(file: GgufFile, selection: Selection, options: DemoOptions) -> str:
    backend = selection.backend
    details = f" on {backend.device} ({selection.reason}), {options.layout} layout, {selection.dtype}"
    return f"{escape(file.path.name)}: backend [bold]{backend.name}[/]{escape(details)}"

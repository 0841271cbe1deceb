"""`paged-bench run`: look at the GPU, measure its ceilings, then every case in rounds, and keep all of it.

Invariant: from before the first measurement on, the record on disk is valid. Whatever ends the run, an
interrupt, a fault of the driver, somebody else's process, leaves what was measured in it, and an exit
status that is not 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paged_cuda import ArgumentMismatch, CompileError, CubinCache, Device, DriverError, PagedCudaError
from paged_cuda.loader import load_kernels
from paged_cuda.paths import PATHS
from rich.console import Console
from rich.markup import escape

from paged_bench.console import PlainConsole
from paged_bench.errors import BenchError, MeasurementError, OptionError
from paged_bench.measure.bench import Bench
from paged_bench.measure.case import CaseRun
from paged_bench.measure.ceilings import cycles_per_us, measure_ceilings
from paged_bench.measure.check import WrongOutput
from paged_bench.measure.guard import Guard
from paged_bench.measure.inputs import Pool
from paged_bench.measure.machine import Machine, gpu_block
from paged_bench.measure.nvml import with_states
from paged_bench.measure.options import MeasureOptions
from paged_bench.measure.peers import Peer, all_peers, chosen_peers, is_installed, preload, version_of
from paged_bench.measure.peers.torch_tools import torch_matmul
from paged_bench.measure.progress import Progress, case_lines, ceiling_line
from paged_bench.measure.recording import Recorder, failed_case
from paged_bench.measure.selfcheck import check_clock
from paged_bench.measure.stack import StackRun
from paged_bench.measure.step import operator_of
from paged_bench.measure.subject import DoesNotFit, Measured, Method
from paged_bench.measure.suite import CaseSpec
from paged_bench.measure.tables import cases_of
from paged_bench.record import Peer as PeerBlock
from paged_bench.record import capture
from paged_bench.terminable import Terminable

_WRONG, _INCOMPLETE = 1, 2


def run(
    options: MeasureOptions,
    machine: Machine | None = None,
    *,
    specs: Sequence[CaseSpec] | None = None,
    peers: Sequence[Peer] | None = None,
    cache: CubinCache | None = None,
    console: Console | None = None,
) -> int:
    """Measure and keep the record.

    Args:
        options: What to measure.
        machine: Where; by default here.
        specs: The cases; by default those of the suite.
        peers: What `--peers` chooses from.
        cache: Where cubins are kept.
        console: Where people look.

    Returns:
        The exit status: 0, 1 where an output was wrong, 2 where something was not measured.

    Raises:
        BenchError: A bad option, or a GPU that is not free. Nothing was measured.
        NoDriver: There is no GPU.
        OSError: The record cannot be written.
    """
    paths = ("auto", *(path.name for path in PATHS))
    if options.kernel not in paths:
        raise OptionError("--kernel", f"there is no path {options.kernel!r}", f"known are {', '.join(paths)}")
    chosen = chosen_peers(options.peers, peers)
    wanted = [spec for spec in (specs or cases_of(options.suite)) if options.wants(spec.id)]
    if not wanted:
        raise OptionError("--only", f"no case of suite {options.suite} matches {', '.join(options.only)}")
    preload(chosen)
    session = _Session(options, machine or Machine.real(), wanted, chosen, peers or all_peers(), cache)
    shown = console or PlainConsole(stderr=True, highlight=False)
    with Terminable():
        try:
            return session.run(shown)
        except KeyboardInterrupt:
            shown.print("interrupted before anything was measured")
            return _INCOMPLETE


@dataclass
class _Session:
    options: MeasureOptions
    machine: Machine
    specs: Sequence[CaseSpec]
    peers: Sequence[Peer]
    known: Sequence[Peer]
    cache: CubinCache | None
    problems: list[str] = field(default_factory=list)
    wrong: bool = False
    round: int = 0

    def run(self, console: Console) -> int:
        options = self.options
        driver = self.machine.driver()
        counters = self.machine.counters()
        if options.device >= driver.device_count() or options.device < 0:
            raise OptionError(
                "--device", f"{options.device} was given, there are {driver.device_count()} GPUs"
            )
        facts = counters.facts(options.device)
        guard = Guard(lambda: self.machine.look(facts.uuid), force=options.force, sleep=self.machine.sleep)
        state = guard.before()
        gpu = gpu_block(driver, options.device, facts)
        name = options.suite + (" (selected)" if options.only else "")
        recorder = Recorder(options.out, name, self.specs, options.command, capture(gpu))
        recorder.peers(self._peer_blocks())
        stopped: str | None = None
        with Progress(console, len(self.specs) * options.rounds) as progress:
            try:
                bench = Bench(Device(driver, options.device), counters)
                bench.stream.synchronize()
                guard.opened()
                self._measure(bench, guard, recorder, progress)
            except KeyboardInterrupt:
                stopped = "interrupted"
            except (BenchError, PagedCudaError, MemoryError) as error:
                stopped = " ".join(str(error).split()) or "not enough memory"
        after = self.machine.look(facts.uuid)
        notes = [*guard.notes, *self.problems]
        record = recorder.finish(stopped, with_states(gpu, state, after, guard.others))
        if stopped:
            where = f" in round {self.round} of {options.rounds}" if self.round else ""
            notes.append(f"stopped{where}: {stopped}")
        for note in notes:
            console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
        measured = sum(case.failed is None and case.shape is not None for case in record.cases)
        console.print(
            f"{measured} of {len(self.specs)} cases measured, kept in {escape(str(options.out))}",
            soft_wrap=True,
        )
        if stopped or any(case.failed is not None for case in record.cases):
            return _WRONG if self.wrong and not stopped else _INCOMPLETE
        return _INCOMPLETE if self.problems else 0

    def _peer_blocks(self) -> list[PeerBlock]:
        blocks, asked = [], {peer.name for peer in self.peers}
        for peer in self.known:
            absent = None if is_installed(peer) else "not installed"
            if absent is None and peer.name not in asked:
                absent = "not asked for"
            blocks.append(PeerBlock(name=peer.title, version=version_of(peer), failed=absent))
        return blocks

    @property
    def _torch(self) -> bool:
        return any("torch" in peer.modules for peer in self.peers)

    def _compile(self, bench: Bench) -> None:
        """Compile and load the kernels of all cases at once, on all processors."""
        signatures = []
        for spec in self.specs:
            with contextlib.suppress(ArgumentMismatch):  # the case itself will say so
                operator = operator_of(spec, bench.device, kernel=self.options.kernel)
                signatures += [launch.signature for launch in operator._step.launches]
        with contextlib.suppress(CompileError):  # likewise
            load_kernels(bench.device, signatures, CubinCache() if self.cache is None else self.cache)

    def _measure(self, bench: Bench, guard: Guard, recorder: Recorder, progress: Progress) -> None:
        progress.begin("compile")
        self._compile(bench)
        progress.line("kernels compiled")
        progress.begin("ceilings")
        dtypes = dict.fromkeys(spec.dtype for spec in self.specs)
        ceilings = measure_ceilings(bench, dtypes, show=progress.show)
        recorder.ceilings((*ceilings.all, *(torch_matmul(bench, dtype) for dtype in dtypes if self._torch)))
        for one in recorder.record.ceilings:
            progress.line(ceiling_line(one))
        progress.begin("clock")
        check = check_clock(bench, ceilings.value("read"), ceilings.read_shape)
        recorder.add(check.case)
        self.problems += check.problems
        for line in case_lines(recorder.record, check.case):
            progress.line(line)
        method = Method(
            kernel=self.options.kernel,
            peers=self.peers,
            delay=self.options.delay,
            launch_us=ceilings.value("launch"),
            cycles_per_us=cycles_per_us(bench) if self.options.delay else 0.0,
            balance=ceilings.value("matmul") / ceilings.value("read"),
            cache=self.cache,
        )
        self._rounds(bench, method, guard, recorder, progress)

    def _rounds(
        self, bench: Bench, method: Method, guard: Guard, recorder: Recorder, progress: Progress
    ) -> None:
        """Measure every case once a round; peers in the first, and nothing again that failed."""
        pool, found = Pool(bench), dict[str, Measured]()
        for number in range(self.options.rounds):
            self.round = number + 1
            if number:
                progress.line(f"round {self.round} of {self.options.rounds}")
            for spec in sorted(self.specs, key=lambda spec: spec.layers > 1):
                if number and spec.id not in found:
                    continue
                guard.between()
                progress.begin(spec.label)
                self._case(spec, bench, pool, method, found, recorder, progress)
                progress.done()
                case = recorder.record.case(spec.id)
                if case is not None and (number == 0 or case.failed):
                    for line in case_lines(recorder.record, case):
                        progress.line(line)
            method = replace(method, peers=())

    def _case(
        self,
        spec: CaseSpec,
        bench: Bench,
        pool: Pool,
        method: Method,
        found: dict[str, Measured],
        recorder: Recorder,
        progress: Progress,
    ) -> None:
        kind = StackRun if spec.layers > 1 else CaseRun
        try:
            measured = kind(bench, pool, method, progress.show).measure(spec, found.get(spec.id))
        except WrongOutput as error:
            self.wrong = True
            reason = str(error)
        except (DoesNotFit, ArgumentMismatch, CompileError) as error:
            reason = " ".join(str(error).split())
        except DriverError as error:
            if "OUT_OF_MEMORY" not in str(error.got):
                recorder.add(failed_case(spec, str(error)))
                raise MeasurementError(
                    "GPU", str(error), "the driver's context is lost; run again"
                ) from error
            pool.drop()
            reason = f"out of device memory: {error}"
        else:
            found[spec.id] = measured
            recorder.add(measured.case)
            return
        found.pop(spec.id, None)
        recorder.add(failed_case(spec, reason))

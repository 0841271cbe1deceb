"""A case made ready: its operator prepared, its memory counted, and what the record says of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paged_cuda import CubinCache, PagedAttention

from paged_bench.measure.bench import Bench
from paged_bench.measure.inputs import Footprint, Pool
from paged_bench.measure.peers import Peer
from paged_bench.measure.step import operator_of, variants_of
from paged_bench.measure.suite import CaseSpec
from paged_bench.record import Case, Correctness, Memory, PeerRow, Samples


class DoesNotFit(Exception):  # noqa: N818 - an outcome, named for what happened
    """A case that the GPU's free memory does not hold.

    Attributes:
        needed: Bytes that it takes.
        free: Bytes that there are.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"needs {_sized(self.needed)} of device memory, {_sized(self.free)} are free"


def _sized(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Method:
    """How cases are measured.

    Attributes:
        kernel: The path that the operator must take, or `auto`.
        peers: Other implementations.
        delay: Share of a step's time that a spinning kernel adds, to try what a comparison sees.
        launch_us: What one kernel more costs in a graph.
        cycles_per_us: Clock cycles of that kernel a microsecond.
        balance: Operations a byte at which multiplying takes as long as reading; 0 if not known.
        rest: Seconds that the GPU rests before a series that draws much power.
        cache: Where the operator keeps its cubins.
    """

    kernel: str = "auto"
    peers: Sequence[Peer] = ()
    delay: float = 0.0
    launch_us: float = 0.0
    cycles_per_us: float = 0.0
    balance: float = 0.0
    rest: float = 0.1
    cache: CubinCache | None = None

    def heavy(self, spec: CaseSpec) -> bool:
        """Return whether a case multiplies enough for the power limit to lower the clocks."""
        return self.balance > 0 and spec.work.operations > self.balance / 2 * spec.work.bytes


@dataclass(frozen=True)
class Measured:
    """What a round of a case gave.

    Attributes:
        case: For the record.
        digest: Of the output that was checked.
    """

    case: Case
    digest: tuple[int, int]


class Runner:
    """What measuring needs, whatever the case is.

    Args:
        bench: The instruments.
        pool: Memory for pages.
        method: How.
        show: Told what is being done.
    """

    def __init__(
        self, bench: Bench, pool: Pool, method: Method, show: Callable[[str], None] = lambda text: None
    ) -> None:
        self._bench = bench
        self._pool = pool
        self._method = method
        self._show = show


@dataclass(frozen=True)
class Subject:
    """A case that can run.

    Attributes:
        spec: The case.
        operator: Prepared.
        footprint: Its memory.
        used_before: Device memory in use before it, the pool of pages left out.
    """

    spec: CaseSpec
    operator: PagedAttention
    footprint: Footprint
    used_before: int

    @classmethod
    def prepared(cls, bench: Bench, pool: Pool, spec: CaseSpec, method: Method) -> Subject:
        """Prepare the operator of `spec`.

        Raises:
            DoesNotFit: The memory is too small.
            ArgumentMismatch: The kernel asked for refuses the case.
            CompileError: A kernel does not compile.
            DriverError: The driver fails.
        """
        footprint = Footprint.of(spec)
        operator = operator_of(spec, bench.device, kernel=method.kernel, cache=method.cache)
        needed = footprint.nbytes + operator.workspace_bytes + bench.margin
        free = bench.free() + pool.nbytes
        if needed > free:
            raise DoesNotFit(needed, free)
        used_before = bench.used() - pool.nbytes
        return cls(spec, operator.prepare(), footprint, max(0, used_before))

    def case(
        self,
        bench: Bench,
        correctness: Correctness | None,
        series: tuple[Samples, ...],
        allocations: int,
        peers: tuple[PeerRow, ...] = (),
    ) -> Case:
        """Return what the record says."""
        spec, operator, footprint = self.spec, self.operator, self.footprint
        repeated = {"layers": spec.layers} if spec.layers > 1 else {"sets": footprint.sets}
        return Case(
            id=spec.id,
            title=spec.label,
            group=spec.group,
            shape=spec.shape,
            parameters={**repeated, "path": operator.explain().path, **spec.parameters},
            work=spec.work,
            correctness=correctness,
            series=series,
            variants=variants_of(operator),
            memory=Memory(
                workspace_bytes=operator.workspace_bytes,
                cache_bytes=footprint.cache,
                input_bytes=footprint.inputs,
                output_bytes=footprint.outputs,
                device_used_before=self.used_before,
                device_used_after=bench.used(),
                run_allocations=allocations,
            ),
            peers=peers,
        )

"""The operator of a case, whole and in parts.

A step is append, schedule, attend and combine. Peers are timed on attention alone, with the division of
work made before, so the parts must be launched apart. The operator does not offer that to its users: it is
right only for lengths that the schedule was made for. This is the one place that reaches into it.
"""

from __future__ import annotations

from paged_cuda import Bounds, CubinCache, Device, PagedAttention
from paged_cuda.operands import Operands
from paged_schema import Call, PagedAttentionAttributes, PagedAttentionInputs, TensorSpec, check

from paged_bench.measure.bench import Launch
from paged_bench.measure.inputs import InputSet
from paged_bench.measure.suite import CaseSpec
from paged_bench.record import Variant

SCALE = 192**-0.5  # of the head size before absorption, in the models that the cases are taken from


def attributes_of(
    spec: CaseSpec, *, heads: int | None = None, rotary: bool = True
) -> PagedAttentionAttributes:
    """Return the node's attributes; `heads` and `rotary` for a check of fewer heads or of rotated queries."""
    rotated = rotary and spec.rotary_dim > 0
    return PagedAttentionAttributes(
        num_heads=heads or spec.heads,
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=spec.v_head_size,
        scale=SCALE,
        do_rotary=int(rotated),
        rotary_offset=spec.head_size - spec.rotary_dim if rotated else 0,
    )


def call_of(spec: CaseSpec) -> Call:
    """Return the checked call, batch and tokens left open."""

    def floats(*shape: int | str) -> TensorSpec:
        return TensorSpec(spec.dtype, shape)

    def integers(*shape: int | str) -> TensorSpec:
        return TensorSpec("int32", shape)

    table = floats("positions", spec.rotary_dim // 2) if spec.rotary_dim else None
    inputs = PagedAttentionInputs(
        query=floats("tokens", spec.heads * spec.head_size),
        key=floats("tokens", spec.head_size),
        key_cache=floats("blocks", spec.block_size, 1, spec.head_size),
        cumulative_sequence_length=integers("starts"),
        past_seqlens=integers("batch"),
        block_table=integers("batch", "columns"),
        slot_mapping=integers("tokens"),
        cos_cache=table,
        sin_cache=table,
    )
    return check(attributes_of(spec), inputs, ort="1.31")


def operator_of(
    spec: CaseSpec, device: Device, *, kernel: str = "auto", cache: CubinCache | None = None
) -> PagedAttention:
    """Return the operator of a case with bounds that the case just fills; not prepared.

    Raises:
        ArgumentMismatch: The kernel asked for by name refuses the case.
    """
    bounds = Bounds(spec.batch, spec.tokens, max(spec.context_lens))
    return PagedAttention(
        call_of(spec),
        bounds,
        device=device,
        kernel=kernel,
        row_tile=spec.row_tile,
        split_rows=spec.split_rows,
        weight_terms=spec.weight_terms,
        cache=cache,
    )


def run_step(
    operator: PagedAttention, inputs: InputSet, stream: int, *, reuse_schedule: bool = False
) -> None:
    """Run the operator over a set, as its users do."""
    arrays = inputs.arrays
    operator.run(
        query=arrays["query"],
        key=arrays["key"],
        key_cache=arrays["key_cache"],
        cumulative_sequence_length=arrays["cumulative_sequence_length"],
        past_seqlens=arrays["past_seqlens"],
        block_table=arrays["block_table"],
        slot_mapping=arrays["slot_mapping"],
        cos_cache=arrays.get("cos_cache"),
        sin_cache=arrays.get("sin_cache"),
        output=arrays["output"],
        reuse_schedule=reuse_schedule,
        stream=stream,
    )


class StepParts:
    """Launches of a prepared operator over given sets.

    Args:
        operator: Prepared, and run once over any of the sets.
    """

    def __init__(self, operator: PagedAttention) -> None:
        self._operator = operator
        pairs = list(zip(operator._step.launches, operator._launchers, strict=True))
        self._append = pairs[0][1]
        self._schedule = [launch for spec, launch in pairs[1:] if spec.schedule]
        self._attend = [launch for spec, launch in pairs[1:] if not spec.schedule]
        self._layer = operator._settled_launchers

    @property
    def has_schedule(self) -> bool:
        """Whether the path divides its work in a kernel of its own."""
        return bool(self._schedule)

    def append(self, inputs: InputSet) -> Launch:
        """Return a launch of rotary and cache write alone."""
        return self._launch(inputs, [self._append], settled=True)

    def schedule(self, inputs: InputSet) -> Launch:
        """Return a launch of the division of work alone."""
        return self._launch(inputs, self._schedule, settled=False)

    def opening(self, inputs: InputSet) -> Launch:
        """Return a launch of append and schedule, which run beside each other."""
        return self._launch(inputs, [self._append, *self._schedule], settled=False)

    def attend(self, inputs: InputSet) -> Launch:
        """Return a launch of attend and combine on the schedule of the last run."""
        return self._launch(inputs, self._attend, settled=True)

    def layer(self, inputs: InputSet) -> Launch:
        """Return a launch of what every layer after a step's first one needs: all but the schedule."""
        return self._launch(inputs, self._layer, settled=True)

    def step(self, inputs: InputSet) -> Launch:
        """Return the operator's own `run`, host checks included."""
        operator = self._operator

        def launch(stream: int) -> None:
            run_step(operator, inputs, stream)

        return launch

    def _launch(self, inputs: InputSet, launchers: list[Launch], *, settled: bool) -> Launch:
        operator = self._operator
        operands = Operands._make(inputs.arrays.get(name) for name in Operands._fields)

        def launch(stream: int) -> None:
            operator._set_addresses(operands)
            operator._serials = []  # its own next run must set the addresses again
            operator._params.schedule_settled = settled
            for one in launchers:
                one(stream)

        return launch


def variants_of(operator: PagedAttention) -> tuple[Variant, ...]:
    """Return what ran, as the operator explains it."""
    told = operator.explain()
    described = f"{told.path}: {told.reason}" + (f"; {told.tiles}" if told.tiles else "")
    main = next(spec for spec in operator._step.attend.launches if not spec.schedule)
    found = []
    for spec, kernel in zip(operator._step.launches, told.kernels, strict=True):
        used = kernel.resources
        found.append(
            Variant(
                kernel=spec.signature.source,
                symbol=kernel.symbol,
                description=described if spec is main else None,
                arch=told.architecture,
                registers=used.registers if used else None,
                spill_bytes=used.spill_stores + used.spill_loads if used else None,
                static_shared_bytes=used.shared_bytes if used else None,
                dynamic_shared_bytes=kernel.shared_bytes,
                threads=kernel.block[0],
            )
        )
    return tuple(found)

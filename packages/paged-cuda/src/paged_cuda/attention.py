"""The operator: prepared once for a call and bounds, then launched.

`prepare` compiles, loads and allocates. `run` checks its arrays on the host and launches; it allocates
nothing on the device, waits for nothing and reads nothing back. One operator serves one thread at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paged_cuda import graph
from paged_cuda._driver import Launcher
from paged_cuda.addresses import Reach, check_addresses
from paged_cuda.arrays import DeviceArray
from paged_cuda.bounds import Bounds, check_metadata
from paged_cuda.cubin_cache import CubinCache
from paged_cuda.device import DeviceLike, resolve_device
from paged_cuda.device_plan import DeviceIndexPlan
from paged_cuda.errors import ArgumentMismatch, NotPrepared
from paged_cuda.explain import Explanation, explain_step
from paged_cuda.launch_plan import LaunchSpec, PathOptions
from paged_cuda.loader import LoadedKernel, load_kernels
from paged_cuda.operands import OperandCheck, Operands, StepGeometry, geometry_of, operands_of
from paged_cuda.params import frozen_params
from paged_cuda.paths import choose_path
from paged_cuda.stream import StreamLike, stream_handle
from paged_cuda.tensor_maps import MapEncoder
from paged_cuda.violations import ViolationCounter, Violations
from paged_cuda.workspace import Workspace

if TYPE_CHECKING:
    from paged_schema import Call

# In place of an array's serial number, which is positive: no array, or another library's, which may change.
_ABSENT, _FOREIGN = 0, -1

# Memory that a capture of somebody else refers to. Nobody tells us when that graph ends, so it stays.
_immortal: list[object] = []
_numbers = itertools.count()


class PagedAttention:
    """ONNX Runtime's `com.microsoft::PagedAttention` with the LATENT layout, on one GPU.

    Args:
        call: From `paged_schema.check`. Head sizes and rotary width must be known.
        bounds: The largest batch.
        device: A GPU, its ordinal, or None for the current one.
        kernel: `auto`, or the name of a path: `sm90` or `sm80` (tensor cores) or `baseline`.
        row_tile: Packed query rows of a block of the tensor-core kernel: 16, 32, 48 or 64; by default chosen.
        split_rows: Split every sequence at multiples of this many keys, so that its output has the same bits
            in any batch; by default the step is split evenly over the GPU.
        weight_terms: 2 multiplies the values with float32-like softmax weights, as ONNX Runtime does; 1
            rounds the weights to the element type first, as FlashAttention does, which is faster where the
            tensor cores are the limit. By default `sm80` takes two, and `sm90` two for rows with at most
            992 keys (960 with tiles of 64) and one beyond, where the roundings of many keys average out. The
            baseline does not round.
        workspace: Scratch memory shared with other operators of the same stream; by default its own.
        cache: Where cubins are kept; by default the user's cache folder.
        debug: Use kernels that count violations only the device can see; read them with `violations`.

    Raises:
        NotImplementedMode: The call uses a mode that has no kernel here.
        ArgumentMismatch: The call leaves a size open that the kernels need, or exceeds the bounds.
        NoDriver: There is no usable driver or GPU.
    """

    def __init__(
        self,
        call: Call,
        bounds: Bounds,
        *,
        device: DeviceLike = None,
        kernel: str = "auto",
        row_tile: int | None = None,
        split_rows: int = 0,
        weight_terms: int | None = None,
        workspace: Workspace | None = None,
        cache: CubinCache | None = None,
        debug: bool = False,
    ) -> None:
        # Imported late: a caller with a call has the schema already, the others need not wait for pydantic.
        from paged_schema import Capability, require

        require(call, Capability.paged_cuda())
        self._params = frozen_params(call)
        bounds.admit(call)
        self.call = call
        self.bounds = bounds
        self.device = resolve_device(device)
        self._step = choose_path(
            call,
            bounds,
            self.device.properties,
            kernel=kernel,
            options=PathOptions(row_tile, split_rows, weight_terms, debug),
        )
        self._cache = CubinCache() if cache is None else cache
        self._workspace = workspace
        self._debug = debug
        self._check = OperandCheck(call, bounds, self.device.ordinal)
        self._geometry: tuple[StepGeometry, bool] | None = None
        self._reach = Reach(0, 0, 0, 0)
        # The very arrays of the last run, without keeping them: nothing is left to check or to set for them.
        self._serials: list[int] = []
        self._kernels: list[LoadedKernel] = []
        self._launchers: list[Launcher] = []
        self._settled_launchers: list[Launcher] = []  # without the schedule
        plan = next((spec.maps for spec in self._step.launches if spec.maps), None)
        self._maps = None if plan is None else MapEncoder(plan)
        self._maps_stale = False
        self._number = next(_numbers)
        self._violations: ViolationCounter | None = None
        # Whether memory of ours could be freed under a graph that somebody else captured.
        self._loose = debug or self.workspace_bytes > 0

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that every step inside the bounds needs, in bytes."""
        return self._step.attend.workspace.nbytes

    def prepare(self) -> PagedAttention:
        """Compile, load and allocate everything that `run` needs; return self. Calling it again does nothing.

        Raises:
            CompileError: A kernel does not compile.
            DriverError: The driver refuses machine code or memory.
            ArgumentMismatch: The shared workspace is too small or on another GPU.
        """
        if self._launchers:
            return self
        if self._workspace is None:
            self._workspace = Workspace(self.device, self.workspace_bytes)
        self._workspace.admit(self.workspace_bytes, self.device)
        for name, offset, _ in self._step.attend.workspace.regions:
            setattr(self._params, name, self._workspace.pointer + offset)
        for name, value in self._step.attend.constants.items():
            setattr(self._params, name, value)
        self._kernels = load_kernels(
            self.device, [spec.signature for spec in self._step.launches], self._cache
        )
        if self._debug:
            self._violations = ViolationCounter(self.device)
            self._params.violations = self._violations.pointer
        steps = list(zip(self._step.launches, self._kernels, strict=True))
        self._launchers = [self._launcher(spec, kernel) for spec, kernel in steps]
        # With the schedule at hand, nothing but that and the index tensors is read before append has waited
        # for the kernel before it; so it may start beside that one. The run that made the schedule began with
        # an ordinary launch, behind which the index tensors are complete.
        append, kernel = steps[0]
        self._settled_launchers = [
            self._launcher(replace(append, programmatic=True), kernel),
            *(
                launch
                for (spec, _), launch in zip(steps[1:], self._launchers[1:], strict=True)
                if not spec.schedule
            ),
        ]
        return self

    def _launcher(self, spec: LaunchSpec, kernel: LoadedKernel) -> Launcher:
        # Kernels are shared by the whole process, so the limit is the largest there is and never lowered
        # again.
        limit = self.device.properties.shared_bytes - kernel.compiled.resources.shared_bytes
        with self.device as device:
            device.driver.allow_shared(kernel.function, limit)
        return device.driver.launcher(
            kernel.function,
            spec.grid,
            spec.block,
            spec.shared_bytes,
            (self._params, self._maps.maps) if spec.maps and self._maps else (self._params,),
            programmatic=spec.programmatic,
        )

    def run(
        self,
        *,
        query: object,
        key: object,
        key_cache: object,
        cumulative_sequence_length: object = None,
        past_seqlens: object = None,
        block_table: object = None,
        slot_mapping: object = None,
        cos_cache: object = None,
        sin_cache: object = None,
        attention_metadata: Sequence[int] | None = None,
        plan: DeviceIndexPlan | None = None,
        output: object,
        key_cache_out: object = None,
        lse: object = None,
        reuse_schedule: bool = False,
        stream: StreamLike,
    ) -> None:
        """Write the new rows into the cache and attend, in `stream`.

        T is the call's element type; strides may be wider than rows where the last dimension is dense.

        Args:
            query: (tokens, num_heads * head_size) T.
            key: (tokens, head_size) T, before rotary.
            key_cache: (num_blocks, block_size, 1, head_size) T, updated in place.
            cumulative_sequence_length: (batch + 1) int32; rows from its last value on get zero output.
            past_seqlens: (batch) int32, without the new tokens.
            block_table: (batch, max_blocks) int32; entries outside the cache are masked.
            slot_mapping: (tokens) int32 if the call has it; negative or out of range is not written.
            cos_cache: (rotary_rows, rotary_dim / 2) T if the call rotates.
            sin_cache: As cos_cache.
            attention_metadata: Two or three host integers; they bound lengths and change nothing here.
            plan: Instead of the index tensors.
            output: (tokens, num_heads * v_head_size) T, every row written.
            key_cache_out: The buffer of key_cache, or None.
            lse: (tokens, num_heads) float32: natural log-sum-exp, -inf for rows without a key; or None.
            reuse_schedule: Keep the division of work that the last run of this operator without it made; the
                lengths are not read again. Right only if that run was earlier in the same stream and the
                lengths are the same, as from layer to layer of one step. The index tensors must have been
                written before that run, as they are read early; and a kernel launched since that starts
                before its predecessor ends (programmatic dependent launch) must wait for it before it ends.
            stream: Where to launch.

        Raises:
            NotPrepared: `prepare` has not been called.
            ArgumentMismatch: An array does not fit. Nothing was launched.
        """
        if not self._launchers:
            names = ", ".join(spec.signature.symbol for spec in self._step.launches)
            raise NotPrepared("cold", names, "run before prepare", "op.prepare() first, outside any capture")
        if plan is not None:
            if not (cumulative_sequence_length is past_seqlens is block_table is slot_mapping is None):
                raise ArgumentMismatch(
                    "plan", "plan", "index tensors beside it", "either plan= or the index tensors"
                )
            cumulative_sequence_length, past_seqlens, slot_mapping, block_table = plan.arrays
            if not self.call.has_slot_mapping:
                slot_mapping = None
        if attention_metadata is not None:
            check_metadata(attention_metadata)
        arrays = (
            query,
            key,
            key_cache,
            cumulative_sequence_length,
            past_seqlens,
            block_table,
            slot_mapping,
            cos_cache,
            sin_cache,
            output,
            key_cache_out,
            lse,
        )
        serials = [a.serial if type(a) is DeviceArray else _ABSENT if a is None else _FOREIGN for a in arrays]
        serials.append(plan is not None)
        if serials != self._serials:
            self._serials = []
            own = _FOREIGN not in serials
            if own and _ABSENT not in serials[:6] and output is not None:
                operands = Operands._make(arrays)
            else:
                operands = operands_of(arrays)
            self._admit(operands, padded=plan is not None)
            self._set_addresses(operands)
            arrays = operands
            if own:
                self._serials = serials
        self._launch(arrays, stream_handle(stream), reuse_schedule)

    def _admit(self, operands: Operands, *, padded: bool) -> None:
        geometry = (geometry_of(operands), padded)
        if geometry != self._geometry:
            self._geometry = None
            given, wanted = operands.slot_mapping is not None, self.call.has_slot_mapping
            if given != wanted:
                got, expected = ("an array", "none") if given else ("nothing", "an array")
                raise ArgumentMismatch(
                    "presence", "slot_mapping", got, f"{expected}, as the call was checked with"
                )
            self._reach = self._check.admit(operands, self._params, padded=padded)
            self._geometry = geometry
        check_addresses(operands, self._reach)

    def _set_addresses(self, operands: Operands) -> None:
        params, rotary = self._params, self.call.rotary
        params.query = operands.query.pointer
        params.key = operands.key.pointer
        params.key_cache = operands.key_cache.pointer
        params.cumulative_sequence_length = operands.cumulative_sequence_length.pointer
        params.past_seqlens = operands.past_seqlens.pointer
        params.block_table = operands.block_table.pointer
        params.slot_mapping = 0 if operands.slot_mapping is None else operands.slot_mapping.pointer
        params.cos_cache = operands.cos_cache.pointer if rotary and operands.cos_cache else 0
        params.sin_cache = operands.sin_cache.pointer if rotary and operands.sin_cache else 0
        params.output = operands.output.pointer
        params.lse = 0 if operands.lse is None else operands.lse.pointer
        self._maps_stale = self._maps is not None

    def _launch(self, arrays: tuple[object, ...], stream: int, reuse_schedule: bool) -> None:
        if self._params.tokens == 0:
            return
        device = self.device
        driver = device.driver
        others = driver.enter_context(device.context)
        try:
            if not graph.retain(self, arrays) and self._loose and driver.is_capturing(stream):
                _immortal.append((self._workspace, self._violations))
                self._loose = False
            if self._maps_stale and self._maps is not None:
                self._maps.update(driver, self._params)
                self._maps_stale = False
            made = self._scheduled_for(reuse_schedule)
            self._params.schedule_settled = reuse_schedule
            for launch in self._settled_launchers if reuse_schedule else self._launchers:
                launch(stream)
            if self._workspace is not None:
                self._workspace.schedule = made
        finally:
            if others:
                driver.pop_context()

    def _scheduled_for(self, reuse: bool) -> tuple[int, ...]:
        """Return what the workspace's schedule is for after this run; until then it is nobody's.

        Raises:
            ArgumentMismatch: It is to be reused, and is another operator's or one for other extents.
        """
        params, workspace = self._params, self._workspace
        made = (self._number, params.tokens, params.batch, params.max_blocks, params.block_shift)
        if workspace is None:
            return made
        if reuse and workspace.schedule != made and len(self._settled_launchers) < len(self._launchers):
            raise ArgumentMismatch(
                "schedule",
                "reuse_schedule",
                "a workspace without this operator's schedule for these extents",
                "an earlier run of this operator with the same extents, and none of another one since",
            )
        workspace.schedule = None
        return made

    def explain(
        self, context_lens: Sequence[int] | None = None, query_lens: Sequence[int] | None = None
    ) -> Explanation:
        """Return what was chosen and why, and with a batch its lower bound in bytes and time.

        Args:
            context_lens: Keys of each sequence, the new ones included.
            query_lens: New tokens of each sequence; one each by default.
        """
        return explain_step(
            self._step,
            self.call,
            self.device.properties,
            [kernel.compiled.resources for kernel in self._kernels],
            None if context_lens is None else (context_lens, query_lens),
        )

    def violations(self, stream: StreamLike) -> Violations:
        """Wait for `stream` and return what the debug kernels counted since the last reset.

        Raises:
            NotPrepared: The operator is not a prepared debug operator.
        """
        return self._debug_counter().read(stream_handle(stream))

    def reset_violations(self, stream: StreamLike) -> None:
        """Forget what was counted, and wait for that.

        Raises:
            NotPrepared: The operator is not a prepared debug operator.
        """
        self._debug_counter().reset(stream_handle(stream))

    def _debug_counter(self) -> ViolationCounter:
        if self._violations is None:
            raise NotPrepared(
                "debug", "violations", "no debug kernels", "PagedAttention(..., debug=True).prepare()"
            )
        return self._violations

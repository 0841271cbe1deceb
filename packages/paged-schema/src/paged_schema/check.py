"""Decide as ORT decides: run the rules in ORT's order, raise the first that fails, resolve the rest.

`check` takes models and answers with a `Call`; it allocates nothing else and reads no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from paged_schema import rules
from paged_schema.attributes import PagedAttentionAttributes
from paged_schema.call import Call, resolve
from paged_schema.capability import Capability, require
from paged_schema.dtypes import UNDEFINED
from paged_schema.errors import InvalidArgument, NotImplementedMode, Stage
from paged_schema.facts import ORT_VERSIONS as ORT_VERSIONS
from paged_schema.facts import Facts, RunValues, Target, minor_of, unknown
from paged_schema.inputs import PagedAttentionInputs, PagedAttentionOutputs, TensorSpec
from paged_schema.models import TypedModel
from paged_schema.rules.registry import STAGES
from paged_schema.strict import check_values

if TYPE_CHECKING:
    from paged_schema.step_values import AnyArray

PROVIDERS: Final = ("cuda", "webgpu", "cpu", "paged-cuda")
EXTENSIONS: Final = frozenset({"float32"})
SESSION: Final[tuple[Stage, ...]] = ("load", "build")
RUN: Final[tuple[Stage, ...]] = ("run", "select")
SELECT: Final[tuple[Stage, ...]] = ("select",)
MAX_SM: Final = 999
NO_EXTENSIONS: Final[frozenset[str]] = frozenset()
M = TypeVar("M", bound=TypedModel)


def check(
    attributes: PagedAttentionAttributes | Mapping[str, Any],
    inputs: PagedAttentionInputs | Mapping[str, Any],
    *,
    outputs: PagedAttentionOutputs | Mapping[str, Any] | None = None,
    declared: PagedAttentionInputs | Mapping[str, Any] | None = None,
    ort: str = "1.31",
    provider: str = "cuda",
    extensions: Iterable[str] = NO_EXTENSIONS,
    sm: int = 80,
    values: RunValues | None = None,
    strict: Mapping[str, AnyArray | None] | None = None,
) -> Call:
    """Check one node and resolve it.

    Args:
        attributes: The node's attributes, or a mapping of them.
        inputs: Types and shapes of its inputs, or a mapping of them.
        outputs: The declared outputs; None checks a node with the one required output.
        declared: What the model file declares, where that says less than `inputs`: the load and build rules
            judge it, the later ones judge `inputs`, as ORT does with a symbolic model.
        ort: ORT version, `1.29` to `1.32`; a patch number is ignored.
        provider: `cuda` or `webgpu` for ORT's kernels, `cpu` (which has none), `paged-cuda` for our own op.
        extensions: What to admit beyond ORT. `float32` admits float32 queries and caches.
        sm: Compute capability as major * 10 + minor, for the rules that depend on it.
        values: Host values, for the rules that read them.
        strict: NumPy arrays by schema name; their values are checked beyond what ORT checks.

    Returns:
        The checked call.

    Raises:
        InvalidArgument: The first rule that ORT would refuse the node by.
        NotImplementedMode: The node is valid and the provider has no kernel for it.

    >>> attributes = PagedAttentionAttributes(num_heads=4, kv_num_heads=2)
    >>> inputs = PagedAttentionInputs(
    ...     query="fp16[tokens, 256]", key="fp16[tokens, 128]", value="fp16[tokens, 128]",
    ...     key_cache="fp16[blocks, 16, 2, 64]", value_cache="fp16[blocks, 16, 2, 64]",
    ...     cumulative_sequence_length="i32[bounds]", past_seqlens="i32[batch]",
    ...     block_table="i32[batch, columns]")
    >>> call = check(attributes, inputs)
    >>> call.mode, call.head_size, call.group_size, call.scale
    ('separate', 64, 2, 0.125)
    """
    target = target_of(ort, provider, extensions, sm)
    attributes = _model(PagedAttentionAttributes, attributes)
    inputs = _model(PagedAttentionInputs, inputs)
    if values is not None and not isinstance(values, RunValues):
        raise unknown("values", values, "a RunValues")
    slots = _one_output() if outputs is None else _model(PagedAttentionOutputs, outputs).slots()
    facts = Facts(target, attributes, inputs.slots(), slots, values=values)
    stages = STAGES
    if declared is not None:
        run_rules(Facts(target, attributes, _model(PagedAttentionInputs, declared).slots(), slots), SESSION)
        stages = RUN
    call = decide(facts, inputs, outputs_given=outputs is not None, stages=stages)
    if strict is not None:
        check_values(call, strict)
    return call


def decide(
    facts: Facts, inputs: PagedAttentionInputs, *, outputs_given: bool, stages: tuple[Stage, ...] = STAGES
) -> Call:
    """Return the call of a node that passes those stages and that the provider implements."""
    # WebGPU's kernel says what it lacks before it asks anything that is not about shapes.
    late = SELECT if facts.target.provider == "webgpu" else ()
    run_rules(facts, tuple(stage for stage in stages if stage not in late))
    call = require_provider(resolve(facts, inputs, f"1.{facts.target.minor}", outputs_given))
    if late:
        run_rules(facts, late)
    return call


def _model(kind: type[M], given: M | Mapping[str, Any]) -> M:
    return given if isinstance(given, kind) else kind.model_validate(given)


def require_provider(call: Call) -> Call:
    """Return the call if the provider's one backend implements all of it."""
    if call.provider == "webgpu":
        require(call, Capability.webgpu_separate(call.ort))
    elif call.provider == "paged-cuda":
        require(call, Capability.paged_cuda())
    return call


def run_rules(facts: Facts, stages: tuple[Stage, ...] = STAGES) -> None:
    """Raise the error of the first rule of those stages that does not hold."""
    for step in rules.steps_for(facts.target.minor, facts.target.provider, stages):
        fault = step.test(facts)
        if fault is not None:
            _raise(step, fault)


def _raise(step: rules.Step, fault: rules.Fault) -> NoReturn:
    rule = next((rule for rule in step.rules if rule.id == fault.rule), step.rules[0])
    given = (rule.stage, rule.id, fault.subject, fault.got, fault.expected, rule.status)
    if rule.status == "NOT_IMPLEMENTED":
        raise NotImplementedMode(*given, modes=(f"{fault.subject}: {fault.got}",))
    raise InvalidArgument(*given)


@cache
def _one_output() -> tuple[TensorSpec, ...]:
    return (TensorSpec(UNDEFINED),)


def target_of(ort: str, provider: str, extensions: Iterable[str], sm: int) -> Target:
    """Return whose contract decides, or raise A03."""
    for name, given, kind in (("ort", ort, str), ("provider", provider, str), ("sm", sm, int)):
        if not isinstance(given, kind) or isinstance(given, bool):
            raise unknown(name, given, f"a value of type {kind.__name__}")
    return _target(ort, provider, _extensions(extensions), sm)


def _extensions(given: object) -> frozenset[str]:
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise unknown("extensions", given, "a set of names: float32 or nothing")
    return frozenset(map(str, names))


@lru_cache(maxsize=64)
def _target(ort: str, provider: str, extensions: frozenset[str], sm: int) -> Target:
    minor = minor_of(ort)
    if provider not in PROVIDERS:
        raise unknown("provider", provider, f"one of {', '.join(PROVIDERS)}")
    if not extensions <= EXTENSIONS:
        raise unknown("extensions", sorted(extensions - EXTENSIONS), "float32 or nothing")
    if not 0 < sm <= MAX_SM:
        raise unknown("sm", sm, f"major * 10 + minor, 1 to {MAX_SM}")
    return Target(minor, provider, extensions, sm)

"""A node as a model file declares it, before anything about it is known to be right.

Attributes may be missing, foreign or of the wrong kind, and any number of slots may be listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_schema.attributes import KINDS, PagedAttentionAttributes
from paged_schema.call import Call
from paged_schema.check import NO_EXTENSIONS, decide, target_of
from paged_schema.facts import Facts, RunValues
from paged_schema.inputs import (
    INPUT_NAMES,
    OUTPUT_NAMES,
    PagedAttentionInputs,
    PagedAttentionOutputs,
    TensorSpec,
)

AttributeValue = int | float | str | None


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute of a node.

    Attributes:
        name: Its name.
        kind: Its ONNX kind: `INT`, `FLOAT`, `STRING` or another.
        value: Its value, where the kind is one of those three.
    """

    name: str
    kind: str
    value: AttributeValue = None


@dataclass(frozen=True, slots=True)
class Declaration:
    """A node's attributes and slots, in the order in which it lists them.

    Attributes:
        attributes: As listed.
        inputs: One entry a slot; None is an empty name.
        outputs: One entry a slot; None is an empty name.
    """

    attributes: tuple[Attribute, ...]
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]

    @classmethod
    def of(
        cls,
        attributes: PagedAttentionAttributes,
        inputs: PagedAttentionInputs,
        outputs: PagedAttentionOutputs | None = None,
    ) -> Declaration:
        """Declare a node from the models: attributes that were set, slots up to the last one in use."""
        listed = [name for name in KINDS if name in attributes.model_fields_set]
        values = {name: getattr(attributes, name) for name in listed}
        slots = list(inputs.slots())
        while len(slots) > 8 and slots[-1] is None:
            slots.pop()
        return cls(
            tuple(Attribute(name, KINDS[name], value) for name, value in values.items() if value is not None),
            tuple(slots),
            (outputs or PagedAttentionOutputs()).slots(),
        )


def check_declaration(
    declaration: Declaration,
    *,
    ort: str = "1.31",
    provider: str = "cuda",
    extensions: Iterable[str] = NO_EXTENSIONS,
    sm: int = 80,
    values: RunValues | None = None,
) -> Call:
    """Check a node as a file declares it; the arguments and errors are those of `check`."""
    target = target_of(ort, provider, extensions, sm)
    kinds = tuple((attribute.name, attribute.kind) for attribute in declaration.attributes)
    slots = declaration.inputs + (None,) * (len(INPUT_NAMES) - len(declaration.inputs))
    facts = Facts(
        target,
        _attributes(declaration),
        slots,
        declaration.outputs,
        kinds=kinds,
        input_slots=len(declaration.inputs),
        values=values,
    )
    # Slots beyond the schema's are there only for the rule that refuses them.
    inputs = PagedAttentionInputs(**dict(zip(INPUT_NAMES, slots, strict=False)))
    return decide(facts, inputs, outputs_given=True)


def _attributes(declaration: Declaration) -> PagedAttentionAttributes:
    # The rules refuse a foreign, missing or wrongly typed attribute before they read any value.
    usable: dict[str, AttributeValue] = {"num_heads": 0, "kv_num_heads": 0}
    for attribute in declaration.attributes:
        if KINDS.get(attribute.name) == attribute.kind:
            usable[attribute.name] = attribute.value
    return PagedAttentionAttributes.model_validate(usable)


def output_names(count: int) -> tuple[str, ...]:
    """Return names for a number of output slots, those of the schema first."""
    return OUTPUT_NAMES[:count] + tuple(f"output_{index}" for index in range(len(OUTPUT_NAMES), count))

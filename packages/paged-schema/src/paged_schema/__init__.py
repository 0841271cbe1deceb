"""The contract of ONNX Runtime's com.microsoft::PagedAttention as typed models, rules and an audit.

Nothing here sees an array: attributes and shapes go in, a frozen `Call` or a typed error comes out.
"""

from paged_schema.attributes import PagedAttentionAttributes
from paged_schema.backends import BackendVerdict
from paged_schema.backends import explain_call as explain
from paged_schema.call import Call
from paged_schema.capability import Capability, require
from paged_schema.check import ORT_VERSIONS, PROVIDERS, check
from paged_schema.errors import InvalidArgument, NotImplementedMode, PagedSchemaError
from paged_schema.facts import RunValues
from paged_schema.inputs import (
    INPUT_NAMES,
    OUTPUT_NAMES,
    PagedAttentionInputs,
    PagedAttentionOutputs,
    TensorSpec,
)

__all__ = [
    "INPUT_NAMES",
    "ORT_VERSIONS",
    "OUTPUT_NAMES",
    "PROVIDERS",
    "BackendVerdict",
    "Call",
    "Capability",
    "InvalidArgument",
    "NotImplementedMode",
    "PagedAttentionAttributes",
    "PagedAttentionInputs",
    "PagedAttentionOutputs",
    "PagedSchemaError",
    "RunValues",
    "TensorSpec",
    "check",
    "explain",
    "require",
]

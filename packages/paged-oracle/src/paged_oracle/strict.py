"""What ONNX Runtime does not check and leaves undefined, refused.

Invariant: this layer only ever refuses more than ONNX Runtime does. It reads values and never changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from paged_schema import InvalidArgument
from paged_schema.strict import check_values

from paged_oracle.dtypes import Array
from paged_oracle.errors import UndefinedInputError
from paged_oracle.resolve import BoundCall


def require_defined(bound: BoundCall) -> None:
    """Raise `UndefinedInputError` for the first value that has no defined meaning.

    The rules are S01 to S11 of `paged_schema.strict`, then ``cache-overlap``: no other input shares memory
    with a cache.
    """
    call = bound.call
    if call.rotary:
        call = replace(call, rotary_rows=bound.rotary_rows)
    try:
        check_values(call, bound.arrays)
    except InvalidArgument as error:
        raise UndefinedInputError(error.rule, error.subject, str(error.got), error.expected) from None
    _require_own_memory(bound.arrays)


def _require_own_memory(arrays: Mapping[str, Array]) -> None:
    for cache in [name for name in ("key_cache", "value_cache") if name in arrays]:
        for name, array in arrays.items():
            if name != cache and np.shares_memory(array, arrays[cache]):
                got = f"memory shared with {cache}"
                raise UndefinedInputError("cache-overlap", name, got, "memory of its own")

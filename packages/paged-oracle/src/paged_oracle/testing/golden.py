"""Reading golden files: inputs and outputs of the real operator, one call a file.

Invariant: arrays come back in their own element type, and every load gives fresh, writable copies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paged_schema import PagedAttentionAttributes

from paged_oracle.dtypes import BFLOAT16, FLOAT8, Array

_CACHES = ("key_cache", "value_cache")


@dataclass(frozen=True, eq=False)
class Golden:
    """One recorded call.

    Attributes:
        name: the file's name without its suffix.
        attributes: the node's attributes.
        inputs: arrays by schema name, the caches as they were before the call.
        output: (tokens, num_heads * v_head_size) in T.
        caches: the caches as they were after the call, by input name.
    """

    name: str
    attributes: PagedAttentionAttributes
    inputs: dict[str, Array]
    output: Array
    caches: dict[str, Array]


def load_golden(path: Path) -> Golden:
    """Read one ``.npz`` file.

    Args:
        path: the file.
    """
    with np.load(path, allow_pickle=False) as archive:
        raw = {name: archive[name] for name in archive.files}
    meta = json.loads(raw.pop("meta_json").tobytes())
    inputs = {
        n: _typed(n, array, meta["cache_dtype"]) for n, array in raw.items() if not n.startswith("out.")
    }
    caches = {name: _after(inputs[name], raw, name) for name in _CACHES if name in inputs}
    attributes = PagedAttentionAttributes(**meta["attributes"])
    return Golden(path.stem, attributes, inputs, _typed("output", raw["out.output"], ""), caches)


def _typed(name: str, array: Array, cache_dtype: str) -> Array:
    if array.dtype == np.uint16:
        return array.view(BFLOAT16)
    if name in _CACHES and array.dtype == np.uint8 and cache_dtype.startswith(("fp8", "float8")):
        return array.view(FLOAT8)
    return array


def _after(before: Array, raw: dict[str, Array], name: str) -> Array:
    after = before.copy()
    slots = raw[f"out.{name}.changed_slots"]
    rows = raw[f"out.{name}.changed_rows"].view(before.dtype)
    block_size = before.shape[1]
    after[slots // block_size, slots % block_size] = rows.reshape(len(slots), *before.shape[2:])
    return after

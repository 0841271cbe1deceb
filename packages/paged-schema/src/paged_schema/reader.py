"""Read an ONNX file without its weights: what an audit needs, in bounded memory.

The file is mapped, not loaded. Its outer messages are walked on the wire, tensor data is left out, and only
the rest goes to protobuf, up to a fixed size. External data files are never opened.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paged_schema.errors import UnreadableModel

if TYPE_CHECKING:
    from onnx import ModelProto

MAX_KEPT: Final = 48 * 2**20
MAX_FIELDS: Final = 2_000_000
MAX_DEPTH: Final = 24
UNCOUNTED: Final = 4 * 2**20
"""Bytes of small messages that are kept unseen: enough for most graphs, and too few to hold a bomb."""
SMALL: Final = 2048
"""A message below this size holds no data worth leaving out."""

# Field numbers of onnx.proto. Values are messages to walk, or DROP; what is not listed is copied.
DROP: Final = "drop"
SCHEMA: Final[dict[str, dict[int, str]]] = {
    "model": {7: "graph", 14: DROP, 20: DROP, 25: "function", 26: DROP},
    "graph": {
        1: "node",
        5: "tensor",
        10: DROP,
        11: "info",
        12: "info",
        13: "info",
        14: DROP,
        15: DROP,
        16: DROP,
    },
    "function": {7: "node", 8: DROP, 11: "attribute", 12: "info", 14: DROP},
    "node": {5: "attribute", 6: DROP, 9: DROP, 10: DROP},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"}
    | dict.fromkeys((13, 14, 15, 22, 23), DROP),
    "tensor": dict.fromkeys((3, 4, 5, 6, 7, 9, 10, 11, 12, 13), DROP),
    "info": {2: "type", 3: DROP, 4: DROP},
    "type": {1: "tensor type"} | dict.fromkeys((4, 5, 7, 8, 9), DROP),
    "tensor type": {2: "shape"},
    "shape": {1: "dimension"},
    "dimension": {},
}


def read_model(path: Path) -> ModelProto:
    """Read the structure of a model.

    Args:
        path: An ONNX file of any size.

    Returns:
        The model with names, types, dimensions, nodes and functions, and without tensor data.

    Raises:
        UnreadableModel: The file cannot be opened, is no ONNX model, or its structure is too large.
        ImportError: The extra `paged-schema[onnx]` is not installed.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
    from onnx import ModelProto

    try:
        kept = _stripped(path)
    except OSError as error:
        raise _unreadable(path, error.strerror or "unreadable", "a file that can be read") from None
    model = ModelProto()
    try:
        model.ParseFromString(kept)
    except (DecodeError, RecursionError, ValueError):
        raise _unreadable(path, "bytes that are no ONNX model", "a complete ONNX file") from None
    if not model.HasField("graph"):
        raise _unreadable(path, "no graph", "an ONNX model with a graph")
    return model


def _stripped(path: Path) -> bytes:
    if path.is_fifo():
        # Opening it would wait for a writer.
        raise _unreadable(path, "a pipe", "a file")
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise _unreadable(path, "an empty file", "an ONNX model")
        # Not closed by hand: an error's traceback may still hold slices of it, and the last one frees it.
        return _Walk(path).strip(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


class _Walk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields = 0
        self.uncounted = 0
        self.kept = 0

    def strip(self, view: memoryview) -> bytes:
        out = bytearray()
        self._message(view, "model", out, 0)
        return bytes(out)

    def _message(self, view: memoryview, kind: str, out: bytearray, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _unreadable(self.path, f"messages nested more than {MAX_DEPTH} deep", "an ONNX model")
        plan = SCHEMA[kind]
        for number, start, body, end in self._fields(view):
            inner = plan.get(number)
            if inner == DROP:
                continue
            if inner is None or body < 0 or (end - body < SMALL and self._uncounted(end - start)):
                self._keep(view[start:end], out)
                continue
            part = bytearray()
            with view[body:end] as content:
                self._message(content, inner, part, depth + 1)
            self._keep(_tag(number, len(part)), out)
            out += part

    def _uncounted(self, size: int) -> bool:
        self.uncounted += size
        return self.uncounted <= UNCOUNTED

    def _fields(self, view: memoryview) -> Iterator[tuple[int, int, int, int]]:
        """Yield number, start, start of the content (-1 for a scalar) and end of each field."""
        position, size = 0, len(view)
        while position < size:
            self.fields += 1
            if self.fields > MAX_FIELDS:
                raise _unreadable(self.path, f"more than {MAX_FIELDS} fields", "a model with fewer nodes")
            start = position
            key, position = self._varint(view, position)
            number, wire = key >> 3, key & 7
            body = -1
            if wire == 0:
                _, position = self._varint(view, position)
            elif wire == 2:
                length, body = self._varint(view, position)
                position = body + length
            elif wire in (1, 5):
                position += 8 if wire == 1 else 4
            else:
                raise self._broken()
            if position > size or number == 0:
                raise self._broken()
            yield number, start, body, position

    def _varint(self, view: memoryview, position: int) -> tuple[int, int]:
        value = shift = 0
        while shift < 70 and position < len(view):
            byte = view[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position
            shift += 7
        raise self._broken()

    def _keep(self, part: memoryview | bytes, out: bytearray) -> None:
        self.kept += len(part)
        if self.kept > MAX_KEPT:
            got = f"more than {MAX_KEPT >> 20} MiB besides tensor data"
            raise _unreadable(self.path, got, "a model with a smaller graph")
        out += part

    def _broken(self) -> UnreadableModel:
        return _unreadable(self.path, "a broken or truncated protobuf", "a complete ONNX file")


def _tag(number: int, length: int) -> bytes:
    out = bytearray()
    for value in (number << 3 | 2, length):
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return bytes(out)


def _unreadable(path: Path, got: str, expected: str) -> UnreadableModel:
    return UnreadableModel("load", "F01", str(path), got, expected, "FAIL")

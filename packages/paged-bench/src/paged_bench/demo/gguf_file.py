"""A GGUF file as typed keys and float32 tensors; whatever it cannot read is named.

The `gguf` package does the reading and the dequantising. This module turns its failures (index
errors on a truncated file, unknown type codes, surprising shapes) into `ModelFileError`, and keeps
count of the tensors that were asked for, so that a caller can refuse a file holding more than it uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paged_bench.errors import ModelFileError

Scalar = TypeVar("Scalar", str, int, float, bool)

_ADVICE = "give another file with --model"
_BROKEN = "the file looks truncated or damaged: fetch it again"


class _Reader(gguf.GGUFReader):
    """The package's reader, except that reading past the end fails at once.

    The base class returns a short array there, and then walks on through a declared length that the
    file cannot hold.
    """

    def _get(
        self, offset: int, dtype: DTypeLike, count: int = 1, *args: object, **kwargs: object
    ) -> NDArray[np.generic]:
        wanted, left = int(count) * np.dtype(dtype).itemsize, len(self.data) - int(offset)
        if wanted > left:
            raise EOFError(f"{wanted} bytes are wanted at byte {int(offset)}, {max(left, 0)} are left")
        # Whatever follows `count` is the byte order, which goes through unseen.
        got: NDArray[np.generic] = super()._get(offset, dtype, count, *args, **kwargs)  # type: ignore[arg-type]
        return got


class GgufFile:
    """Typed access to the keys and tensors of one GGUF file.

    Args:
        path: The file.

    Raises:
        ModelFileError: The file is not there, is not GGUF, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._used: set[str] = set()

    def has_key(self, key: str) -> bool:
        """Whether the file holds the metadata key."""
        return key in self._reader.fields

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return name in self._tensors

    def key(self, key: str, kind: type[Scalar], default: Scalar | None = None) -> Scalar:
        """The value of a scalar key.

        Args:
            key: The key's full name.
            kind: The Python type it must have; an int is taken where a float is wanted.
            default: Returned when the key is absent; None makes the key required.

        Raises:
            ModelFileError: The key is absent without a default, or of another type.
        """
        if not self.has_key(key):
            if default is None:
                raise ModelFileError(f"key {key!r}", f"missing in {self.path.name}", _ADVICE)
            return default
        value = self._contents(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            shown = f"a list of {len(value)}" if isinstance(value, list) else f"{value!r}"
            raise ModelFileError(f"key {key!r}", f"is {shown}, one {kind.__name__} is required", _ADVICE)
        return value

    def strings(self, key: str) -> list[str]:
        """The value of a key that must be an array of strings."""
        return self._array(key, str)

    def integers(self, key: str) -> list[int]:
        """The value of a key that must be an array of integers."""
        return self._array(key, int)

    def floats(self, key: str) -> list[float]:
        """The value of a key that must be an array of floats."""
        return self._array(key, float)

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A tensor dequantised to float32, in NumPy's order of axes (outermost first).

        Raises:
            ModelFileError: The tensor is absent, of another shape, of a type that `gguf` does not
                dequantise, or holds a value that is not finite.
        """
        if name not in self._tensors:
            raise ModelFileError(f"tensor {name!r}", f"missing in {self.path.name}", _ADVICE)
        tensor = self._tensors[name]
        found = tuple(int(n) for n in reversed(tensor.shape.tolist()))
        if found != shape:
            raise ModelFileError(
                f"tensor {name!r}", f"has shape {found}, the file's own keys require {shape}", _ADVICE
            )
        self._used.add(name)
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelFileError(
                f"tensor {name!r}", f"its type {tensor.tensor_type.name} cannot be dequantised", _ADVICE
            ) from error
        values = np.asarray(values, dtype=np.float32)
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {name!r}", "holds values that are not finite", _BROKEN)
        return values

    def refuse_unused(self, harmless: Iterable[str] = ()) -> None:
        """Refuse the file if it holds a tensor that nobody asked for, as the model would be incomplete."""
        extra = sorted(set(self._tensors) - self._used - set(harmless))
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise ModelFileError(
                f"tensor {extra[0]!r}", f"has no place in a plain llama model{more}", _ADVICE
            )

    def _array(self, key: str, kind: type[Scalar]) -> list[Scalar]:
        if not self.has_key(key):
            raise ModelFileError(f"key {key!r}", f"missing in {self.path.name}", _ADVICE)
        values = self._contents(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ModelFileError(f"key {key!r}", f"an array of {kind.__name__} is required", _ADVICE)
        return values

    def _contents(self, key: str) -> object:
        try:
            value: object = self._reader.fields[key].contents()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"key {key!r}", "is not valid UTF-8", _BROKEN) from error
        return value


def _open(path: Path) -> gguf.GGUFReader:
    subject = f"model file {path}"
    if path.is_fifo():
        raise ModelFileError(subject, "is a pipe, and a model is read from several places at once", _ADVICE)
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelFileError(subject, error.strerror or str(error), _ADVICE) from error
    if magic != b"GGUF":
        raise ModelFileError(subject, "is not a GGUF file (its first four bytes are not 'GGUF')", _ADVICE)
    try:
        return _Reader(path)
    except (EOFError, IndexError, KeyError, OverflowError, ValueError, MemoryError) as error:
        raise ModelFileError(subject, f"cannot be read: {_one_line(error)}", _BROKEN) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

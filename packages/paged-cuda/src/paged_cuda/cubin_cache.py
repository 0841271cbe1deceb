"""Compiled kernels on disk, safe for many processes at once.

An entry is two files: `<symbol>.<arch>.<key>.cubin`, then `.json` with its SHA-256. Each appears by an
atomic rename, the JSON last, so a reader sees a whole entry or none. A damaged entry is a miss. A folder
that cannot be written costs one warning and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from paged_cuda.cache_folder import default_folder
from paged_cuda.errors import CacheWarning, CompileError
from paged_cuda.resources import Resources


@dataclass(slots=True)
class CubinCache:
    """A folder of cubins.

    Attributes:
        folder: Where entries lie; made when the first one is stored.
        required: Whether a folder that cannot take an entry is an error and not a warning.
    """

    folder: Path = field(default_factory=default_folder)
    required: bool = False
    _warned: bool = field(default=False, repr=False)

    def load(self, name: str) -> tuple[bytes, Resources] | None:
        """Return the entry `name` if it is there and whole."""
        try:
            record = json.loads(self._path(name, "json").read_bytes())
            cubin = self._path(name, "cubin").read_bytes()
            if hashlib.sha256(cubin).hexdigest() != record["sha256"]:
                return None
            return cubin, Resources.from_dict(record["resources"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def store(self, name: str, cubin: bytes, resources: Resources) -> bool:
        """Keep an entry; return False, with one warning a cache, where the folder cannot take it.

        Raises:
            CompileError: The folder cannot take it, and this cache is `required`.
        """
        record = {"sha256": hashlib.sha256(cubin).hexdigest(), "resources": resources.to_dict()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._replace(self._path(name, "cubin"), cubin)
            self._replace(self._path(name, "json"), json.dumps(record, sort_keys=True).encode())
        except OSError as error:
            if self.required:
                wanted = "a writable folder with free space; name another one"
                raise CompileError("cache", str(self.folder), error.strerror or error, wanted) from error
            self._warn(error)
            return False
        return True

    def _path(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"

    def _replace(self, path: Path, content: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        message = (
            f"cannot keep compiled kernels in {self.folder} ({error.strerror or error}); they are compiled "
            "again in each process. Free some space or set PAGED_CUDA_CACHE_DIR to a writable folder."
        )
        warnings.warn(message, CacheWarning, stacklevel=3)

"""Where compiled kernels are kept. Standard library only, as the doctor asks too."""

from __future__ import annotations

import os
from pathlib import Path


def default_folder() -> Path:
    """Return PAGED_CUDA_CACHE_DIR, or `paged-cuda` in the user's cache folder.

    A process of a user without a home has no such folder. It gets one that cannot be made, so that the cache
    says so once; a shared folder would let others plant machine code.
    """
    chosen = os.environ.get("PAGED_CUDA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "paged-cuda"
    try:
        return Path.home() / ".cache" / "paged-cuda"
    except RuntimeError:
        return Path(os.devnull) / "paged-cuda"

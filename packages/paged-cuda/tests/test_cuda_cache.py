import errno
import json
import os
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from paged_cuda import CacheWarning, CompileError, CubinCache
from paged_cuda.cache_folder import default_folder
from paged_cuda.compiler import compile_kernel
from paged_cuda.resources import Resources
from paged_cuda.signature import KernelSignature

SIGNATURE = KernelSignature("append", "float16")
RESOURCES = Resources(40, 0, 0, 0, 0, 0)


def test_second_compile_comes_from_the_disk(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "new" / "folder")
    first = compile_kernel(SIGNATURE, "sm_80", cache)
    second = compile_kernel(SIGNATURE, "sm_80", CubinCache(cache.folder))
    assert (first.cached, second.cached) == (False, True)
    assert (first.cubin, first.resources) == (second.cubin, second.resources)
    assert not list(cache.folder.glob(".*"))


def test_entries_tell_architectures_and_signatures_apart(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    compile_kernel(SIGNATURE, "sm_80", cache)
    assert not compile_kernel(SIGNATURE, "sm_86", cache).cached
    assert not compile_kernel(KernelSignature("append", "bfloat16"), "sm_80", cache).cached
    assert len(list(tmp_path.glob("append_f16.sm_80.*.cubin"))) == 1


@pytest.mark.parametrize(
    "damage",
    ["cut", "flip", "empty", "no record", "bad record", "foreign record", "deep record", "words", "no cubin"],
)
def test_a_damaged_entry_is_rebuilt(damage: str, tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    good = compile_kernel(SIGNATURE, "sm_80", cache)
    (cubin,), (record,) = tmp_path.glob("*.cubin"), tmp_path.glob("*.json")
    whole = cubin.read_bytes()
    if damage == "cut":
        cubin.write_bytes(whole[: len(whole) // 2])
    elif damage == "flip":
        cubin.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    elif damage == "empty":
        cubin.write_bytes(b"")
    elif damage == "no record":
        record.unlink()
    elif damage == "bad record":
        record.write_bytes(b'{"sha256": "')
    elif damage == "foreign record":
        record.write_bytes(b'["a list"]')
    elif damage == "deep record":
        record.write_bytes(b"[" * 100_000)
    elif damage == "words":
        kept = json.loads(record.read_bytes())
        kept["resources"]["registers"] = "many"
        record.write_text(json.dumps(kept))
    else:
        cubin.unlink()
    again = compile_kernel(SIGNATURE, "sm_80", cache)
    assert (again.cached, again.cubin) == (False, good.cubin)
    assert compile_kernel(SIGNATURE, "sm_80", cache).cached


def refuse_writes(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk_costs_one_warning_and_nothing_else(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writes(monkeypatch, code)
    cache = CubinCache(tmp_path)
    with pytest.warns(CacheWarning, match="PAGED_CUDA_CACHE_DIR") as seen:
        kernel = compile_kernel(SIGNATURE, "sm_80", cache)
    assert "\n" not in str(seen[0].message)
    # Warnings are errors here: a second one would raise.
    compile_kernel(KernelSignature("append", "bfloat16"), "sm_80", cache)
    assert kernel.cubin
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(CacheWarning):
        assert compile_kernel(SIGNATURE, "sm_80", CubinCache(tmp_path / "file" / "cache")).cubin


def test_a_required_folder_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writes(monkeypatch, errno.ENOSPC)
    with pytest.raises(CompileError, match="free space"):
        CubinCache(tmp_path, required=True).store("entry", b"code", RESOURCES)
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_gets_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PAGED_CUDA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(CacheWarning, match="PAGED_CUDA_CACHE_DIR"):
        assert not CubinCache().store("entry", b"code", RESOURCES)


def test_a_failed_store_leaves_the_old_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache(tmp_path)
    assert cache.store("entry", b"old", RESOURCES)
    with monkeypatch.context() as patch:
        refuse_writes(patch, errno.ENOSPC)
        with pytest.warns(CacheWarning):
            assert not cache.store("entry", b"new", RESOURCES)
    assert cache.load("entry") == (b"old", RESOURCES)


def test_many_threads_write_one_entry(tmp_path: Path) -> None:
    """A reader sees a whole entry or none, whoever writes at the same time."""
    cache = CubinCache(tmp_path)
    contents = [bytes([value]) * 5000 for value in range(4)]

    def work(index: int) -> None:
        cache.store("entry", contents[index % 4], RESOURCES)
        found = cache.load("entry")
        assert found is None or found[0] in contents

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(80)))
    assert not list(tmp_path.glob(".*"))


def test_many_processes_fill_one_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from paged_cuda.compiler import compile_kernel; from paged_cuda.cubin_cache import CubinCache\n"
        "from paged_cuda.signature import KernelSignature\n"
        "cache = CubinCache(Path(sys.argv[1]))\n"
        "for _ in range(3): k = compile_kernel(KernelSignature('append', 'float16'), 'sm_80', cache)\n"
        "assert k.cached"
    )
    workers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".cubin", ".json"]


def test_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGED_CUDA_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_folder() == tmp_path / "chosen"
    monkeypatch.delenv("PAGED_CUDA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CubinCache().folder == tmp_path / "paged-cuda"


def test_a_warm_cache_warns_of_nothing(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_kernel(SIGNATURE, "sm_80", cache)
    assert tempfile.gettempdir() != str(cache.folder)

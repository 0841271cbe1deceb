import ctypes
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
from paged_cuda import CompileError, _nvrtc
from paged_cuda._nvrtc import compile_to_cubin, nvrtc_version
from paged_cuda.compiler import architecture_of, compile_kernel, compile_kernels
from paged_cuda.params import FIELDS, AttentionParams
from paged_cuda.resources import Resources, enforce, parse_log
from paged_cuda.signature import ElementType, KernelSignature
from paged_cuda.sm90_shape import shape_for
from paged_cuda.sources import ROOT, kernel_source, sources_digest
from paged_cuda.split_shape import ROW_TILES, shapes_for
from paged_cuda.variants import ARCHITECTURES, VARIANTS, Variant, variant_of, variants_for

SOURCES = sorted(ROOT.rglob("*.cu*"))
GOOD_LOG = """ptxas info    : Function properties for k
ptxas         .     {frame} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 1024 bytes smem
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_compiles_within_its_bounds(architecture: str) -> None:
    """Those of one head size and type; `nox -s kernels` compiles every one."""
    variants = [v for v in variants_for(architecture) if not v.signature.constants or _is_sample(v.signature)]
    kernels = compile_kernels([(variant.signature, architecture) for variant in variants])
    assert [kernel.signature for kernel in kernels] == [variant.signature for variant in variants]
    for variant, kernel in zip(variants, kernels, strict=True):
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.signature.symbol.encode() in kernel.cubin
        assert kernel.resources.local_bytes <= variant.max_local_bytes
        assert 0 < kernel.resources.registers <= variant.max_registers


def _is_sample(signature: KernelSignature) -> bool:
    constants = dict(signature.constants)
    return signature.dtype == "bfloat16" and (
        signature.kernel == "schedule"
        or (constants.get("HEAD_SIZE", 576), constants["V_HEAD_SIZE"]) == (576, 512)
    )


def test_architectures_cover_ampere_to_blackwell() -> None:
    assert {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} <= set(ARCHITECTURES)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_sources_include_only_our_own_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    includes = re.findall(r"^\s*#\s*include\b\s*(.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(r'"[\w./]+"', include) for include in includes)
    for include in includes:
        assert (ROOT / include.strip('"')).is_file()


def test_every_header_is_used_and_every_source_is_shipped() -> None:
    used = {include for path in SOURCES for include in re.findall(r'#include "([\w./]+)"', path.read_text())}
    headers = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.cuh")}
    assert used == headers
    assert {path.name for path in ROOT.glob("*.cu")} == {variant.signature.source for variant in VARIANTS}


def test_expanded_source_has_no_include_and_each_header_once() -> None:
    source = kernel_source("baseline_latent.cu")
    assert not re.search(r"^\s*#\s*include\b", source, re.MULTILINE)
    assert source.count("struct AttentionParams {") == 1


@pytest.mark.parametrize(
    "line", ["#include <cuda_fp16.h>", '#include "../secret.cuh"', '#include "absent.cuh"', "#include NAME"]
)
def test_foreign_includes_are_refused(line: str, tmp_path: Path) -> None:
    root = tmp_path / "kernels"
    root.mkdir()
    (tmp_path / "secret.cuh").write_text("int secret;")
    (root / "a.cu").write_text(f"int a;\n{line}\n")
    with pytest.raises(CompileError):
        kernel_source("a.cu", root)


def test_errors_point_into_the_file_that_has_them(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "b.cuh"\nint good;\n')
    (tmp_path / "b.cuh").write_text("int fine;\nnonsense here;\n")
    with pytest.raises(CompileError, match=r"b\.cuh\(2\)"):
        compile_to_cubin(kernel_source("a.cu", tmp_path), "a.cu", ["--gpu-architecture=sm_80"])
    (tmp_path / "c.cu").write_text('#include "d.cuh"\nnonsense here;\n')
    (tmp_path / "d.cuh").write_text("int fine;\n")
    with pytest.raises(CompileError, match=r"c\.cu\(2\)"):
        compile_to_cubin(kernel_source("c.cu", tmp_path), "c.cu", ["--gpu-architecture=sm_80"])


def test_the_host_struct_is_the_kernels_struct() -> None:
    """Compile the header with every offset that Python uses asserted."""
    checks = [f'static_assert(sizeof(AttentionParams) == {ctypes.sizeof(AttentionParams)}, "size");']
    for name in FIELDS:
        offset = getattr(AttentionParams, name).offset
        # __INTADDR__ and not offsetof: NVRTC 13.0 knows only the former without a header.
        field = f"__INTADDR__(&((AttentionParams*)0)->{name})"
        checks.append(f'static_assert({field} == {offset}, "{name}");')
    kernel = 'extern "C" __global__ void k(const AttentionParams p) {}'
    source = "\n".join([kernel_source("layout/params.cuh"), *checks, kernel])
    assert compile_to_cubin(source, "layout.cu", ["--gpu-architecture=sm_80", "--std=c++17"]).cubin
    declared = re.findall(
        r"^\s+(?:const |struct )?[\w]+\*? (\w+);", kernel_source("layout/params.cuh"), re.MULTILINE
    )
    assert tuple(declared) == FIELDS


@pytest.mark.parametrize("sizes", [(640, 640), (600, 600), (640, 513)])
@pytest.mark.parametrize("row_tile", ROW_TILES)
def test_the_widest_rows_compile_with_every_tile(sizes: tuple[int, int], row_tile: int) -> None:
    """They ship with no tile, but whoever asks for one gets it."""
    found = shapes_for(row_tile, *sizes, shared_bytes=232_448, shared_bytes_multiprocessor=233_472)
    signature = found[0].signature("bfloat16", *sizes)
    assert compile_kernel(signature, "sm_90a").resources.local_bytes <= variant_of(signature).max_local_bytes


def test_virtual_and_unknown_architectures_are_refused() -> None:
    signature = KernelSignature("append", "float16")
    for architecture in ("compute_80", "sm_1"):
        with pytest.raises(CompileError):
            compile_kernel(signature, architecture)
    with pytest.raises(CompileError, match="an empty cubin"):
        compile_to_cubin('extern "C" __global__ void k() {}', "k.cu", ["--gpu-architecture=compute_80"])


class LazyLibrary:
    """A binding that fills its table of functions at the first call, as cuda-bindings 13.0 does."""

    def __init__(self) -> None:
        self.loading = self.loaded = False

    def nvrtcVersion(self) -> tuple[int, int, int]:  # noqa: N802 - the binding's name
        if not self.loaded:
            if self.loading:
                raise RuntimeError('Function "nvrtcVersion" not found')
            self.loading = True
            time.sleep(0.05)
            self.loaded = True
        return 0, 13, 0


def test_threads_do_not_race_for_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    _nvrtc._load.cache_clear()
    monkeypatch.setattr(bindings, "nvrtc", LazyLibrary())
    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: nvrtc_version(), range(8))) == {(13, 0)}
    finally:
        _nvrtc._load.cache_clear()


def test_a_missing_library_is_told_once_and_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(LazyLibrary):
        def nvrtcVersion(self) -> tuple[int, int, int]:  # noqa: N802 - the binding's name
            if self.loading:
                raise RuntimeError('Function "nvrtcVersion" not found')
            self.loading = True
            raise RuntimeError("no libnvrtc.so.13:\n  looked in a folder")

    _nvrtc._load.cache_clear()
    monkeypatch.setattr(pytest.importorskip("cuda.bindings"), "nvrtc", Missing())
    jobs = [(KernelSignature("append", dtype), "sm_80") for dtype in get_args(ElementType)]
    with pytest.raises(CompileError, match="no libnvrtc") as caught:
        compile_kernels(jobs)
    assert "\n" not in str(caught.value)


def test_an_empty_log_leaves_the_bytes_of_python_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC writes into what it is given, and CPython has one object for each single byte."""
    from cuda.bindings import nvrtc

    given: list[bytes] = []
    write = nvrtc.nvrtcGetProgramLog
    monkeypatch.setattr(
        nvrtc, "nvrtcGetProgramLog", lambda program, log: [given.append(log), write(program, log)][1]
    )
    log = compile_to_cubin('extern "C" __global__ void k() {}', "k.cu", ["--gpu-architecture=sm_80"]).log
    assert log == ""
    assert given
    assert not any(log is bytes([value]) for log in given for value in range(256))
    assert list(bytes([32])) == [32]


def test_compilation_is_deterministic() -> None:
    signature = KernelSignature("append", "float16")
    assert compile_kernel(signature, "sm_80").cubin == compile_kernel(signature, "sm_80").cubin


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((12, 0), "sm_120")],
)
def test_architecture_of_a_gpu(capability: tuple[int, int], architecture: str) -> None:
    assert architecture_of(*capability) == architecture
    assert architecture in ARCHITECTURES


def test_old_gpus_are_refused() -> None:
    with pytest.raises(CompileError, match="too old"):
        architecture_of(7, 5)


def test_log_is_read() -> None:
    log = GOOD_LOG.format(frame=8, stores=4, loads=12, registers=77)
    assert parse_log(log, "k") == Resources(77, 8, 4, 12, 1024, 1)


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7512", "C7515", "C7602"])
def test_notices_that_slow_a_kernel_down_fail_the_build(code: str) -> None:
    log = GOOD_LOG.format(frame=0, stores=0, loads=0, registers=7)
    with pytest.raises(CompileError, match=code):
        parse_log(f"{log}ptxas info    : ({code}) Potential Performance Loss: serialized\n", "k")
    assert parse_log(f"{log}ptxas info    : (C7599) something else\n", "k").registers == 7


def test_an_empty_log_is_no_resources() -> None:
    with pytest.raises(CompileError, match="empty log"):
        parse_log("", "k")


def test_local_memory_beyond_the_bound_fails_the_build() -> None:
    variant = Variant(KernelSignature("append", "float16"), max_local_bytes=16, max_registers=64)
    enforce(variant, Resources(64, 16, 8, 8, 0, 0), "sm_80")
    with pytest.raises(CompileError) as caught:
        enforce(variant, Resources(64, 24, 8, 8, 0, 0), "sm_80")
    assert (caught.value.rule, caught.value.got) == ("local_bytes", 24)
    with pytest.raises(CompileError, match="registers"):
        enforce(variant, Resources(65, 0, 0, 0, 0, 0), "sm_80")


def test_symbols_are_unique_and_variants_are_found() -> None:
    symbols = [variant.signature.symbol for variant in VARIANTS]
    assert len(set(symbols)) == len(symbols)
    assert all(variant_of(variant.signature) is variant for variant in VARIANTS)
    on_demand = KernelSignature("sm80_latent", "float16", (("HEAD_SIZE", 200),))
    assert variant_of(on_demand).signature == on_demand
    assert variant_of(on_demand).max_local_bytes <= 96
    assert on_demand not in {variant.signature for variant in VARIANTS}


@pytest.mark.parametrize("sizes", [(448, 384), (576, 384)])
def test_wide_values_that_nobody_listed_compile_for_hopper(sizes: tuple[int, int]) -> None:
    """With too few registers for the outputs, 384 columns of 448 channels once were over the bound."""
    shape = shape_for(*sizes, 232_448)
    assert shape is not None
    (kernel,) = compile_kernels([(shape.signature("float16", *sizes), "sm_90a")])
    assert kernel.resources.local_bytes == 0
    assert kernel.signature not in {variant.signature for variant in VARIANTS}


def test_constants_reach_symbol_and_macros() -> None:
    signature = KernelSignature("append", "bfloat16", (("ROW_TILE", 16), ("SPLITS", 2)), debug=True)
    assert signature.symbol == "append_bf16_row_tile16_splits2_debug"
    assert signature.macros == {
        "SYMBOL": signature.symbol,
        "BF16": "1",
        "DEBUG": "1",
        "ROW_TILE": "16",
        "SPLITS": "2",
    }


def test_the_digest_sees_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_bytes(b"int a;\n")
    first = sources_digest(tmp_path)
    (tmp_path / "a.cu").write_bytes(b"int a;\r\n")
    assert sources_digest(tmp_path) == first
    (tmp_path / "a.cu").rename(tmp_path / "b.cu")
    renamed = sources_digest(tmp_path)
    (tmp_path / "b.cu").write_bytes(b"int b;\n")
    assert len({first, renamed, sources_digest(tmp_path)}) == 3

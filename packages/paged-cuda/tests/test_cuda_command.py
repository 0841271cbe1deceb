import ast
import json
import os
import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import paged_cuda
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cuda import ArgumentMismatch, Bounds, PagedCudaError, Violations, errors
from paged_cuda.__main__ import main
from paged_cuda.doctor import examine
from paged_cuda.explain import floor_bytes
from paged_cuda.violations import KINDS
from paged_cuda.workspace import ALIGNMENT, WorkspaceLayout

PACKAGE = Path(paged_cuda.__file__).parent
LEAVES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, PagedCudaError) and value is not PagedCudaError
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_errors_pickle_and_are_built_ins_too(leaf: type[PagedCudaError]) -> None:
    error = leaf("rule", "query", 3, "at most 2")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is leaf
    assert (again.rule, again.subject, again.got, again.expected) == ("rule", "query", 3, "at most 2")
    assert str(again) == "query: got 3; required: at most 2 [rule]"
    assert isinstance(error, ValueError | RuntimeError)


def test_doctor_answers_on_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"python", "packages", "driver", "devices", "nvrtc", "cache", "usable"} <= set(report)
    assert main(["doctor"]) == 0
    assert "usable:" in capsys.readouterr().out


def test_doctor_survives_probes_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such luck")

    for probe in ("_packages", "_driver", "_devices", "_nvrtc", "_cache"):
        monkeypatch.setattr(f"paged_cuda.doctor.{probe}", broken)
    report = examine()
    assert report["usable"] is False
    assert report["cache"] == "failed: OSError: no such luck"


def test_doctor_needs_the_standard_library_only() -> None:
    text = "".join((PACKAGE / name).read_text(encoding="utf-8") for name in ("doctor.py", "cache_folder.py"))
    tree = ast.parse(text.replace("from __future__ import annotations", ""))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    foreign = {name or "" for name in modules if (name or "").split(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"paged_cuda.cache_folder"}


def test_compile_fills_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_90a", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "baseline_latent_bf16" in printed
    assert len(list(tmp_path.glob("*.sm_90a.*.cubin"))) == len(list(tmp_path.glob("*.json"))) > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile"],
        ["compile", "--check"],
        ["compile", "--check", "--arch", "sm_12"],
        ["compile", "--arch", "compute_80", "--out", "x"],
        ["cook"],
        [],
        ["doctor", "--bogus"],
    ],
)
def test_bad_commands_end_with_status_2_and_no_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status: object = main(arguments)
    except SystemExit as caught:
        status = caught.code
    assert status == 2
    shown = capsys.readouterr().err
    assert shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def test_compile_into_a_folder_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["compile", "--arch", "sm_80", "--out", str(tmp_path / "file" / "kernels")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "writable" in shown.err


def test_doctor_says_how_to_get_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    assert examine()["nvrtc"] == {"libraries": [], "advice": "pip install nvidia-cuda-nvrtc"}


@pytest.mark.skipif(sys.platform == "win32", reason="no such devices")
@pytest.mark.parametrize("sink", ["full", "gone", "closed"])
def test_output_that_goes_nowhere_is_no_traceback(sink: str) -> None:
    target, closed = ("/dev/full", "") if sink == "full" else ("/dev/null", " >&-" * (sink == "closed"))
    words = [sys.executable, "-m", "paged_cuda", "doctor"]
    if sink == "gone":
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
    else:
        shell = ["/bin/sh", "-c", f'"$@" >{target}{closed}', "sh", *words]
        done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == {"full": 2, "gone": 141, "closed": 0}[sink]
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (sink == "full")


def test_importing_loads_no_cuda() -> None:
    script = "import sys, paged_cuda; print([n for n in sys.modules if n == 'cuda' or n.startswith('cuda.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_two_modules_import_cuda() -> None:
    found = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "cuda" for name in names):
                found.add(path.stem)
    assert found == {"_driver", "_nvrtc"}


@pytest.mark.parametrize("field", ["max_batch", "max_tokens", "max_context"])
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, True, "8"])
def test_bounds_are_positive_integers(field: str, value: Any) -> None:
    with pytest.raises(ArgumentMismatch) as caught:
        Bounds(**{"max_batch": 1, "max_tokens": 1, "max_context": 1, field: value})
    assert (caught.value.subject, caught.value.got) == (field, value)


@settings(deadline=None, max_examples=60)
@given(sizes=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10_000), max_size=6))
def test_workspace_regions_are_aligned_and_apart(sizes: dict[str, int]) -> None:
    layout = WorkspaceLayout.of(**sizes)
    end = 0
    for name, nbytes in sizes.items():
        offset = layout.offset(name)
        assert offset % ALIGNMENT == 0
        assert offset >= end
        end = offset + nbytes
    assert layout.nbytes >= end
    assert layout.nbytes < end + ALIGNMENT or not sizes


@given(
    token=st.integers(0, 2**28 - 1),
    kind=st.sampled_from(sorted(KINDS)),
    value=st.integers(-(2**31), 2**31 - 1),
)
def test_violations_come_back_as_the_kernel_packed_them(token: int, kind: int, value: int) -> None:
    word = token << 36 | kind << 32 | value & 0xFFFFFFFF
    assert word < 2**64
    assert Violations.decode(3, word) == Violations(3, KINDS[kind], token, value)
    assert Violations.decode(0, 2**64 - 1) == Violations(0)


def test_violation_kinds_match_the_kernels() -> None:
    text = (PACKAGE / "kernels" / "layout" / "violations.cuh").read_text(encoding="utf-8")
    for number in KINDS:
        assert f" = {number},\n" in text
    assert text.count(" = ") == len(KINDS) + 1


def test_floor_counts_each_byte_once() -> None:
    assert floor_bytes([10], [1], num_heads=2, head_size=8, v_head_size=4) == 2 * ((10 + 2) * 8 + 2 * (8 + 4))


def test_kernels_and_marker_are_in_the_package() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "kernels" / "append.cu").is_file()


def test_no_gpu_is_one_line(tmp_path: Path) -> None:
    """On a machine without a GPU the probe says so in one line; with one it succeeds."""
    script = (
        "import paged_cuda\n"
        "try: paged_cuda.require_driver()\n"
        "except paged_cuda.NoDriver as error: print(str(error).count(chr(10)), 'required' in str(error))\n"
        "else: print(0, True)"
    )
    environment = {**os.environ, "PAGED_CUDA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=60,
    )
    assert done.stdout.split() == ["0", "True"]


class DriverLibrary:
    """The few calls that the doctor makes, answered as by a machine with one GPU."""

    def __init__(self, version: int, status: int = 0) -> None:
        self.version, self.status = version, status

    def cuDriverGetVersion(self, version: Any) -> None:  # noqa: N802 - the library's name
        version._obj.value = self.version

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = 1

    def cuDeviceGet(self, device: Any, ordinal: int) -> None:  # noqa: N802
        device._obj.value = ordinal

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> None:  # noqa: N802
        name.value = b"a GPU"

    def cuDeviceTotalMem_v2(self, nbytes: Any, device: Any) -> None:  # noqa: N802
        nbytes._obj.value = 1 << 30

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> None:  # noqa: N802
        value._obj.value = {75: 9, 76: 0, 16: 132, 97: 232_448}[number]


def test_doctor_describes_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_cuda.doctor._library", lambda: DriverLibrary(13_010))
    report = examine()
    assert report["driver"] == {"found": True, "cuda": "13.1"}
    assert report["devices"] == [
        {
            "name": "a GPU",
            "capability": "9.0",
            "supported": True,
            "multiprocessors": 132,
            "shared_bytes": 232_448,
            "memory_bytes": 1 << 30,
        }
    ]
    assert report["usable"] is True


def test_doctor_says_no_to_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_cuda.doctor._library", lambda: DriverLibrary(12_080))
    report = examine()
    assert "update the driver" in str(report["driver"])
    assert report["usable"] is False


def test_doctor_says_why_the_driver_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_cuda.doctor._library", lambda: DriverLibrary(13_000, status=100))
    report = examine()
    assert "cuInit returned 100" in str(report["devices"])
    assert report["usable"] is False

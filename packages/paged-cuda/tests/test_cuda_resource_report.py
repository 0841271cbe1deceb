"""The table of registers and shared memory in the docs is of the kernels that ship."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from paged_cuda import ArgumentMismatch
from paged_cuda.__main__ import main
from paged_cuda.compiler import compile_kernels
from paged_cuda.resource_report import Row, read_report, to_markdown, write_report
from paged_cuda.signature import KernelSignature
from paged_cuda.sources import sources_digest
from paged_cuda.variants import ARCHITECTURES, VARIANTS, variant_of

RECORDED = Path(__file__).parents[3] / "docs" / "measurements" / "kernel-resources.json"


def test_the_recorded_report_is_of_these_sources() -> None:
    head, rows = read_report(RECORDED)
    redo = "run python -m paged_cuda compile --all --check --report docs/measurements/kernel-resources.json"
    assert head["sources_sha256"] == sources_digest(), redo
    assert len(rows) == sum(len(variant.architectures or ARCHITECTURES) for variant in VARIANTS), redo


def seen_to_need_local_memory(kernel: str, constants: Mapping[str, int]) -> int:
    """Return the bytes: of the tallest tile of the widest rows, and of lines of 192 columns."""
    tallest = kernel == "sm80_latent" and (constants["HEAD_SIZE"], constants["ROW_TILE"]) == (576, 64)
    ragged = kernel == "combine" and constants["V_HEAD_SIZE"] == 192
    return 16 if tallest or ragged else 0


def test_local_memory_is_admitted_where_a_compiler_was_seen_to_need_it() -> None:
    for variant in VARIANTS:
        needed = seen_to_need_local_memory(variant.signature.kernel, dict(variant.signature.constants))
        assert variant.max_local_bytes == needed, variant.signature.symbol


def test_only_what_the_variants_admit_spills() -> None:
    _, rows = read_report(RECORDED)
    for row in rows:
        words = [word.split("=") for word in row.constants.split() if "=" in word]
        told = {name: int(value) for name, value in words}
        assert row.local <= seen_to_need_local_memory(row.kernel, told), row
        assert row.local or not row.spilled, row


def test_a_report_holds_what_was_compiled(tmp_path: Path) -> None:
    kernels = compile_kernels(
        [(KernelSignature("append", kind), "sm_80") for kind in ("float16", "bfloat16")]
    )
    write_report(kernels, tmp_path / "report.json")
    head, rows = read_report(tmp_path / "report.json")
    assert head["sources_sha256"] == sources_digest()
    assert rows == [Row.of(kernel) for kernel in kernels]
    assert (
        rows[0].registers == kernels[0].resources.registers <= variant_of(kernels[0].signature).max_registers
    )


def row(architecture: str, dtype: str, registers: int, spilled: int = 0) -> Row:
    return Row("combine", dtype, "V_HEAD_SIZE=512", architecture, registers, spilled, spilled, 2048, 1)


def test_a_cell_shows_the_larger_type_and_the_spill() -> None:
    rows = [row("sm_90a", "float16", 40), row("sm_80", "float16", 50), row("sm_80", "bfloat16", 60, 8)]
    lines = to_markdown(rows).splitlines()
    assert lines[0] == "## `combine`"
    assert lines[2] == "| constants | sm_80 | sm_90a |"
    assert lines[4] == "| v_head_size=512 | 60 / 2.0 + 8 | 40 / 2.0 |"


def test_what_does_not_ship_has_an_empty_cell() -> None:
    other = Row("combine", "float16", "V_HEAD_SIZE=128", "sm_80", 30, 0, 0, 0, 1)
    lines = to_markdown([row("sm_90a", "float16", 40), other]).splitlines()
    assert lines[4:6] == ["| v_head_size=512 |  | 40 / 2.0 |", "| v_head_size=128 | 30 / 0.0 |  |"]


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"format": 2, "columns": [], "rows": []})])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentMismatch):
        read_report(path)
    assert main(["table", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

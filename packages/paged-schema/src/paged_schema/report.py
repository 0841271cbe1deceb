"""An audit's findings as a table, as JSON and as SARIF 2.1.0."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from paged_schema.audit import Finding
from paged_schema.errors import NotImplementedMode
from paged_schema.rules import all_rules

LEVELS: Final = {"rejected": "error", "not implemented": "warning", "valid": "none"}


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Align rows under a header.

    >>> print(table([["a", "1"]], ["name", "n"]))
    name  n
    a     1
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def as_table(findings: Iterable[Finding]) -> str:
    """Return one line a node: where, verdict, stage and rule, what to change."""
    rows = [
        [
            _printable(cell)
            for cell in (
                finding.node,
                finding.path,
                finding.verdict,
                *_stage_and_rule(finding),
                _advice(finding),
            )
        ]
        for finding in findings
    ]
    if not rows:
        return "no com.microsoft::PagedAttention node"
    return table(rows, ["node", "where", "verdict", "stage", "rule", "what"])


def as_json(findings: Iterable[Finding], path: Path) -> str:
    """Return `{"model": ..., "nodes": [...]}`."""
    nodes = [_record(finding) for finding in findings]
    return json.dumps({"model": str(path), "nodes": nodes}, indent=2)


def as_sarif(findings: Iterable[Finding], path: Path) -> str:
    """Return a SARIF log with one result for each node that is not valid."""
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.statement},
            "properties": {"stage": rule.stage, "versions": rule.versions, "anchor": rule.anchor},
        }
        for rule in all_rules()
    ]
    driver = {"name": "paged-schema", "rules": rules}
    results = [_result(finding, path) for finding in findings if finding.error is not None]
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(log, indent=2)


def _printable(text: str) -> str:
    # Names come from the file: a line break would break the table, an escape sequence the terminal.
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _stage_and_rule(finding: Finding) -> tuple[str, str]:
    return (finding.error.stage, finding.error.rule) if finding.error is not None else ("", "")


def _advice(finding: Finding) -> str:
    if finding.error is not None:
        return str(finding.error).partition(") ")[2]
    call = finding.call
    text = (
        ""
        if call is None
        else f"{call.mode}, {call.num_heads}/{call.kv_num_heads} heads of {call.head_size or '?'}"
    )
    return text + (f"; no type for {', '.join(finding.undeclared)}" if finding.undeclared else "")


def _record(finding: Finding) -> dict[str, object]:
    record: dict[str, object] = {"node": finding.node, "where": finding.path, "verdict": finding.verdict}
    error = finding.error
    if error is not None:
        record |= {"stage": error.stage, "rule": error.rule, "status": error.status, "subject": error.subject}
        record |= {"got": str(error.got), "required": error.expected}
    if isinstance(error, NotImplementedMode):
        record["modes"] = list(error.modes)
    record["undeclared_inputs"] = list(finding.undeclared)
    return record


def _result(finding: Finding, path: Path) -> dict[str, object]:
    error = finding.error
    assert error is not None, "only findings with an error are results"
    location = {
        "physicalLocation": {"artifactLocation": {"uri": quote(path.as_posix())}},
        "logicalLocations": [{"name": finding.node, "fullyQualifiedName": f"{finding.path}/{finding.node}"}],
    }
    return {
        "ruleId": error.rule,
        "level": LEVELS[finding.verdict],
        "message": {"text": str(error)},
        "locations": [location],
    }

"""Records as files: what is read is what was written, or it is refused with the reason.

Invariant: the digest is over the canonical text of everything else in the file, so layout and key order are
free, and a changed figure, a missing sample or a lost line is not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from pydantic import JsonValue, ValidationError

from paged_bench.errors import RecordError
from paged_bench.record.schema import SCHEMA_VERSION, History, Record

_LARGEST = 64 << 20
_NUMBER = r"-?[\d.]+(?:e[-+]?\d+)?"
# A line break never stands inside a JSON string, so this cannot touch one.
_NUMBERS = re.compile(rf"\[\n\s*((?:{_NUMBER},\n\s*)*{_NUMBER})\n\s*\]")


def content_digest(content: dict[str, JsonValue]) -> str:
    """Return the SHA-256 of the canonical JSON of `content`, its own `digest` left out."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def dump(record: Record) -> str:
    """Return the record as text: one value a line, numbers of one array on one line, the digest last."""
    content: dict[str, JsonValue] = record.model_dump(mode="json", exclude_defaults=True)
    content = {"schema_version": SCHEMA_VERSION} | content
    content["digest"] = content_digest(content)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    return _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


def save(record: Record, path: Path) -> None:
    """Write the record at once: a reader sees the old file or the new one, and never half of it.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(dump(record), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        RecordError: The file is no record, one of another schema version, truncated, or edited by hand.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)  # a device or a pipe does not say its size
    if len(data) > _LARGEST:
        raise RecordError(path.name, f"is larger than {_LARGEST >> 20} MiB", "give a record of paged-bench")
    return parse(data, path.name)


def parse(data: bytes, name: str) -> Record:
    """Read a record from bytes; `name` is what messages call it.

    Raises:
        RecordError: As `load`.
    """
    content = _object(data, name)
    version = content.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        problem = f"has schema version {version!r}, and this paged-bench reads {SCHEMA_VERSION}"
        raise RecordError(name, problem, "measure again, or read it with the release that wrote it")
    written, found = content.pop("digest", None), content_digest(content)
    if written != found:
        problem = f"its digest is {str(written)[:12]}, that of its content is {found[:12]}"
        raise RecordError(name, problem, "it was edited after it was written; take the original")
    try:
        return Record.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise RecordError(name, f"{where}: {first['msg']}", "it does not follow the schema") from error


def _object(data: bytes, name: str) -> dict[str, JsonValue]:
    try:
        content = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_without_twins,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        ended = error.pos >= len(error.doc.rstrip()) - 1 or error.msg.startswith("Unterminated")
        problem = f"ends in the middle, at line {error.lineno}" if ended else f"is no JSON: {error}"
        advice = "it is truncated; copy it again" if ended else "give a record of paged-bench"
        raise RecordError(name, problem, advice) from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RecordError(name, f"is no JSON: {error}", "give a record of paged-bench") from error
    if not isinstance(content, dict):
        raise RecordError(name, "is JSON, but no object", "give a record of paged-bench")
    return content


def _without_twins(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def marked_history(record: Record, because: str) -> Record:
    """Return the record marked as history: its figures stay citable, but as those of earlier sources.

    Raises:
        RecordError: It is marked already, or there is no reason.
    """
    if record.history is not None:
        raise RecordError("record", f"is history already: {record.history.because}", "leave it so")
    if not because.strip():
        raise RecordError("reason", "is empty", "say what changed since")
    today = datetime.now(UTC).date().isoformat()
    return record.model_copy(update={"history": History(because=because.strip(), since=today)})

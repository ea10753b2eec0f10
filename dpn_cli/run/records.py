"""The lines of metrics.jsonl and other logs. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def record_of(line: str) -> dict[str, Any] | None:
    """Return the record in a line of a log, or None for an incomplete line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete records of a log in order, and the number of damaged lines; none without a file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    records = [record_of(line) for line in text.splitlines()]
    complete = [record for record in records if record is not None]
    return complete, len(records) - len(complete)

"""The table that is printed, and the JSON that is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

COLUMNS: dict[str, tuple[str, str]] = {
    "ms": ("ms", ".2f"),
    "spread": ("spread", ".1%"),
    "ratio": ("ratio", ".2f"),
    "floor": ("floor", ".2f"),
    "error": ("error", ".1e"),
    "mib": ("MiB", ".0f"),
    "gflop": ("GFLOP", ".2f"),
    "gbyte": ("GB", ".3f"),
    "of_gemm": ("of GEMM", ".0%"),
    "of_copy": ("of copy", ".0%"),
}
"""Fields of a row that have a column, with its heading and format; others are in the JSON alone."""


def table(rows: Mapping[str, Row], columns: Mapping[str, tuple[str, str]] = COLUMNS) -> str:
    """Rows of figures as text; a row that only says why it is missing says it."""
    used = [key for key in columns if any(row.get(key) is not None for row in rows.values())]
    lines = [["", *(columns[key][0] for key in used)]]
    for name, row in rows.items():
        if "failed" in row:
            lines.append([name, row["failed"]])
            continue
        cells = ["" if row.get(k) is None else format(row[k], columns[k][1]) for k in used]
        lines.append([name, *cells])
    whole = [line for line in lines if len(line) == len(used) + 1]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    widths[0] = max(len(line[0]) for line in lines)
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = cells
    if len(cells) < len(widths):  # a reason, in place of figures
        return f"{first:<{widths[0]}}  {'; '.join(rest)}"
    shown = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
    return "  ".join([f"{first:<{widths[0]}}", *shown]).rstrip()


def with_rates(row: Row, peaks: Mapping[str, float]) -> Row:
    """The row with its shares of the machine's peaks, from its ms, gflop and gbyte."""
    seconds = row["ms"] / 1e3
    shares = {}
    if row.get("gflop"):
        shares["of_gemm"] = round(1e9 * row["gflop"] / seconds / peaks["gemm_flops"], 3)
    if row.get("gbyte"):
        shares["of_copy"] = round(1e9 * row["gbyte"] / seconds / peaks["copy_bytes"], 3)
    return row | shares


def write(path: str | Path | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, if there is a path to write it to."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")

"""The table that is printed, and the JSON that is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
FULL = "out of memory"

WAY_COLUMNS: dict[str, tuple[str, str]] = {
    "ms": ("ms", ".2f"),
    "spread": ("spread", ".1%"),
    "ratio": ("ratio", ".2f"),
    "marginal": ("marginal", ".2f"),
    "floor": ("by count", ".2f"),
    "error": ("error", ".1e"),
    "mib": ("MiB", ".0f"),
    "gflop": ("GFLOP", ".2f"),
    "gbyte": ("GB", ".3f"),
    "of_gemm": ("of GEMM", ".0%"),
    "of_copy": ("of copy", ".0%"),
}
"""Fields of a row that have a column, with its heading and format; others are in the JSON alone."""


def note(text: str) -> None:
    """Say what is being done, beside the results."""
    print(f"... {text}", file=sys.stderr, flush=True)


def table(rows: Mapping[str, Row], columns: Mapping[str, tuple[str, str]] = WAY_COLUMNS) -> str:
    """Rows of figures as text. A cell may be words; a row that only says why it is missing says it;
    a row that is `wrong` is marked."""
    used = [key for key in columns if any(row.get(key) is not None for row in rows.values())]
    lines = [["", *(columns[key][0] for key in used)]]
    failed: dict[str, str] = {}
    for name, row in rows.items():
        if "failed" in row:
            failed[name] = row["failed"]
            lines.append([name, *[""] * len(used)])
            continue
        cells = [_cell(row.get(key), columns[key][1]) for key in used]
        lines.append([f"{name} (WRONG)" if row.get("wrong") else name, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  {failed[line[0]]}" if line[0] in failed else _line(line, widths)
        for line in lines
    )


def _cell(value: Any, spec: str) -> str:
    return "" if value is None else value if isinstance(value, str) else format(value, spec)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = cells
    shown = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
    return "  ".join([f"{first:<{widths[0]}}", *shown]).rstrip()


def show(rows: Mapping[str, Row], columns: Mapping[str, tuple[str, str]] = WAY_COLUMNS) -> None:
    """Print the table at once."""
    print(table(rows, columns), flush=True)


def reason(error: BaseException) -> str:
    """Why a row has no figures, in a line."""
    if out_of_memory(error):
        return FULL
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on the device or the host."""
    said = str(error).lower()
    signs = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in said for sign in (*signs, "cublas_status_alloc_failed")
    )


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

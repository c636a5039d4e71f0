"""Tables as text."""

from collections.abc import Sequence


def right_aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of as many cells each, in columns of even width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )

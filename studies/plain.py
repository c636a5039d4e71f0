"""Markdown as a terminal shows it."""

from collections.abc import Iterator
from itertools import groupby

from stars_fast.base.tables import right_aligned


def plain(markdown: str) -> str:
    """Text with tables in even columns, without the signs of headings, bold type and code."""
    return "\n".join(_lines(markdown.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    for is_table, group in groupby(lines, key=lambda line: line.startswith("|")):
        if is_table:
            yield from _table(list(group))
        else:
            for line in group:
                yield line.lstrip("#").strip().replace("**", "").replace("`", "")


def _table(lines: list[str]) -> list[str]:
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    rows = [row for row in cells if set("".join(row)) - set("-: ")]
    width = max(len(row[0]) for row in rows)
    return right_aligned([[row[0].ljust(width), *row[1:]] for row in rows]).splitlines()

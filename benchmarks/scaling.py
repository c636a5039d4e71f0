"""`python -m benchmarks scaling`: cost and memory against length, depth, batch and width.

One size varies at a time from a base block. A way whose pass does not fit is not timed. Writes
scaling.json, scaling.md and scaling.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import growth
from benchmarks.block import way_rows
from benchmarks.blocks import Shape, build_block
from benchmarks.report import FULL, Row, reason, show, write
from benchmarks.ways import OURS
from stars_fast import ops
from stars_fast.base import machine
from stars_fast.base.optional import need
from stars_fast.base.plots import COLOURS, MARKERS

SCALED_WAYS = ("plain", "dual", "double_backward", "func_jvp")
AXES = {
    "length": "tokens of a sample",
    "layers": "layers",
    "batch": "samples",
    "width": "width of the model",
}
_CPU = (
    Shape(256, 4, 704, layers=2, batch=2, length=256),
    {
        "length": (64, 128, 256, 512, 1024, 2048),
        "layers": (1, 2, 4, 8),
        "batch": (1, 2, 4, 8),
        "width": (64, 128, 256, 512),
    },
)
_CUDA = (
    Shape(2048, 16, 5632, layers=1, batch=1, length=2048, kind="sandwich"),
    {
        "length": (256, 512, 1024, 2048, 4096, 8192, 16384),
        "layers": (1, 2, 4, 8),
        "batch": (1, 2, 4, 8),
        "width": (512, 1024, 2048, 4096),
    },
)
_SMALL = (
    Shape(64, 4, 176, layers=1, batch=1, length=32),
    {
        "length": (32, 64),
        "layers": (1, 2),
        "batch": (1, 2),
        "width": (32, 64),
    },
)

Points = dict[int, dict[str, Row]]
"""Points of an axis: value -> way -> figures."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this level alone."""
    parser.add_argument("--out", default="scaling", metavar="DIR", help="(default: scaling)")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=SCALED_WAYS,
        default=SCALED_WAYS,
        metavar="WAY",
        help=f"of {', '.join(SCALED_WAYS)}",
    )


def run(options: argparse.Namespace) -> int:
    """Measure; 1 if our way is wrong or fails.

    Raises:
        ConfigError: the backend is not here, or matplotlib.
    """
    need("matplotlib", "figures of bench scaling")
    dtype = getattr(torch, options.dtype)
    base, axes = _SMALL if options.small else _CUDA if options.device == "cuda" else _CPU
    names = ["plain", *(name for name in options.ways if name != "plain")]
    limit = growth.limit_mib(options.device, options.memory_limit)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Points] = {}
    known: dict[Shape, dict[str, Row]] = {}
    for axis, shape, value in _points(base, axes):
        if shape not in known:
            known[shape] = _point(names, shape, dtype, limit, options)
            print(f"\n{axis} {value}")
            show(known[shape])
        found.setdefault(axis, {})[value] = known[shape]
        result = {
            "machine": machine.describe(options.device),
            "dtype": options.dtype,
            "base": asdict(base),
            "memory_limit": round(limit, 1),
            "axes": found,
        }
        write(options.json or out / "scaling.json", result)
    (out / "scaling.md").write_text(markdown(found))
    figure(found, names, out / "scaling.png")
    print(f"\nwritten: {options.json or out / 'scaling.json'}, scaling.md and scaling.png in {out}")
    bad = [
        f"{name} at {shape}"
        for shape, rows in known.items()
        for name, row in rows.items()
        if name in OURS and (row.get("wrong") or row.get("failed", FULL) != FULL)
    ]
    for name in bad:
        print(f"FAILED {name}")
    return 1 if bad else 0


def _points(base: Shape, axes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Shape, int]]:
    for axis, values in axes.items():
        for value in values:
            sizes: dict[str, Any] = {axis: value}
            shape = replace(base, **sizes)
            if axis == "width":  # heads of the same width, and as wide an MLP in proportion
                heads = max(value * base.heads // base.width, 1)
                shape = replace(shape, heads=heads, d_ff=value * base.d_ff // base.width)
            yield axis, shape, value


def _point(
    names: Sequence[str],
    shape: Shape,
    dtype: torch.dtype,
    limit: float,
    options: argparse.Namespace,
) -> dict[str, Row]:
    """Time, ratio, error and memory of each way at one size."""
    memory: dict[str, float] = {}
    failed: dict[str, Row] = {}
    for name in names:
        try:
            mib = growth.way_growth(name, shape, options.device, dtype, limit, options.backend)
        except RuntimeError as error:
            failed[name] = {"failed": reason(error)}
        else:
            if mib is None:
                failed[name] = {"failed": FULL}
            else:
                memory[name] = mib
    if "plain" in failed:
        return {name: failed.get(name, {"failed": "plain failed"}) for name in names}
    block, h, u = build_block(shape, options.device, dtype)
    with ops.backend(options.backend):
        rows = way_rows(list(memory), shape, block, h, u, options.repeats)
    for name, row in rows.items():
        row["mib"] = memory[name]
    return {name: failed.get(name) or rows[name] for name in names}


def markdown(found: Mapping[str, Points]) -> str:
    """A table for each axis: milliseconds of `plain`, the ratios to it, and MiB."""
    lines: list[str] = []
    for axis, points in found.items():
        names = list(next(iter(points.values())))
        cells = [axis, "plain, ms", *names[1:], *(f"{name}, MiB" for name in names)]
        lines += ["| " + " | ".join(cells) + " |", "|---" * len(cells) + "|"]
        for value, rows in points.items():
            cells = [str(value), _cell(rows["plain"], "ms", ".2f")]
            cells += [_cell(rows[name], "ratio", ".2f") for name in names[1:]]
            cells += [_cell(rows[name], "mib", ".1f") for name in names]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: Row, key: str, spec: str) -> str:
    if "failed" in row:
        return row["failed"] if key == "mib" else ""
    return format(row[key], spec)


def figure(found: Mapping[str, Points], names: Sequence[str], path: Path) -> None:
    """Draw ratios and memory, a row of panels for each axis, as PNG; a line ends before what does
    not fit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, SymmetricalLogLocator

    picture = Figure(figsize=(9.0, 2.5 * len(found) + 0.5), dpi=150, layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(len(found), 2, squeeze=False)
    for (cost, memory), (axis, points) in zip(panels, found.items(), strict=True):
        for index, name in enumerate(names):
            style: dict[str, Any] = {
                "color": COLOURS[index], "marker": MARKERS[index], "label": name,
                "markersize": 5, "linewidth": 1.6,
            }  # fmt: skip
            for panel, key in ((cost, "ratio"), (memory, "mib")):
                line = [(x, rows[name][key]) for x, rows in points.items() if key in rows[name]]
                panel.plot([x for x, _ in line], [y for _, y in line], **style)
        cost.set_ylim(bottom=0)
        memory.set_yscale("symlog", linthresh=1)  # a pass may grow nothing
        memory.yaxis.set_major_formatter("{x:g}")
        ticks = SymmetricalLogLocator(base=10, linthresh=1, subs=(1, 2, 5))
        memory.yaxis.set_major_locator(ticks)
        for panel in (cost, memory):
            panel.set_xscale("log", base=2)
            panel.set_xticks(list(points), [f"{value:,}" for value in points])
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel(AXES[axis])
            panel.grid(True, color="#dddddd", linewidth=0.6)
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_title("time over the plain pass", loc="left", fontsize=11)
    panels[0, 1].set_title("peak memory of a pass, MiB", loc="left", fontsize=11)
    lines = panels[0, 0].get_lines()
    picture.legend(handles=lines, loc="outside lower center", ncols=len(names), frameon=False)
    picture.savefig(path, format="png")

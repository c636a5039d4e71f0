"""Pictures of an analysis: every quantity against the turns, and the paths of the states."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stars_fast.analysis.measure import Measured
from stars_fast.analysis.pca import Projection
from stars_fast.analysis.report.quantities import QUANTITIES, Quantity
from stars_fast.analysis.report.summary import REST, quartiles
from stars_fast.base.plots import (
    TrainedDepth,
    blank_figure,
    colour_of,
    line_of,
    new_figure,
    plain,
    plain_style,
    turns_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Runs = Mapping[str, Measured]
"""By label."""

WIDE = 30.0
"""Numbers whose largest is more than so many times the smallest are drawn on a logarithmic axis."""

BAR = 4.0
"""Height of the bar of the trained turns with its margin, in points."""


def quantity_picture(quantity: Quantity, runs: Runs) -> bytes:
    """PNG of one quantity against the turns: the median over the samples of a run as a line, and
    the half of them around it as a band."""
    figure, (axis,) = new_figure(1, width=7.2, height=3.3)
    _draw(axis, quantity, runs)
    if len(runs) > 1:
        _legend(figure, runs)
    return _png(figure)


def paths_picture(runs: Runs, reach: float) -> bytes:
    """PNG of the paths of the states of each run in the plane of their first two principal
    components: above all turns, below the second half of them seen from the last state, as far as
    `reach`."""
    figure = blank_figure(3.6 * len(runs) + 0.8, 6.6)
    _paths(figure, runs, reach)
    return _png(figure)


def reach_of(runs: Runs, tol: float) -> float:
    """How far from the last state, over its norm, the second half of the paths comes; at least so
    far as that of a state at rest may, with `tol` for its residual."""
    tails = [run.tail.points for run in runs.values() if run.tail is not None]
    return max([REST * tol, *(1.08 * float(np.nanmax(np.abs(t))) for t in tails)])


def overview(runs: Runs, reach: float) -> bytes:
    """PNG of everything: the quantities, and below them the paths, with `reach` as above."""
    shown = [q for q in QUANTITIES if any(q.values(run) is not None for run in runs.values())]
    columns = 2
    rows = math.ceil(len(shown) / columns)
    below = 6.6
    figure = blank_figure(max(11.0, 3.6 * len(runs) + 0.8), 2.5 * rows + below)
    parts: Any = figure.subfigures(2, 1, height_ratios=[2.5 * rows, below])
    upper, lower = parts
    axes = list(upper.subplots(rows, columns, squeeze=False).flat)
    for axis, quantity in zip(axes, shown, strict=False):
        plain_style(axis)
        _draw(axis, quantity, runs)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    if len(runs) > 1:
        _legend(upper, runs)
    _paths(lower, runs, reach)
    return _png(figure)


# -- quantities against the turns


def _draw(axis: Axes, quantity: Quantity, runs: Runs) -> None:
    seen: list[np.ndarray] = []
    last = 1
    for index, run in enumerate(runs.values()):
        found = quantity.values(run)
        if found is None:
            continue
        turns = np.array(found[0])
        bands = quartiles(found[1]).numpy()[:, turns > 0]  # turn 0 has no place on the axis
        turns = turns[turns > 0]
        if quantity.log:
            bands = np.where(bands > 0, bands, np.nan)
        last = max(last, run.trajectory.turns)
        seen.append(bands[np.isfinite(bands)])
        axis.fill_between(turns, bands[0], bands[2], color=colour_of(index), alpha=0.2, linewidth=0)
        axis.plot(
            turns,
            bands[1],
            color=colour_of(index),
            linestyle=line_of(index),
            linewidth=1.7,
            marker="o" if quantity.points else None,
            markersize=4,
        )
    turns_axis(axis, [1, last])
    axis.set_xlabel("turns")
    axis.set_ylabel(quantity.axis)
    axis.set_title(quantity.title, loc="left", fontsize=10, pad=5 + BAR * len(runs))
    if quantity.line is not None:
        axis.axhline(quantity.line, color="#888888", linewidth=0.8, zorder=1)
    _scale(axis, quantity, np.concatenate(seen) if seen else np.empty(0))
    _mark_depths(axis, [run.subject.trained for run in runs.values()])


def _scale(axis: Axes, quantity: Quantity, values: np.ndarray) -> None:
    if not len(values):
        axis.text(0.5, 0.5, "no finite number", transform=axis.transAxes, ha="center")
        return
    low, high = values.min(), values.max()
    log = quantity.log
    if log is None:
        log = low > 0 and high > WIDE * low
    if log:
        axis.set_yscale("log")
    elif quantity.key == "accuracy":
        axis.set_ylim(-0.03, 1.06)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    elif quantity.key == "cosine":
        axis.set_ylim(-1.08, 1.15)
    else:
        low, high = min(low, quantity.line or low), max(high, quantity.line or high)
        room = max(high - low, 0.02 * abs(high)) or 1.0
        axis.set_ylim(low - 0.06 * room, high + 0.14 * room)


def _mark_depths(axis: Axes, depths: Sequence[TrainedDepth]) -> None:
    """The turns of the training: a shade if all runs have the same, else a bar for each on top."""
    from matplotlib.transforms import ScaledTranslation

    left, right = axis.get_xlim()
    ends = [d if isinstance(d, tuple) else (d, d) for d in depths]
    unit, same = axis.figure.dpi_scale_trans, len(set(ends)) == 1
    for index, (low, high) in enumerate(ends):
        low, high = max(low / 1.04, left), min(high * 1.04, right)
        if low >= high:  # trained at more turns than are shown
            continue
        if same:
            axis.axvspan(low, high, color="#888888", alpha=0.15, linewidth=0, zorder=0)
            break
        above = ScaledTranslation(0, BAR * (len(ends) - index) / 72, unit)
        axis.plot(
            [low, high],
            [1, 1],
            transform=axis.get_xaxis_transform() + above,
            color=colour_of(index),
            linewidth=0.7 * BAR,
            solid_capstyle="butt",
            clip_on=False,
            scalex=False,
            scaley=False,
        )


# -- paths


def _paths(figure: Figure | SubFigure, runs: Runs, reach: float) -> None:
    """Two panels a run, above each other."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import FuncNorm, Normalize

    whole, tails = figure.subplots(2, len(runs), squeeze=False)
    turns = max(run.trajectory.turns for run in runs.values())
    early = FuncNorm((lambda t: np.log2(1 + t), lambda x: 2**x - 1), 0, turns)
    late = Normalize(turns // 2, turns)
    for (label, run), above, below in zip(runs.items(), whole, tails, strict=True):
        _panel(above, run.paths, early, 0)
        above.set_title(plain(label), fontsize=10)
        _panel(below, run.tail, late, run.trajectory.turns // 2)
        below.set_title("second half, seen from the last state", fontsize=9)
        below.set(xlim=(-reach, reach), ylim=(-reach, reach))
    ticks = [0, *(2**k for k in range(turns.bit_length()) if 2**k <= turns)]
    for row, norm, places in ((whole, early, ticks), (tails, late, None)):
        bar = figure.colorbar(
            ScalarMappable(norm, "viridis"), ax=list(row), shrink=0.85, aspect=25, pad=0.02
        )
        bar.set_label("turn", fontsize=8)
        if places:
            bar.set_ticks(places, labels=[str(t) for t in places])
        bar.ax.tick_params(labelsize=8)
        bar.minorticks_off()


def _panel(axis: Axes, found: Projection | None, norm: Any, first: int) -> None:
    plain_style(axis)
    axis.tick_params(labelsize=8)
    axis.set_box_aspect(1)
    if found is None:
        axis.text(0.5, 0.5, "no finite state", transform=axis.transAxes, ha="center")
        return
    for path in found.points:
        x, y = path[:, 0], path[:, 1]
        turns = first + np.arange(len(path))
        axis.plot(x, y, color="#999999", linewidth=0.6, alpha=0.7, zorder=2)
        axis.scatter(x, y, c=turns, norm=norm, cmap="viridis", s=9, linewidth=0, zorder=3)
        whole = np.flatnonzero(np.isfinite(x))
        if first == 0 and len(whole):
            start = whole[0]
            axis.plot(x[start], y[start], "o", mfc="white", mec="black", ms=4.5, mew=0.9, zorder=4)
        if len(whole):
            end = whole[-1]
            axis.plot(x[end], y[end], "s", color="black", ms=3.2, zorder=5)
    if first == 0:
        low, high = np.nanmin(found.points, axis=(0, 1)), np.nanmax(found.points, axis=(0, 1))
        middle, reach = (low + high) / 2, 0.54 * float((high - low).max()) or 1.0
        (x, y), ends = middle, np.array([-reach, reach])
        axis.set(xlim=x + ends, ylim=y + ends)
    x, y = (f"component {k + 1} ({part:.0%})" for k, part in enumerate(found.explained))
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)


# -- shared


def _legend(figure: Figure | SubFigure, runs: Runs) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour_of(i), ls=line_of(i)) for i in range(len(runs))]
    figure.legend(
        lines,
        [plain(label) for label in runs],
        loc="outside upper center",
        ncols=min(len(runs), 4),
        frameon=False,
        fontsize=9,
    )


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()

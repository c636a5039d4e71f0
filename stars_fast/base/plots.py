"""Figures of a run: accuracy against the number of turns, and the training curves."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stars_fast.base.optional import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart by readers with any colour vision."""
MARKERS = "osD^vP*"
LINES = ("-", "--", ":")
BESIDE = 28
"""Letters of a label for which there is room beside a figure."""

TrainedDepth = float | tuple[float, float]
"""Turns seen in training: a number, or the fewest and the most."""


def accuracy_against_turns(
    accuracy: Mapping[str, Mapping[int, float]],
    path: str | Path,
    *,
    title: str = "Exact match on unseen sums",
    ylabel: str = "sums answered exactly",
    trained_depth: TrainedDepth | Mapping[str, TrainedDepth] | None = None,
    level: Mapping[str, float] | None = None,
) -> None:
    """Draw exact match against the number of turns, one line a label, and save it as PNG.

    accuracy: {label: {turns: accuracy in [0, 1]}}. Turns are on a logarithmic axis.
    ylabel: what is counted as right.
    trained_depth: the turns of the training, a number or (fewest, most), shaded; or one of these
        for each label, drawn as a bar in the label's colour under the lines.
    level: {label: accuracy} of models without turns, drawn as level lines.

    Raises:
        ValueError: there is nothing to draw, an accuracy is outside [0, 1], or `trained_depth`
            names a label that `accuracy` lacks.
    """
    if not accuracy or not all(accuracy.values()):
        raise ValueError(f"accuracy: expected at least one point for every label, got {accuracy}")
    for label, points in accuracy.items():
        for turns, value in points.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(
                    f"accuracy: expected a value in [0, 1], got {value} for {label} at {turns}"
                )
    figure, (axis,) = new_figure(1, width=7.5, height=4.4)
    _accuracy_lines(axis, accuracy, ylabel)
    turns_axis(axis, sorted({t for points in accuracy.values() for t in points}))
    _level_lines(axis, {label: 100 * value for label, value in (level or {}).items()}, accuracy)
    axis.set_title(plain(title), loc="left", fontsize=11)
    if isinstance(trained_depth, Mapping):
        _depth_bars(axis, list(accuracy), trained_depth)
    elif trained_depth is not None:
        _depth_shade(axis, trained_depth)
    if len(accuracy) > 1 or level:
        _legend(figure, axis)
    _save(figure, path)


def accuracy_against_compute(
    points: Mapping[str, Sequence[tuple[float, float]]],
    path: str | Path,
    *,
    title: str = "Accuracy against compute",
    ylabel: str = "accuracy",
) -> None:
    """Draw accuracy against the mean number of turns that a token took, one line a label, and save
    it as PNG.

    points: {label: [(mean turns, accuracy in [0, 1]), ...]}, drawn in the order of the turns.
    ylabel: what is counted as right.

    Raises:
        ValueError: there is nothing to draw, an accuracy is outside [0, 1], or a mean number of
            turns is not positive.
    """
    if not points or not all(points.values()):
        raise ValueError(f"points: expected at least one point for every label, got {points}")
    for label, pairs in points.items():
        for turns, value in pairs:
            if not 0.0 <= value <= 1.0:
                raise ValueError(
                    f"points: accuracy: expected a value in [0, 1], got {value} for {label}"
                )
            if not turns > 0:
                raise ValueError(
                    f"points: mean turns: expected a positive number, got {turns} for {label}"
                )
    figure, (axis,) = new_figure(1, width=7.5, height=5.0)
    for index, (label, pairs) in enumerate(points.items()):
        _turns_line(axis, index, label, {turns: 100 * value for turns, value in pairs})
    percent_axis(axis, ylabel)
    turns_axis(axis, sorted({turns for pairs in points.values() for turns, _ in pairs}))
    axis.set_xlabel("mean turns of the shared block per token at test time")
    axis.set_title(plain(title), loc="left", fontsize=11)
    if len(points) > 1:
        _legend(figure, axis)
    _save(figure, path)


def _accuracy_lines(axis: "Axes", accuracy: Mapping[str, Mapping[int, float]], ylabel: str) -> None:
    for index, (label, points) in enumerate(accuracy.items()):
        percent = {turns: 100 * value for turns, value in points.items()}
        _turns_line(axis, index, label, percent)
    percent_axis(axis, ylabel)


def _level_lines(axis: "Axes", level: Mapping[str, float], beside: Mapping[str, Any]) -> None:
    """Lines of labels that have one value, in the colours after those of the labels `beside`."""
    for index, (label, value) in enumerate(level.items(), len(beside)):
        axis.axhline(
            value, label=plain(label), color=colour_of(index), linestyle=(0, (1, 1)), zorder=2
        )


def percent_axis(axis: "Axes", ylabel: str) -> None:
    """An axis from 0 to 100, in percent."""
    axis.set_ylim(0, 103)
    axis.set_yticks(range(0, 101, 20), [f"{p} %" for p in range(0, 101, 20)])
    axis.set_ylabel(ylabel)


def _turns_line(axis: "Axes", index: int, label: str, points: Mapping[Any, float]) -> None:
    """One label's line; beyond as many as there are colours the lines are dashed."""
    places = sorted(points)
    axis.plot(
        places,
        [points[t] for t in places],
        label=plain(label),
        color=colour_of(index),
        marker=MARKERS[index % len(MARKERS)],
        linestyle=line_of(index),
        markersize=5.5,
        linewidth=1.8,
        clip_on=False,
        zorder=3,
    )


def accuracy_and_radius(
    accuracy: Mapping[str, Mapping[int, float]],
    radius: Mapping[str, Mapping[int, float]],
    path: str | Path,
    *,
    title: str = "Exact match on unseen sums",
) -> None:
    """Draw exact match against the number of turns, and below it the spectral radius of the block
    at the state after so many, one line a label, and save it as PNG.

    accuracy: {label: {turns: accuracy in [0, 1]}}. radius: {label: {turns: radius}}, of the same
        labels. Turns are on a logarithmic axis.

    Raises:
        ValueError: there is nothing to draw, or the labels differ.
    """
    if not accuracy or not all(accuracy.values()):
        raise ValueError(f"accuracy: expected at least one point for every label, got {accuracy}")
    if list(radius) != list(accuracy):
        raise ValueError(f"radius: expected the labels {list(accuracy)}, got {list(radius)}")
    figure, (above, below) = new_figure(2, width=7.5, height=7.6)
    _accuracy_lines(above, accuracy, "sums answered exactly")
    for index, (label, points) in enumerate(radius.items()):
        _turns_line(below, index, label, points)
    below.axhline(1.0, color="#888888", linewidth=0.8)
    below.set_ylabel("spectral radius")
    turns_axis(below, sorted({t for points in accuracy.values() for t in points}))
    above.set_title(plain(title), loc="left", fontsize=11)
    _legend(figure, above)
    _save(figure, path)


def loss_against_turns(
    losses: Mapping[str, Mapping[int, float]],
    path: str | Path,
    *,
    title: str = "Validation loss",
    trained_depth: TrainedDepth | None = None,
    level: Mapping[str, float] | None = None,
) -> None:
    """Draw token loss against the number of turns, one line a label, and save it as PNG.

    losses: {label: {turns: loss in nats}}. Turns are on a logarithmic axis.
    trained_depth: the turns of the training, a number or (fewest, most), shaded.
    level: {label: loss} of models without turns, drawn as level lines.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not losses or not all(losses.values()):
        raise ValueError(f"losses: expected at least one point for every label, got {losses}")
    figure, (axis,) = new_figure(1, width=7.5, height=4.4)
    for index, (label, points) in enumerate(losses.items()):
        places = sorted(points)
        values = [points[t] for t in places]
        style: dict[str, Any] = {"color": colour_of(index), "marker": MARKERS[index % 7]}
        axis.plot(places, values, label=plain(label), **style)
    turns_axis(axis, sorted({t for points in losses.values() for t in points}))
    _level_lines(axis, level or {}, losses)
    axis.set_ylabel("token loss (nats)")
    axis.set_title(plain(title), loc="left", fontsize=11)
    if trained_depth is not None:
        low, high = _ends(trained_depth)
        axis.axvspan(low / 1.03, high * 1.03, color="#888888", alpha=0.15, linewidth=0, zorder=0)
    if len(losses) > 1 or level:
        _legend(figure, axis)
    _save(figure, path)


_PANELS = (
    ("loss", "token loss (nats)", "log", True),
    ("penalty", "penalty", "linear", True),
    ("grad_norm", "gradient norm", "log", True),
    ("depth", "turns", "linear", True),
    ("lr", "learning rate", "linear", False),
)
"""Panels of `training_curves`: the key of a row, its name, its scale, whether a mean is drawn."""


def training_curves(
    runs: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]],
    path: str | Path,
    *,
    title: str = "Training",
) -> None:
    """Draw token loss, penalty, gradient norm, turns and learning rate against the step, as PNG.

    A dotted line is where a run's penalty sets in, in the run's colour.

    runs: the rows of a run's metrics, or {label: rows}. A row holds `step` and any of `loss`,
        `penalty`, `grad_norm`, `depth`, `lr`; a panel is drawn if any row has its value. Missing
        and None values are left out. `lambda` is the weight of the penalty.

    Raises:
        ValueError: no row holds any of them.
    """
    by_label = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    panels = [
        panel
        for panel in _PANELS
        if any(row.get(panel[0]) is not None for rows in by_label.values() for row in rows)
    ]
    if not panels:
        known = ", ".join(key for key, *_ in _PANELS)
        raise ValueError(f"runs: expected rows with some of {known}, got none")
    figure, axes = new_figure(len(panels), width=8.0, height=1.75 * len(panels) + 0.6)
    for axis, (key, name, scale, noisy) in zip(axes, panels, strict=True):
        for index, (label, rows) in enumerate(by_label.items()):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if scale == "log":
                points = [(step, value) for step, value in points if value > 0]
            _curve(axis, points, index, label, noisy)
        axis.set_yscale(scale)
        axis.set_ylabel(name)
    for index, rows in enumerate(by_label.values()):
        _mark_penalty(axes, rows, colour_of(index), words=len(by_label) == 1)
    axes[-1].set_xlabel("optimiser step")
    axes[0].set_title(plain(title), loc="left", fontsize=11)
    axes[0].set_title("thin: as logged, thick: running mean", loc="right", fontsize=8)
    if len(by_label) > 1:
        _legend(figure, axes[0])
    _save(figure, path)


def _mark_penalty(
    axes: "Sequence[Axes]", rows: Sequence[Mapping[str, Any]], colour: str, words: bool
) -> None:
    """A line where the penalty sets in, if that is later than the start."""
    before = None
    for row in rows:
        if row.get("lambda"):
            break
        before = row["step"]
    else:
        return
    if before is None:
        return
    for axis in axes:
        axis.axvline(before, color="#555555" if words else colour, linestyle=":", linewidth=1.0)
    if words:
        place = axes[0].get_xaxis_transform()
        axes[0].text(
            before, 0.97, " penalty sets in", transform=place, fontsize=8, color="#555555", va="top"
        )


def _curve(
    axis: "Axes", points: list[tuple[int, float]], index: int, label: str, noisy: bool
) -> None:
    """Every point, and of what is noisy, faint, the mean of the neighbours within 1 % of the run
    on top."""
    import numpy as np

    if not points:
        return
    steps, values = np.array(points, dtype=float).T
    style: dict[str, Any] = {"color": colour_of(index), "linestyle": line_of(index)}
    if not noisy:
        axis.plot(steps, values, linewidth=1.4, label=plain(label), **style)
        return
    total = np.cumsum(np.insert(values, 0, 0.0))
    places, reach = np.arange(len(values)), len(values) // 100
    low, high = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    smooth = (total[high] - total[low]) / (high - low)
    axis.plot(steps, values, color=colour_of(index), alpha=0.25, linewidth=0.8)
    axis.plot(steps, smooth, linewidth=1.6, label=plain(label), **style)


def turns_axis(axis: "Axes", turns: Sequence[float]) -> None:
    """A logarithmic axis from the first to the last of `turns`, which rise."""
    from matplotlib.ticker import NullLocator

    first, last = turns[0], turns[-1]
    ticks = [2**k for k in range(int(last).bit_length()) if first <= 2**k <= last]
    room = 0.09 * math.log2(last / first)  # narrower than this, two labels touch
    ticks = [t for t in ticks if math.log2(last / t) > room] + [last]
    ticks = ticks if len(ticks) > 1 else sorted({first, last})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{t:.3g}" for t in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(first / 1.1, last * 1.1)
    axis.set_xlabel("turns of the shared block at test time")


def _depth_shade(axis: "Axes", trained: TrainedDepth) -> None:
    low, high = _ends(trained)
    axis.axvspan(low / 1.03, high * 1.03, color="#888888", alpha=0.15, linewidth=0, zorder=0)
    axis.text(low, 3, f" {_depth_text(trained)}", fontsize=9, color="#555555")


def _depth_bars(axis: "Axes", labels: list[str], trained: Mapping[str, TrainedDepth]) -> None:
    """One bar a label below 0 %, from the fewest to the most turns of its training."""
    unknown = set(trained) - set(labels)
    if unknown:
        raise ValueError(f"trained_depth must name labels of accuracy, got {sorted(unknown)}")
    axis.axhline(0, color="#888888", linewidth=0.8)
    height = 7
    for row, (label, depth) in enumerate(trained.items()):
        low, high = _ends(depth)
        limits = axis.get_xlim()  # a run may be trained deeper than it is evaluated
        left, right = max(low / 1.03, limits[0]), min(high * 1.03, limits[1])
        if left >= right:
            left, right = limits[1] / 1.03, limits[1]
        bottom = -height * (row + 1) + 1
        colour = colour_of(labels.index(label))
        axis.barh(bottom, right - left, height - 2, left, align="edge", color=colour, alpha=0.6)
        axis.text(
            right,
            bottom + 0.4,
            f" {_depth_text(depth)} ",
            fontsize=8,
            color="#444444",
            ha="left" if right < limits[1] else "right",
        )
    axis.set_ylim(-height * len(trained) - 1, 103)


def _depth_text(trained: TrainedDepth) -> str:
    low, high = _ends(trained)
    return f"trained at {low:g}" if low == high else f"trained at {low:g} to {high:g}"


def _ends(trained: TrainedDepth) -> tuple[float, float]:
    return trained if isinstance(trained, tuple) else (trained, trained)


def colour_of(index: int) -> str:
    """The colour of the label of this number."""
    return COLOURS[index % len(COLOURS)]


def line_of(index: int) -> str:
    """The style of its line, another one where the colours begin anew."""
    return LINES[index // len(COLOURS) % len(LINES)]


def new_figure(
    panels: int, width: float, height: float, columns: int = 1
) -> "tuple[Figure, list[Axes]]":
    """An empty figure of so many inches, and its panels row by row; with several columns they share
    the vertical axis too.

    Raises:
        ImportError: without matplotlib.
    """
    figure = blank_figure(width, height)
    rows = -(-panels // columns)
    grid = figure.subplots(rows, columns, sharex=True, sharey=columns > 1, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[panels:]:
        unused.remove()
    axes = axes[:panels]
    for axis in axes:
        plain_style(axis)
    return figure, axes


def blank_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches.

    Raises:
        ImportError: without matplotlib.
    """
    need("matplotlib.figure", "figures")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(name: str) -> str:
    """A name to be drawn as it is: matplotlib leaves those that begin with _ out of its legends,
    and reads what is between $ as a formula."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def plain_style(axis: "Axes") -> None:
    """A faint grid below, and no frame above and on the right."""
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: "Figure", axis: "Axes") -> None:
    """The labels of an axis beside it, or below the figure where they are too long for that."""
    handles, labels = axis.get_legend_handles_labels()
    longest = max(map(len, labels))
    if longest <= BESIDE:
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
        return
    columns = 2 if longest <= 2 * BESIDE else 1
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=columns)


def _save(figure: "Figure", path: str | Path) -> None:
    figure.savefig(Path(path), format="png")

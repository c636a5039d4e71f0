"""The figure of a study: a panel for each level of one factor, in it a line for each setting."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stars_fast.base.plots import COLOURS, LINES, new_figure, percent_axis, turns_axis
from studies.curves import Curve, SettingCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_panels(
    results: Sequence[SettingCurves], path: str | Path, *, title: str, panels: str | None = None
) -> None:
    """Draw accuracy (else loss) against the number of turns, and save it as PNG.

    A line is the median of a setting's seeds, with their range behind it. A dot stands at the
    most turns of 98 % of its training. `panels` is the factor with a panel for each level.

    Raises:
        ValueError: there is nothing to draw, ImportError without matplotlib.
    """
    if not results:
        raise ValueError("results: expected at least one finished setting, got none")
    parts: dict[str, list[SettingCurves]] = {}
    for result in results:
        parts.setdefault(result.levels[panels] if panels else "", []).append(result)
    names = list(dict.fromkeys(_line_name(result, panels) for result in results))
    columns = min(len(parts), 2)
    size = {"width": 3.0 + 4.6 * columns, "height": 0.7 + 2.8 * -(-len(parts) // columns)}
    figure, axes = new_figure(len(parts), columns=columns, **size)
    drawn = {}
    for number, (axis, (level, inside)) in enumerate(zip(axes, parts.items(), strict=True)):
        for result in inside:
            name = _line_name(result, panels)
            drawn[name] = _line(axis, result, names.index(name))
        axis.set_title(level, loc="left", fontsize=10)
        lowest = number + columns >= len(parts)
        _name_axes(axis, inside, below=lowest, beside=number % columns == 0)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    if len(names) > 1 and len(parts) == 1:
        _name_at_end(axes[0], drawn)
    elif len(names) > 1:
        handles = [drawn[name] for name in names]
        figure.legend(handles, names, loc="outside right upper", frameon=False)
    note = "dots: the most turns in training"
    figure.text(0.99, 0.01, note, ha="right", fontsize=8, color="#555555")
    figure.savefig(Path(path), format="png")


def _name_at_end(axis: "Axes", lines: Mapping[str, Any]) -> None:
    """The name of each line beside its end, below the one above where they would touch."""
    low, high = axis.get_ylim()
    ends = {name: min(max(line.get_ydata()[-1], low), high) for name, line in lines.items()}
    room, place = 0.075 * (high - low), float("inf")
    for name in sorted(ends, key=lambda name: -ends[name]):
        place = min(ends[name], place - room)
        colour, across = lines[name].get_color(), axis.get_yaxis_transform()
        axis.text(1.02, place, name, color=colour, transform=across, va="center", fontsize=9)


def _line_name(result: SettingCurves, panels: str | None) -> str:
    """The levels that a line is told apart by inside its panel."""
    return ", ".join(level for factor, level in result.levels.items() if factor != panels)


def _line(axis: "Axes", result: SettingCurves, index: int) -> Any:
    """One setting's line; returns its handle for the legend."""
    median, low, high = map(_shown(result), (result.median, result.low, result.high))
    colour = COLOURS[index % len(COLOURS)]
    if result.seeds > 1:
        edges = (list(low.values()), list(high.values()))
        axis.fill_between(list(median), *edges, color=colour, alpha=0.15, linewidth=0)
    (line,) = axis.plot(
        list(median),
        list(median.values()),
        color=colour,
        linestyle=LINES[index // len(COLOURS) % len(LINES)],
        linewidth=1.8,
        clip_on=False,
        zorder=3,
    )
    deepest = max((t for t in median if t <= result.deepest), default=min(median))
    axis.plot(deepest, median[deepest], "o", color=colour, clip_on=False, zorder=4)
    return line


def _shown(result: SettingCurves) -> Any:
    """A function that picks the curve that is drawn, in percent if it is an accuracy."""
    scale = 100 if result.main == "accuracy" else 1

    def pick(figures: dict[str, Curve]) -> Curve:
        return {turns: scale * value for turns, value in sorted(figures[result.main].items())}

    return pick


def _name_axes(
    axis: "Axes", results: Sequence[SettingCurves], *, below: bool, beside: bool
) -> None:
    """Scales, and names and numbers on the sides on which no other panel has them."""
    main = results[0].main
    turns_axis(axis, sorted({t for result in results for t in result.median[main]}))
    if main == "accuracy":
        percent_axis(axis, "answered exactly")
    else:
        axis.set_ylabel(main.replace("_", " ") + (" (nats)" if main.endswith("loss") else ""))
    axis.xaxis.label.set_visible(below)
    axis.yaxis.label.set_visible(beside)
    axis.tick_params(labelbottom=below, labelleft=beside)

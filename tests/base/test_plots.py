import struct
import warnings

import pytest

pytest.importorskip("matplotlib")

from stars_fast.base import plots
from stars_fast.base.plots import accuracy_against_turns, accuracy_and_radius, training_curves

ACCURACY = {
    "stars": {1: 0.6, 16: 1.0, 4: 0.99, 100: 0.97},
    "sft": {1: 0.0, 4: 1.0, 16: 0.05, 100: 0.0},
}
ROWS = [
    {"step": 10 * k, "loss": 1 / k, "penalty": None if k < 5 else 0.1 * k, "lr": 1e-3}
    for k in range(1, 11)
]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = plots._save

    def keep(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(plots, "_save", keep)
    return figures


def texts(axis):
    return [text.get_text() for text in axis.texts]


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_accuracy_lines_are_the_numbers_in_percent(tmp_path, drawn):
    accuracy_against_turns(ACCURACY, tmp_path / "accuracy.png", title="Two methods")
    width, height = png_size(tmp_path / "accuracy.png")
    assert width > height > 500
    (axis,) = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert lines == {
        label: [[t, 100 * points[t]] for t in sorted(points)] for label, points in ACCURACY.items()
    }
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["stars", "sft"]
    assert axis.get_title(loc="left") == "Two methods"
    assert axis.get_xscale() == "log"
    assert [t.get_text() for t in axis.get_xticklabels()] == [
        "1",
        "2",
        "4",
        "8",
        "16",
        "32",
        "64",
        "100",
    ]
    assert axis.get_yticklabels()[-1].get_text() == "100 %"
    assert len({line.get_color() for line in axis.lines}) == 2


@pytest.mark.parametrize(
    ("last", "ticks"),
    [
        (1, ["1"]),
        (8, ["1", "2", "4", "8"]),
        (18, ["1", "2", "4", "8", "18"]),
        (400, [*(str(2**k) for k in range(8)), "400"]),
    ],
)
def test_last_number_of_turns_has_a_tick(tmp_path, drawn, last, ticks):
    accuracy_against_turns({"run": {1: 0.5, last: 0.5}}, tmp_path / "accuracy.png")
    assert [t.get_text() for t in drawn[0].axes[0].get_xticklabels()] == ticks


def test_one_line_has_no_legend_and_a_shaded_training_range(tmp_path, drawn):
    accuracy_against_turns(
        {"stars": ACCURACY["stars"]}, tmp_path / "accuracy.png", trained_depth=(3, 9)
    )
    (axis,) = drawn[0].axes
    assert axis.get_legend() is None
    assert [text.strip() for text in texts(axis)] == ["trained at 3 to 9"]
    shade = axis.patches[0].get_extents().transformed(axis.transData.inverted())
    assert shade.x0 == pytest.approx(3, rel=0.05)
    assert shade.x1 == pytest.approx(9, rel=0.05)


def test_training_range_of_every_label(tmp_path, drawn):
    accuracy_against_turns(
        ACCURACY, tmp_path / "accuracy.png", trained_depth={"stars": (2, 12), "sft": 4}
    )
    (axis,) = drawn[0].axes
    assert [text.strip() for text in texts(axis)] == ["trained at 2 to 12", "trained at 4"]
    for bar, line in zip(axis.patches, axis.lines, strict=False):
        assert bar.get_facecolor()[:3] == pytest.approx(plots_rgb(line.get_color()))
        assert bar.get_y() + bar.get_height() < 0
        assert bar.get_y() > axis.get_ylim()[0]


def plots_rgb(colour):
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


@pytest.mark.parametrize(
    ("accuracy", "options", "message"),
    [
        ({}, {}, "accuracy: expected at least one point"),
        ({"run": {}}, {}, "accuracy: expected at least one point"),
        ({"run": {4: 99.0}}, {}, r"accuracy: expected a value in \[0, 1\], got 99.0 for run at 4"),
        (
            {"run": {4: 1.0}},
            {"trained_depth": {"other": 4}},
            r"labels of accuracy, got \['other'\]",
        ),
    ],
)
def test_accuracy_errors(tmp_path, accuracy, options, message):
    with pytest.raises(ValueError, match=message):
        accuracy_against_turns(accuracy, tmp_path / "accuracy.png", **options)


def test_training_panels_are_what_the_rows_hold(tmp_path, drawn):
    training_curves(ROWS, tmp_path / "training.png")
    png_size(tmp_path / "training.png")
    names = [axis.get_ylabel() for axis in drawn[0].axes]
    assert names == ["token loss (nats)", "penalty", "learning rate"]
    loss, penalty, _ = drawn[0].axes
    assert loss.lines[0].get_xydata().tolist() == [[r["step"], r["loss"]] for r in ROWS]
    assert penalty.lines[0].get_xydata().tolist() == [[r["step"], r["penalty"]] for r in ROWS[4:]]


def test_smooth_curve_is_the_mean_of_the_neighbours(tmp_path, drawn):
    rows = [{"step": k, "penalty": float(k % 3), "lr": float(k % 3)} for k in range(300)]
    training_curves(rows, tmp_path / "training.png")
    smooth = drawn[0].axes[0].lines[1].get_ydata()
    assert len(smooth) == 300
    assert smooth[150] == pytest.approx(sum(k % 3 for k in range(147, 154)) / 7)
    assert smooth[0] == pytest.approx((0 + 1 + 2 + 0) / 4)
    (rate,) = drawn[0].axes[1].lines  # as it is
    assert rate.get_ydata().tolist() == [row["lr"] for row in rows]


def test_a_penalty_that_sets_in_later_is_marked(tmp_path, drawn):
    rows = [{"step": k, "loss": 1.0, "lambda": 0.1 * (k > 40)} for k in range(10, 100, 10)]
    training_curves(rows, tmp_path / "training.png")
    (loss,) = drawn[0].axes
    assert loss.lines[-1].get_xdata() == [40, 40]
    assert [text.get_text().strip() for text in loss.texts] == ["penalty sets in"]
    training_curves([row | {"lambda": 0.1} for row in rows], tmp_path / "training.png")
    assert not drawn[1].axes[0].texts


def test_training_curves_of_several_runs(tmp_path, drawn):
    training_curves({"stars": ROWS, "sft": ROWS[:3]}, tmp_path / "training.png")
    legend = drawn[0].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["stars", "sft"]


def test_training_curves_error(tmp_path):
    with pytest.raises(ValueError, match="runs: expected rows with some of loss, penalty"):
        training_curves([{"step": 1, "loss": None}], tmp_path / "training.png")


def test_accuracy_above_the_radius(tmp_path, drawn):
    many = {f"setting {i}": {1: 0.1 * i, 64: 0.05 * i} for i in range(9)}
    radius = {label: {64: 0.9 + 0.02 * i} for i, label in enumerate(many)}
    accuracy_and_radius(many, radius, tmp_path / "both.png")
    png_size(tmp_path / "both.png")
    above, below = drawn[0].axes
    assert [line.get_xydata().tolist() for line in above.lines] == [
        [[t, 100 * value] for t, value in points.items()] for points in many.values()
    ]
    shown = [line for line in below.lines if not line.get_label().startswith("_")]
    assert [line.get_ydata()[0] for line in shown] == [points[64] for points in radius.values()]
    styles = {(line.get_color(), line.get_linestyle()) for line in above.lines}
    assert len(styles) == 9  # more than there are colours
    assert len(above.get_legend().get_texts()) == 9


@pytest.mark.parametrize(
    ("accuracy", "radius", "message"),
    [
        ({}, {}, "accuracy: expected at least one point"),
        ({"a": {1: 0.5}}, {"b": {1: 0.5}}, r"radius: expected the labels \['a'\], got \['b'\]"),
    ],
)
def test_accuracy_and_radius_errors(tmp_path, accuracy, radius, message):
    with pytest.raises(ValueError, match=message):
        accuracy_and_radius(accuracy, radius, tmp_path / "both.png")


@pytest.mark.parametrize("length", [30, 60, 90])
def test_long_labels_leave_the_axes_their_room(tmp_path, drawn, length):
    """Runs of one name go by their paths."""
    accuracy = {end.rjust(length, "x"): {1: 0.1, 2: 0.9} for end in "ab"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accuracy_against_turns(accuracy, tmp_path / "long.png")
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(accuracy)
    assert figure.axes[0].get_position().width > 0.7


def test_names_are_drawn_as_they_are(tmp_path, drawn):
    """Runs whose names begin as those that matplotlib leaves out, or look like formulas to it."""
    names = ["_weak", "_strong", "a$_$b", "$"]
    accuracy = {name: {1: 0.1, 2: 0.9} for name in names}
    accuracy_against_turns(accuracy, tmp_path / "a.png", title="a$_$b", level={"_level": 0.5})
    plots.loss_against_turns(accuracy, tmp_path / "b.png", title="a$_$b")
    training_curves(dict.fromkeys(names, ROWS), tmp_path / "c.png", title="a$_$b")
    for figure, more in zip(drawn, (["_level"], [], []), strict=True):
        legend = figure.axes[0].get_legend()
        shown = [text.get_text().strip().replace("\\$", "$") for text in legend.get_texts()]
        assert shown == [*names, *more]
        assert figure.axes[0].get_title(loc="left") == r"a\$_\$b"

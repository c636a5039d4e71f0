import pytest

from studies import figure
from studies.curves import SettingCurves


def results(main, levels, seeds=1):
    found = []
    for number, named in enumerate(levels):
        low, middle, high = (
            {main: {t: part / (t + number) for t in (1, 2, 4, 8, 16)}} for part in (0.2, 0.5, 0.8)
        )
        found.append(SettingCurves(named, seeds, 4, 8, 1.0, 1.0, middle, low, high))
    return found


@pytest.fixture
def axes(monkeypatch):
    """The panels of the figures that are drawn."""
    made = []
    new_figure = figure.new_figure

    def keep(*args, **options):
        drawn, panels = new_figure(*args, **options)
        made.extend(panels)
        return drawn, panels

    monkeypatch.setattr(figure, "new_figure", keep)
    return made


def test_a_panel_for_each_level_and_a_line_for_each_setting(axes, tmp_path):
    levels = [{"place": p, "law": law} for p in ("pre", "post", "both") for law in ("a", "b")]
    levels.append({"place": "post", "law": "c"})
    shown = results("accuracy", levels, seeds=3)
    figure.draw_panels(shown, tmp_path / "f.png", title="Laws", panels="place")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title("left") for axis in axes] == ["pre", "post", "both"]
    lines = [[line for line in axis.lines if len(line.get_xdata()) > 1] for axis in axes]
    assert [len(inside) for inside in lines] == [2, 3, 2]
    assert [len(axis.collections) for axis in axes] == [2, 3, 2]  # the ranges of the seeds
    assert lines[0][1].get_color() == lines[2][1].get_color() != lines[0][0].get_color()
    assert lines[0][0].get_ydata()[0] == pytest.approx(50)
    dots = [line.get_xdata()[0] for line in axes[0].lines if len(line.get_xdata()) == 1]
    assert dots == [8, 8]
    # The second panel has none beneath it, so that its turns stand under it.
    assert [axis.xaxis.label.get_visible() for axis in axes] == [False, True, True]
    assert [axis.yaxis.label.get_visible() for axis in axes] == [True, False, True]
    (legend,) = axes[0].figure.legends
    assert [text.get_text() for text in legend.texts] == ["a", "b", "c"]


def test_losses_in_one_panel(axes, tmp_path):
    shown = results("validation_loss", [{"method": "sft"}, {"method": "stars"}])
    figure.draw_panels(shown, tmp_path / "f.png", title="Methods")
    (axis,) = axes
    assert axis.get_ylabel() == "validation loss (nats)"
    assert not axis.collections
    named = {text.get_text(): text for text in axis.texts}
    assert list(named) == ["sft", "stars"]  # from above, each in its line's colour
    assert named["sft"].get_color() == axis.lines[0].get_color()
    room = 0.07 * (axis.get_ylim()[1] - axis.get_ylim()[0])
    assert named["sft"].get_position()[1] - named["stars"].get_position()[1] > room


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="at least one finished setting"):
        figure.draw_panels([], tmp_path / "f.png", title="")

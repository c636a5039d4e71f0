"""The files of an analysis: the numbers as they are, and a page that needs nothing else."""

import base64
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from looped_maps import rotation, subject

pytest.importorskip("matplotlib")

from stars_fast.analysis.measure import Plan, measure
from stars_fast.analysis.report import figures as dynamics_figures
from stars_fast.analysis.report.figures import (
    overview,
    paths_picture,
    quantity_picture,
    reach_of,
)
from stars_fast.analysis.report.numbers import record
from stars_fast.analysis.report.page import page
from stars_fast.analysis.report.quantities import QUANTITIES
from stars_fast.analysis.report.summary import quartiles
from stars_fast.analysis.report.writing import pictures, write_analysis
from stars_fast.analysis.subjects import Request
from stars_fast.analysis.trajectory import convergence_turns
from stars_fast.base.errors import ConfigError
from stars_fast.base.plots import plain

pytestmark = pytest.mark.slow

PLAN = Plan(turns=12, jacobian_at=(1, 4, 12), probes=2)
NASTY = "_<b>run</b> & \"co\" 'x' $_$"
VOID = {"meta", "img", "br", "link", "hr", "input"}


@pytest.fixture(scope="module")
def runs():
    blocks = {
        NASTY: rotation(0.5, growth=0.8),
        "cycle": rotation(2 * math.pi / 5),
        "gone": lambda h: 1e9 * h,
    }
    return {name: measure(subject(block, name=name), PLAN) for name, block in blocks.items()}


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    write_analysis(runs, out, PLAN, Request(), 1e-3)
    return out


class Page(HTMLParser):
    """Its text and images; fails where tags do not close as they open."""

    def __init__(self, content):
        super().__init__()
        self.open, self.text, self.images, self.tags = [], [], [], []
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "img":
            self.images.append(dict(attributes))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def test_the_page_is_one_valid_file_without_references(folder, runs):
    content = (folder / "analysis.html").read_text(encoding="utf-8")
    assert content.startswith("<!DOCTYPE html>")
    page = Page(content)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "a", "base"}
    assert {"html", "head", "title", "body", "table", "figure"} <= tags
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert name not in ("href", "srcset", "onload", "onerror")
            assert name != "src" or value.startswith("data:image/png;base64,")
    style = re.search("<style>(.*)</style>", content, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", content)


def test_every_picture_is_inlined_with_a_sentence(folder, runs):
    page = Page((folder / "analysis.html").read_text(encoding="utf-8"))
    shown = pictures(runs, 1.0)
    assert len(page.images) == sum(len(p.pngs) for p in shown) == 10 + len(runs)
    for image in page.images:
        png = base64.b64decode(image["src"].partition(",")[2], validate=True)
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        assert image["alt"]
    text = "".join(page.text)
    for picture in shown:
        assert picture.read in text
    for quantity in QUANTITIES:
        assert quantity.definition in text


def test_names_are_escaped(folder):
    content = (folder / "analysis.html").read_text(encoding="utf-8")
    assert "<b>" not in content
    assert NASTY in "".join(Page(content).text)


def test_the_json_holds_the_numbers_of_the_functions(folder, runs):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    content = json.loads((folder / "analysis.json").read_text(), parse_constant=refuse)
    assert content["settings"]["turns"] == 12
    assert content["settings"]["jacobian_at"] == [1, 4, 12]
    assert content["machine"]["torch"] == torch.__version__
    assert list(content["runs"]) == list(runs)
    for label, run in runs.items():
        found = content["runs"][label]
        for name in ("norm", "residual", "contraction", "cosine", "to_last"):
            values = torch.tensor(
                [[math.nan if x is None else x for x in row] for row in found["trajectory"][name]],
                dtype=torch.float64,
            )
            expected = getattr(run.trajectory, name)
            torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
        assert found["convergence_turn"] == convergence_turns(run.trajectory.residual, 1e-3)
        assert found["samples"] == 4
        for turn, spectrum in run.jacobian.items():
            kept = found["jacobian"][str(turn)]
            for name in ("radius", "mean_square", "r4"):
                values = getattr(spectrum, name).tolist()
                assert kept[name] == [x if math.isfinite(x) else None for x in values]
    assert content["runs"]["gone"]["overflow_turn"] == [5] * 4
    assert content["runs"]["cycle"]["check"]["turn"] == 12


def test_the_page_says_the_summary_and_the_verdict(folder, runs):
    page = Page((folder / "analysis.html").read_text(encoding="utf-8"))
    found = record(runs, 1e-3).values()
    for run in found:
        assert run["verdict"] in "".join(page.text)
        assert run["what"] in "".join(page.text)
    cells = [text for text in page.text if text.strip()]

    def row(name):
        place = cells.index(name)
        return cells[place + 1 : place + 1 + len(found)]

    edge = list(found)[1]["summary"]["contracting"]  # of radius 1, to rounding
    assert row("Samples with a radius below 1 at most turns") == ["4 of 4", f"{edge} of 4", "–"]
    assert row("Samples that come to rest")[1:] == ["0 of 4", "0 of 4"]
    assert row("Turns compared: in training → most that were run") == ["4 → 12"] * 3
    assert row("Turns with a Jacobian: in training → most") == ["4 → 12"] * 3
    for cell, run in zip(row("Spectral radius at these (below 1 contracts)"), found, strict=True):
        before, after = run["summary"]["radius"]
        assert cell == f"{before:.4g} → {'–' if after is None else format(after, '.4g')}"


def test_lines_and_bands_are_the_quartiles(runs, monkeypatch):
    drawn = []
    save = dynamics_figures._png
    monkeypatch.setattr(dynamics_figures, "_png", lambda f: (drawn.append(f), save(f))[1])
    quantity = next(q for q in QUANTITIES if q.key == "radius")
    some = {name: runs[name] for name in (NASTY, "cycle")}
    quantity_picture(quantity, some)
    (axis,) = drawn[0].axes
    for line, run in zip(axis.lines, some.values(), strict=False):
        turns, values = quantity.values(run)
        assert line.get_xdata().tolist() == turns == [1, 4, 12]
        assert line.get_ydata().tolist() == quartiles(values)[1].tolist()
    assert axis.get_xscale() == "log"
    paths_picture(some, 2.0)
    above, below = drawn[1].axes[0], drawn[1].axes[2]
    assert above.get_title() == plain(NASTY)  # as it draws NASTY
    assert below.get_xlim() == drawn[1].axes[3].get_xlim() == (-2, 2)  # one scale for all runs


def test_one_run_and_many_are_drawn(runs):
    one = {"cycle": runs["cycle"]}
    many = {f"run {i}": runs["cycle"] for i in range(9)}
    nothing = {"none": measure(subject(lambda h: h * math.nan, lengths=(3,)), PLAN)}
    for shown in (one, many, nothing):
        assert overview(shown, reach_of(shown, 1e-3))[:4] == b"\x89PNG"


def test_the_tails_of_states_at_rest_are_not_blown_up(runs):
    rest = {"rest": measure(subject(lambda h: 1 + 1e-6 * (h - 1)), PLAN)}
    assert abs(rest["rest"].tail.points).max() < 1e-4
    assert reach_of(rest, 1e-3) == pytest.approx(1e-2)
    cycle = {"cycle": runs["cycle"]}
    assert reach_of(cycle, 1e-3) == pytest.approx(1.08 * abs(runs["cycle"].tail.points).max())
    assert reach_of(rest | cycle, 1e-3) == reach_of(cycle, 1e-3)


@pytest.mark.parametrize(
    ("ours", "arpack", "warns", "dash"),
    [
        ([0.9, 0.8], [0.905, 0.798], False, False),
        ([0.9, 0.8], [0.9, 0.85], True, False),
        ([0.9, 0.8], [math.nan, 0.8], False, True),
    ],
)
def test_what_arpack_says_is_told(runs, ours, arpack, warns, dash):
    run = replace(runs["cycle"], check=(12, ours, arpack))
    text = "".join(Page(page(record({"cycle": run}, 1e-3), [], {}, ["#000"])).text)
    assert ("Warning: they differ by more than 1%" in text) == warns
    assert ("ARPACK found none" in text) == dash


def test_the_numbers_are_kept_if_the_pictures_fail(runs, tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr("stars_fast.analysis.report.writing.overview", fails)
    with pytest.raises(MemoryError):
        write_analysis({"cycle": runs["cycle"]}, tmp_path, PLAN, Request(), 1e-3)
    assert json.loads((tmp_path / "analysis.json").read_text())["runs"]["cycle"]["samples"] == 4


def test_a_folder_that_cannot_be_written_is_named(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out: can't write to .*file/deeper"):
        write_analysis(
            {"cycle": runs["cycle"]}, tmp_path / "file" / "deeper", PLAN, Request(), 1e-3
        )

"""benchmarks/quality.py: a folder holds runs of one length."""

import argparse

import pytest

from benchmarks import quality


def test_runs_of_other_lengths_are_not_taken_for_these(tmp_path):
    """As after the command that proves the script."""

    def hold(**changes):
        usual = {"steps": 2000, "start": 1200, "decay": 0, "judged": 4}
        quality.hold_lengths(argparse.Namespace(out=tmp_path, **{**usual, **changes}))

    (tmp_path / "trunk-0").mkdir()
    (tmp_path / "trunk-0" / "config.yaml").write_text("")
    with pytest.raises(SystemExit, match=r"--out: expected a new folder, or one with"):
        hold()  # of before, whose lengths no one knows
    (tmp_path / "trunk-0" / "config.yaml").unlink()
    hold()
    hold()
    for changes in ({"steps": 20}, {"start": 10}, {"decay": 800}, {"judged": 1}):
        with pytest.raises(SystemExit, match=r"--out: expected a folder with runs of .*'steps'"):
            hold(**changes)

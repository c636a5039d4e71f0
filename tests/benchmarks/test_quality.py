"""benchmarks/quality.py: a folder holds runs of one length."""

import argparse

import pytest

from benchmarks import quality


def test_runs_of_other_lengths_are_not_taken_for_these(tmp_path):
    """As after the command that proves the script."""

    def hold(**changes):
        usual = {"steps": 2000, "start": 1200, "decay": 0, "judged": 4}
        quality.hold_lengths(argparse.Namespace(out=tmp_path, **{**usual, **changes}))

    hold()
    hold()
    for changes in ({"steps": 20}, {"start": 10}, {"decay": 800}, {"judged": 1}):
        with pytest.raises(SystemExit, match=r"--out: expected a folder with runs of .*'steps'"):
            hold(**changes)

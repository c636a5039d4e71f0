"""Options of every command."""

import argparse

import benchmarks.__main__ as benchmarks
import studies.__main__ as studies
from stars_fast.base.options import Parser
from stars_fast.commands import analyze, eval, runs


def test_the_home_folder_is_found_behind_every_equals_sign(monkeypatch, tmp_path):
    # No shell replaces the ~ of --out=~/run.
    monkeypatch.setenv("HOME", str(tmp_path))
    for module in (analyze, eval, runs):
        parser = module.parser()
        paths = [a for a in parser._actions if a.metavar in ("DIR", "FILE", "FOLDER", "SOURCE")]
        assert any(action.option_strings for action in paths)
        for action in paths:
            option = action.option_strings
            words = ["runs/a", f"{option[0]}=~/x"] if option else ["~/x"]
            found = getattr(parser.parse_args(words), action.dest)
            assert found in (str(tmp_path / "x"), [str(tmp_path / "x")]), action
    assert eval.parser().parse_args(["a", "--tasks=gsm8k,~/t.yaml"]).tasks == [
        "gsm8k",
        str(tmp_path / "t.yaml"),
    ]
    found, _ = studies.options_of(["norms", "--out=~/x", "--records=~/y"])
    assert (found.out, found.records) == (tmp_path / "x", tmp_path / "y")
    assert benchmarks.options_of(["op", "--json=~/x"]).json == str(tmp_path / "x")


def test_what_is_no_path_is_left_as_it_is():
    parser = Parser()
    parser.add_argument("--system", metavar="TEXT")
    assert parser.parse_args(["--system=~/x"]) == argparse.Namespace(system="~/x")

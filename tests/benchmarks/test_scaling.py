import json

import pytest

from benchmarks import growth, scaling, ways
from benchmarks.blocks import Shape
from stars_fast.cli import main

WORDS = ["bench", "scaling", "--small", "--device", "cpu", "--repeats", "1"]
AXES = {
    "length": (32, 64),
    "layers": (1,),
    "batch": (1,),
    "width": (32, 64),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few points, and memory measured in this process: it counts less than it should."""
    monkeypatch.setattr(scaling, "_SMALL", (Shape(64, 4, 176, 1, 1, 32), AXES))
    monkeypatch.setattr(
        growth, "in_its_own_process", lambda function, **cell: growth.in_this_process(**cell)
    )


@pytest.mark.slow
def test_tables_json_and_figure(tmp_path, capsys):
    assert main([*WORDS, "--ways", "dual", "func_jvp", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert found["machine"]["torch"]
    assert {axis: list(map(int, points)) for axis, points in found["axes"].items()} == {
        axis: list(values) for axis, values in AXES.items()
    }
    point = found["axes"]["width"]["32"]
    assert list(point) == ["plain", "dual", "func_jvp"]
    assert point["plain"]["ratio"] == 1
    assert {"ms", "ratio", "error", "mib"} <= set(point["dual"])
    assert found["axes"]["layers"]["1"] == found["axes"]["batch"]["1"]  # the base, once
    table = (tmp_path / "scaling.md").read_text()
    assert "| width | plain, ms | dual | func_jvp | plain, MiB | dual, MiB |" in table
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("plain") == 3  # points, not axes


def test_width_takes_heads_and_mlp_with_it():
    base = Shape(256, 4, 704, 2, 2, 256)
    shapes = {value: shape for _, shape, value in scaling._points(base, {"width": (64, 512)})}
    assert (shapes[64].heads, shapes[64].d_ff) == (1, 176)
    assert (shapes[512].heads, shapes[512].d_ff) == (8, 1408)
    assert {(s.layers, s.batch, s.length) for s in shapes.values()} == {(2, 2, 256)}


@pytest.mark.slow
def test_a_way_that_runs_out_of_memory_is_said_and_not_timed(monkeypatch, tmp_path, capsys):
    whole = growth.way_growth

    def small(way, shape, *rest):
        return None if way == "func_jvp" and shape.length == 64 else whole(way, shape, *rest)

    monkeypatch.setattr(growth, "way_growth", small)
    assert main([*WORDS, "--ways", "dual", "func_jvp", "--out", str(tmp_path)]) == 0
    points = json.loads((tmp_path / "scaling.json").read_text())["axes"]["length"]
    assert points["64"]["func_jvp"] == {"failed": "out of memory"}
    assert points["32"]["func_jvp"]["ratio"] > 0
    assert points["64"]["dual"]["ratio"] > 0
    assert "out of memory" in (tmp_path / "scaling.md").read_text()


@pytest.mark.slow
def test_a_wrong_way_fails_the_command(monkeypatch, tmp_path, capsys):
    whole = ways.WAYS["dual"]
    monkeypatch.setitem(ways.WAYS, "dual", lambda block, h, u: 2 * whole(block, h, u))
    assert main([*WORDS, "--ways", "dual", "--out", str(tmp_path)]) == 1
    assert "FAILED dual at Shape(" in capsys.readouterr().out

"""`python -m benchmarks`, end to end at tiny sizes."""

import json
import sys

import pytest
import torch

from benchmarks.__main__ import LEVELS
from stars_fast.cli import main


def bench(tmp_path, *words):
    path = tmp_path / "result.json"
    code = main(["bench", *words, "--small", "--device", "cpu", "--json", str(path)])
    return code, json.loads(path.read_text())


def test_op(tmp_path, capsys):
    code, found = bench(tmp_path, "op", "--ops", "rms_norm", "attention", "--repeats", "2")
    assert code == 0
    assert found["dtype"] == "float32"
    assert found["machine"]["torch"] == torch.__version__
    assert set(found["peaks"]) == {"gemm_flops", "copy_bytes"}
    assert [name.partition("-")[0] for name in found["rows"]] == ["rms_norm", "attention"]
    norm = found["rows"]["rms_norm"]
    assert norm["shapes"] == norm["checked"] == [[2, 33, 64]]
    row = norm["rows"]["torch"]
    assert row["error"] < 2e-6
    assert {"forward_us", "backward_ratio", "backward_of_copy", "forward_gbyte"} <= set(row)
    (attention,) = (entry for name, entry in found["rows"].items() if "attention" in name)
    assert {"forward_of_gemm", "backward_gflop"} <= set(attention["rows"]["torch"])
    assert "fwd, us" in capsys.readouterr().out


@pytest.mark.slow
def test_block(tmp_path, capsys):
    words = ("block", "--shape", "ouro", "--ways", "last", "jvp_flash_attention", "--repeats", "1")
    code, found = bench(tmp_path, *words, "--dtype", "bfloat16")
    assert code == 0
    assert found["dtype"] == "bfloat16"
    assert found["shapes"]["ouro"]["kind"] == "sandwich"
    assert found["gate"]["ouro"]["shape"] == found["shapes"]["ouro"]  # small enough
    rows = found["rows"]["ouro"]
    assert list(rows) == ["plain", "last", "jvp_flash_attention"]
    assert rows["jvp_flash_attention"] == {"failed": "needs CUDA"}
    assert rows["last"]["marginal"] == pytest.approx(rows["last"]["ratio"] - 1)
    assert rows["plain"]["floor"] == 1
    assert rows["last"]["gflop"] > 1.8 * rows["plain"]["gflop"]
    for row in (rows["plain"], rows["last"]):
        assert row["error"] < 3e-2
        assert row["mib"] >= 0
        assert {"ms", "spread", "gbyte", "of_gemm", "of_copy"} <= set(row)
    out = capsys.readouterr().out
    assert "marginal" in out
    assert "needs CUDA" in out


def test_block_of_given_sizes_out_of_memory(tmp_path, capsys):
    """The least length takes 2 MiB for one attention's scores alone: more than a heap has left."""
    sizes = "--width 64 --heads 2 --d-ff 128 --layers 1 --batch 1 --memory 512,1024".split()
    path = tmp_path / "a.json"
    limit = ["--memory-limit", "1", "--ways", "double_backward", "--device", "cpu"]
    assert main(["bench", "block", *sizes, *limit, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["memory_limit"] == 1
    assert found["memory"]["block"] == {
        "512": {"double_backward": "out of memory"},
        "1024": {"double_backward": None},
    }
    assert "out of memory" in capsys.readouterr().out


def test_block_profile(capsys):
    words = "bench block --small --shape study --ways dual --profile --device cpu".split()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "dual: 0.0" in out
    assert "aten::mm" in out


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_has_the_shared_options(level, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", level, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--device", "--threads", "--repeats", "--json", "--small"):
        assert option in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "LEVEL"),
        ("chip", "invalid choice: 'chip'"),
        ("block --ways slow", "invalid choice: 'slow'"),
        ("block --shape study --width 64", "--shape: expected no sizes beside it, got width"),
        ("block --width 60 --heads 4", "width: expected a multiple of twice the heads (4), got 60"),
        ("block --memory 64,x", "expected lengths like 512,1024, got '64,x'"),
        ("op --repeats 0", "expected a positive integer, got '0'"),
        ("op --backend cuda --device cpu", "--backend: expected one for cpu and float32, got cuda"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(words, message, capsys):
    try:
        code = main(["bench", *words.split()])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("level", "library", "extra"),
    [("step", "transformers", "ouro"), ("scaling", "matplotlib", "train")],
)
def test_a_library_that_is_missing_is_named_before_anything_runs(
    monkeypatch, tmp_path, level, library, extra, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["bench", level, "--small", "--device", "cpu"]) == 2
    assert f'need {library}: pip install "stars-fast[{extra}]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("words", ["op --device cuda", "block --backend cuda"])
def test_what_is_not_here_is_named(words, capsys):
    assert main(["bench", *words.split()]) == 2
    assert "CUDA device" in capsys.readouterr().err

"""benchmarks/gpu_check.py: its dry run, and what it does where a stage does not end well."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    return importlib.import_module("benchmarks.gpu_check")


@pytest.mark.slow
def test_dry_run_goes_through_all_stages(tmp_path):
    """From any folder, whatever is installed; the results lie in $OUT."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu", "--small"]
    done = subprocess.run(
        [*command, "--seconds", "1200"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["stage"] for each in found["stages"]] == [
        "smoke", "kernels", "turns", "steps", "norms", "ops", "designs", "tiles", "addition",
        "published",
    ]  # fmt: skip
    assert all(each["ran"] for each in found["stages"])
    assert found["failures"] == found["skipped"] == []
    for stage in found["stages"]:
        name = stage["stage"]
        entries = [e for key in found if key != "stages" for e in found[key] if e["stage"] == name]
        assert entries, f"{name} found nothing"
    assert {each["case"] for each in found["ops"]} >= {"attention-packed", "rms_norm", "sandwich"}
    assert {(each["packed"]) for each in found["turns"]} == {False, True}


def run(script, monkeypatch, tmp_path, seconds, **stages):
    from benchmarks import gpu_stages

    made = {name: gpu_stages.Stage(stage, 1.0) for name, stage in stages.items()}
    monkeypatch.setattr(gpu_stages, "STAGES", made)
    monkeypatch.setattr(script, "GRACE", 0.3)
    options = argparse.Namespace(only=None, seconds=seconds, device="cpu", small=True)
    data = script.run_all(options, tmp_path / "gpu.json")
    assert data == json.loads((tmp_path / "gpu.json").read_text())
    return data, script.stage_lines(data)


def good(report, device, small):
    report.add("found", {"here": report.stage})


def hangs(report, device, small):
    report.add("found", {"here": report.stage})
    time.sleep(60)


def raises(report, device, small):
    report.add("found", {"here": report.stage})
    raise RuntimeError("as it does")


def dies(report, device, small):
    os._exit(9)


def one_of_two(report, device, small):
    report.attempt("first", lambda: 1 / 0)
    report.attempt("second", lambda: report.add("found", {"here": report.stage}))
    report.attempt("third", lambda: report.add("found", {}), needs=1e9)


def test_a_stage_that_ends_badly_takes_no_other_with_it(script, monkeypatch, tmp_path):
    begin = time.monotonic()
    data, text = run(
        script, monkeypatch, tmp_path, 10.0,
        hangs=hangs, raises=raises, dies=dies, one_of_two=one_of_two, good=good,
    )  # fmt: skip
    assert time.monotonic() - begin < 40  # "hangs" has 10 s, each other a start of Python
    assert [each["here"] for each in data["found"]] == ["hangs", "raises", "one_of_two", "good"]
    assert {each["stage"]: each["ran"] for each in data["stages"]} == {
        "hangs": False, "raises": True, "dies": False, "one_of_two": True, "good": True,
    }  # fmt: skip
    reasons = {each["stage"]: each["why"] for each in data["failures"]}
    assert reasons["hangs"].startswith("killed after")
    assert "as it does" in reasons["raises"]
    assert reasons["dies"] == "ended with code 9"
    assert reasons["one_of_two"].startswith("first: ")
    assert [(each["stage"], each["what"]) for each in data["skipped"]] == [("one_of_two", "third")]
    assert "FAILED hangs: killed" in text
    assert "skipped one_of_two: third" in text


def test_without_time_nothing_is_negative_and_the_command_fails(script, monkeypatch, tmp_path):
    data, _ = run(script, monkeypatch, tmp_path, 1e-9, one=good, two=good)
    assert [each["why"] for each in data["failures"]] == ["out of time"] * 2
    assert "found" not in data


STOPPED = """
import os, sys, time
from benchmarks import gpu_check, gpu_stages

def hangs(report, device, small):
    report.add("found", {"pid": os.getpid()})
    time.sleep(600)

gpu_stages.STAGES = {"hangs": gpu_stages.Stage(hangs, 1.0)}
sys.argv = ["gpu_check.py", "--device", "cpu", "--json", sys.argv[1]]
sys.exit(gpu_check.main())
"""


@pytest.mark.slow
def test_a_command_that_is_told_to_stop_leaves_no_stage_behind(tmp_path):
    """Nor does it need the folder of its results."""
    path = tmp_path / "made" / "gpu.json"
    command = [sys.executable, "-c", STOPPED, str(path)]
    process = subprocess.Popen(command, cwd=BENCHMARKS.parent, stdout=subprocess.DEVNULL)
    while not (path.exists() and "found" in json.loads(path.read_text())):
        assert process.poll() is None
        time.sleep(0.05)
    stage = json.loads(path.read_text())["found"][0]["pid"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(stage, 0)


def test_parts_add_up_to_the_deadline(script):
    ends = script.schedule({"a": 1, "b": 3, "c": 4}, 80.0)
    assert ends == {"a": 10.0, "b": 40.0, "c": 80.0}


def test_a_check_that_is_skipped_fails(script, tmp_path):
    from benchmarks.gpu_stages.report import Report

    for strict in (False, True):
        report = Report(tmp_path / f"{strict}.json", "kernels", 0.0, strict)
        report.attempt("a check", lambda: None)
        assert report.left == 0.0
        assert len(report.data["skipped"]) == 1
        assert len(report.data["failures"]) == strict


@pytest.mark.slow
def test_unknown_stages_are_named():
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--only", "all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected stages of smoke, kernels" in done.stderr
    assert "got all" in done.stderr

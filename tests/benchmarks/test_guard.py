"""The guard of recorded ratios."""

import importlib
import json
import sys

import pytest


@pytest.fixture
def guard():
    return importlib.import_module("benchmarks.guard")


def test_a_ratio_past_the_margin_or_gone_fails(guard):
    before = {"a": 2.0, "b": 2.0, "c": 1.0, "d": 1.0}
    now = {"a": 2.19, "b": 2.21, "d": float("nan"), "new": 9.0}
    assert set(guard.slower(now, before, 0.1)) == {"b", "c", "d"}


def test_a_class_is_a_processor_and_its_threads(guard):
    name = guard.machine_class({"device": "AMD EPYC 7J13 (64)", "threads": 2})
    assert name == "amd-epyc-7j13-64-2-threads"


def test_record_and_compare(guard, monkeypatch, tmp_path, capsys):
    found = {"block/study/dual": 2.0}
    monkeypatch.setattr(guard, "ratios", lambda *_: dict(found))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["guard.py", "--records", str(tmp_path), *words])
        monkeypatch.setattr(guard.torch, "set_num_threads", lambda n: None)
        return guard.main()

    assert run() == 2
    assert "make one with --record" in capsys.readouterr().out
    assert run("--record") == 0
    (record,) = tmp_path.glob("*.json")
    assert json.loads(record.read_text())["ratios"] == found
    found["block/study/dual"] = 2.2
    assert run() == 0
    assert run("--margin", "0.05") == 1
    assert "FAILED block/study/dual: 2.200 is more than 5% above 2.000" in capsys.readouterr().out

"""Sweeps that are run again: in other processes, with other options, after damage."""

import json
import os
import re
import subprocess
import sys

import pytest
from benchmark_data import SUMS, row_of, write_all, write_rows

from stars_fast.cli import main
from stars_fast.evaluation import setting
from stars_fast.evaluation.benchmarks import BENCHMARKS, open_tasks
from stars_fast.models.saved import find_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

pytestmark = pytest.mark.slow

ROWS = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_ouro(folder, hidden_size=32, num_hidden_layers=1, remote_code=False)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [row_of("svamp", a, b, a + b) for a, b in SUMS[:ROWS]]
    write_rows(folder / "svamp.jsonl", rows)
    return folder


def words_for(checkpoint, data, out, *more):
    words = f"eval {checkpoint} --tasks svamp --turns 2 --max-new-tokens 6 --device cpu"
    return [*words.split(), "--data", str(data), "--out", str(out), *more]


def folder_of(out):
    (folder,) = out.glob("tiny-*/svamp-turns2")
    return folder


def results_of(out):
    """All of the results but how long they took."""
    results = json.loads((out / "results.json").read_text())["results"]
    timed = ("seconds", "tokens_per_second")
    return [{n: value for n, value in each.items() if n not in timed} for each in results]


def responses_of(out):
    lines = (folder_of(out) / "samples.jsonl").read_text().splitlines()
    return [json.loads(line)["response"] for line in lines]


@pytest.fixture(scope="module")
def swept(checkpoint, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("swept")
    assert main(words_for(checkpoint, data, out)) == 0
    return out


ELSEWHERE = """
import json, os, sys
from stars_fast.cli import main
from stars_fast.evaluation import setting
from stars_fast.evaluation.benchmarks import BENCHMARKS, open_tasks
file, data, *words = sys.argv[1:]
if os.environ["RANK"] == "0":
    tasks = open_tasks(list(BENCHMARKS), data, 9, None)
    with open(file, "w") as found:
        json.dump([setting.definition(task) for task in tasks], found)
sys.exit(main(words))
"""


@pytest.fixture(scope="module")
def all_data(tmp_path_factory):
    return str(write_all(tmp_path_factory.mktemp("all")))


@pytest.fixture(scope="module")
def elsewhere(checkpoint, data, all_data, tmp_path_factory):
    """Of two processes: the definitions of all tasks as the first finds them, and the folder of a
    sweep that both share."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "elsewhere.py").write_text(ELSEWHERE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [folder / "elsewhere.py", folder / "definitions.json", all_data]
    command += words_for(checkpoint, data, folder / "out")
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=300)
    return json.loads((folder / "definitions.json").read_text()), folder / "out"


def test_a_task_is_the_same_in_every_process(elsewhere, all_data):
    there, _ = elsewhere
    here = [setting.definition(task) for task in open_tasks(list(BENCHMARKS), all_data, 9, None)]
    assert there == here
    assert len(set(here)) == len(BENCHMARKS)


def test_two_processes_share_the_samples_and_find_what_one_finds(elsewhere, swept):
    _, out = elsewhere
    assert results_of(out) == results_of(swept)
    assert responses_of(out) == responses_of(swept)
    made = [len(p.read_text().splitlines()) for p in folder_of(out).glob("generations*")]
    assert len(made) == 2
    assert min(made) >= ROWS // 2


def test_more_processes_than_samples_are_an_error(checkpoint, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(words_for(checkpoint, data, tmp_path, "--limit", "2")) == 2
    said = capsys.readouterr().err
    assert "--limit: svamp has 2 samples, fewer than the 3 processes that share them" in said


def test_a_prompt_that_would_lose_its_beginning_is_an_error(checkpoint, data, tmp_path, capsys):
    words = words_for(checkpoint, data, tmp_path)
    words[words.index("6")] = "500"
    assert main(words) == 2
    said = capsys.readouterr().err
    assert re.search(r"room for the prompts: one has \d\d tokens, and 12 of the model's 512", said)


def test_a_try_that_failed_does_not_hold_its_folder(checkpoint, data, tmp_path, capsys):
    words = words_for(checkpoint, data, tmp_path)
    words[words.index("6")] = "2048"
    assert main(words) == 2
    assert "--max-new-tokens: expected less than the 512 tokens" in capsys.readouterr().err
    assert main(words_for(checkpoint, data, tmp_path)) == 0


def test_other_rules_score_again_and_generate_nothing(
    checkpoint, data, swept, tmp_path, monkeypatch
):
    from stars_fast.models.ouro import OuroForCausalLM

    words = words_for(checkpoint, data, tmp_path)
    assert main(words) == 0
    metrics = folder_of(tmp_path) / "metrics.json"
    before = json.loads(metrics.read_text())
    metrics.write_text(json.dumps({**before, "accuracy": 0.123, "scored_by": {"lm-eval": "0.1"}}))
    monkeypatch.setattr(OuroForCausalLM, "generate", lambda *_, **__: pytest.fail("generated"))
    assert main(words) == 0
    assert json.loads(metrics.read_text()) == before
    assert results_of(tmp_path) == results_of(swept)


def test_damaged_files(checkpoint, data, swept, tmp_path, capsys):
    words = words_for(checkpoint, data, tmp_path)
    assert main(words) == 0
    folder = folder_of(tmp_path)
    log = folder / "generations.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], b"\0\0\0\n", *lines[2:]]))
    (folder / "metrics.json").unlink()
    assert main(words) == 0
    assert len(log.read_bytes().splitlines()) == ROWS + 1  # one of them made again
    assert results_of(tmp_path) == results_of(swept)
    (folder / "setting.json").write_text("")
    capsys.readouterr()
    assert main(words) == 2
    assert "setting.json does not say of which setting" in capsys.readouterr().err


def test_a_folder_does_not_depend_on_what_else_is_evaluated(
    checkpoint, data, tmp_path, monkeypatch
):
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    other = tmp_path / "b" / "tiny"
    write_tiny_ouro(other, hidden_size=32, num_hidden_layers=1, remote_code=False, seed=5)
    out = tmp_path / "out"
    assert main(words_for(checkpoint, data, out)) == 0
    (first,) = out.glob("tiny-*")
    stamp = (first / "svamp-turns2" / "generations.jsonl").stat().st_mtime_ns
    monkeypatch.chdir(checkpoint.parent)
    words = words_for("./tiny", data, out)
    words.insert(2, str(other))
    assert main(words) == 0
    assert len(list(out.glob("tiny-*"))) == 2
    assert (first / "svamp-turns2" / "generations.jsonl").stat().st_mtime_ns == stamp


def test_what_is_asked_twice_is_done_once(checkpoint, data, tmp_path):
    words = words_for(checkpoint, data, tmp_path, "--tol", "0,0", "--limit", "2")
    words[words.index("2")] = "2,2"
    words.insert(2, str(checkpoint))
    assert main(words) == 0
    assert len(results_of(tmp_path)) == 1


def test_examples_never_hold_the_question_that_is_asked(tmp_path):
    data = write_all(tmp_path)
    for name in ("svamp", "asdiv", "gsm8k", "gsm8k-value", "amc23"):
        (opened,) = open_tasks([name], str(data), 9, 3)
        task = opened.task
        task.set_fewshot_seed(1)
        task.build_all_requests()
        assert len(task.instances) == len(SUMS)
        for instance, (a, b) in zip(task.instances, SUMS, strict=True):
            prompt = instance.args[0]
            assert prompt.count("plus") == 4
            assert prompt.count(f"What is {a} plus {b}?") == 1


def test_a_model_of_the_hub_is_told_by_its_revision(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = []
    for revision in ("a" * 40, "b" * 40):
        cached = tmp_path / "models--lab--tiny"
        snapshot = cached / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / "main").write_text(revision)
        for file in checkpoint.iterdir():
            (snapshot / file.name).write_bytes(file.read_bytes())
        found.append(find_model("lab/tiny", None).identity)
    assert found == [{"hub": "lab/tiny", "revision": letter * 40} for letter in "ab"]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "--device: expected cpu, cuda, cuda:1, ..., got 'gpu'"),
        ("cuda:99", "--device is cuda:99 but PyTorch sees"),
    ],
)
def test_devices_that_are_not_there(checkpoint, data, tmp_path, capsys, device, message):
    words = words_for(checkpoint, data, tmp_path)
    words[words.index("cpu")] = device
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(checkpoint, data, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(words_for(checkpoint, data, tmp_path / "file" / "out")) == 2
    assert "--out" in capsys.readouterr().err

"""The benchmarks as tasks of lm-eval, from local rows."""

import json
from pathlib import Path

import pytest
from benchmark_data import SUMS, row_of, write_all, write_rows

from stars_fast.base.errors import ConfigError
from stars_fast.evaluation.benchmarks import BENCHMARKS, open_tasks
from stars_fast.evaluation.harness import TASK_FOLDER, index_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("math_verify", reason="math-verify is not installed")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(write_all(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def opened(data):
    tasks = open_tasks(list(BENCHMARKS), data, 99, None)
    return {task.name: task for task in tasks}


PROMPTS = {
    "gsm8k": "Question: What is 1 plus 2?\nAnswer:",
    "gsm8k-value": "Question: What is 1 plus 2?\nAnswer:",
    "math500": "Problem:\nWhat is 1 plus 2?\n\nSolution:",
    "asdiv": "Question: Jan has 1 and 2. What is 1 plus 2?\nAnswer:",
    "svamp": "Question: Jan has 1 and 2. What is 1 plus 2?\nAnswer:",
    "amc23": "Problem:\nWhat is 1 plus 2?\n\nSolution:",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_zero_shot_prompts_greedy_to_the_cap(opened, name):
    task = opened[name].task
    task.set_fewshot_seed(1)
    task.build_all_requests(limit=2)
    prompt, options = task.instances[0].args
    assert prompt == PROMPTS[name]
    assert options["max_gen_toks"] == 99
    assert options["do_sample"] is False
    assert "<|im_end|>" in options["until"]
    assert len(task.eval_docs) == len(SUMS)
    assert opened[name].samples == BENCHMARKS[name].samples


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BENCHMARKS))
@pytest.mark.parametrize(("number", "right"), [(3, 1), (4, 0)])
def test_the_metric_that_is_reported_tells_right_from_wrong(opened, name, number, right):
    # lm-eval's flexible-extract of GSM8K takes the last "$." of "$\\boxed{3}$." for a number.
    response = f"So it is {number}." if name == "gsm8k" else f"So $\\boxed{{{number}}}$."
    task = opened[name].task
    task.set_fewshot_seed(1)
    task.build_all_requests(limit=1)
    (instance,) = task.instances
    instance.resps.append(response)
    task.apply_filters()
    metric, how = BENCHMARKS[name].metric.split(",")
    found = task.process_results(task.eval_docs[0], [instance.filtered_resps[how]])
    assert found[metric] == right


@pytest.mark.slow
def test_our_tasks_hold_more_than_lm_evals_default_of_256_tokens_and_hide_none_of_its_own():
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    own = {path.stem: load_yaml(path) for path in TASK_FOLDER.glob("*.yaml")}
    assert set(own) == {"asdiv", "svamp", "amc23", "gsm8k"}
    assert {task["generation_kwargs"]["max_gen_toks"] for task in own.values()} == {2048}
    theirs = Path(lm_eval.tasks.__file__).parent
    few = index_tasks(["stars_fast_svamp", "stars_fast_amc23"], "--tasks")  # made in no time
    assert set(few.all_tasks) == {task["task"] for task in own.values()}
    entries = index_tasks(["asdiv"], "--tasks").task_index
    assert {entries[task["task"]].yaml_path.parent for task in own.values()} == {TASK_FOLDER}
    assert theirs in entries["asdiv"].yaml_path.parents


def test_another_task_keeps_its_own_stops_and_shots(data, tmp_path):
    file = tmp_path / "own.yaml"
    rows = f"{data}/svamp.jsonl"
    task = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": rows}},
        "output_type": "generate_until", "test_split": "test", "doc_to_text": "{{Body}}",
        "doc_to_target": "{{Answer}}", "generation_kwargs": {"until": "\n", "max_gen_toks": 5},
        "num_fewshot": 2,
    }  # fmt: skip
    file.write_text(json.dumps(task))
    (opened,) = open_tasks([str(file)], None, 7, None)
    assert (opened.name, opened.metric, opened.samples) == ("own", None, None)
    assert opened.task.get_config("num_fewshot") == 2
    wanted = {"until": ["\n", "<|im_end|>"], "max_gen_toks": 7}
    assert opened.task.get_config("generation_kwargs") == wanted
    (opened,) = open_tasks([str(file)], None, 7, 0)
    assert opened.task.get_config("num_fewshot") == 0
    write_rows(tmp_path / "own.jsonl", [row_of("svamp", 1, 2, 3)])
    (opened,) = open_tasks([str(file)], str(tmp_path), 7, 0)
    assert [doc["Answer"] for doc in opened.task.eval_docs] == ["3"]


def test_mistakes_are_named(data, tmp_path):
    with pytest.raises(ConfigError, match=r"--tasks: expected names .* got no-such"):
        open_tasks(["svamp", "no-such"], data, 9, None)
    with pytest.raises(ConfigError, match=r"--data: expected aime24\.jsonl for the task aime24"):
        open_tasks(["aime24"], data, 9, None)
    (tmp_path / "svamp.jsonl").write_text("")
    with pytest.raises(ConfigError, match="--tasks svamp: can't load it: "):
        open_tasks(["svamp"], str(tmp_path), 9, None)
    for several in ("mmlu", "math_word_problems"):  # a group, a tag
        with pytest.raises(ConfigError, match=f"--tasks: expected single tasks, got {several}"):
            open_tasks([several], None, 9, None)

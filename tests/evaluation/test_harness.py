"""lm-eval on a model in memory: with a stand-in of the calls that are made, and where it is
installed with itself."""

import inspect
import json
import sys
from types import ModuleType

import pytest
import torch

from stars_fast.evaluation.harness import index_tasks, run_tasks
from stars_fast.training.tree import ConfigError


@pytest.fixture(scope="module")
def ouro(tmp_path_factory):
    """A tiny Ouro of 4 turns and its tokenizer."""
    from transformers import AutoTokenizer

    from stars_fast.models.ouro import OuroForCausalLM
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_ouro(
        folder, hidden_size=32, intermediate_size=64, num_hidden_layers=1, remote_code=False
    )
    return OuroForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


class HFLM:
    """As much of lm_eval.models.huggingface.HFLM as is called."""

    def __init__(self, pretrained, *, tokenizer=None, batch_size=1, mixed_precision_dtype=None):
        assert isinstance(batch_size, int)
        self.dtype = mixed_precision_dtype
        self.model, self.tokenizer = pretrained, tokenizer


class TaskManager:
    """As much of lm_eval.tasks.TaskManager as is called."""

    made = 0

    def __init__(self):
        TaskManager.made += 1
        self.all_tasks = ["one", "two", "three"]


def stand_in(simple_evaluate):
    """The modules of an lm-eval that judges so."""
    lm_eval = ModuleType("lm_eval")
    tasks = ModuleType("lm_eval.tasks")
    huggingface = ModuleType("lm_eval.models.huggingface")
    lm_eval.simple_evaluate, huggingface.HFLM = simple_evaluate, HFLM
    tasks.TaskManager = TaskManager
    return {"lm_eval": lm_eval, "lm_eval.tasks": tasks, "lm_eval.models.huggingface": huggingface}


@pytest.fixture
def judged(monkeypatch):
    """judged(simple_evaluate): make it lm-eval's."""

    def install(simple_evaluate):
        for name, module in stand_in(simple_evaluate).items():
            monkeypatch.setitem(sys.modules, name, module)

    return install


def figures(model, *, tasks=None, limit=None, bootstrap_iters=100000, task_manager=None):
    """As `lm_eval.simple_evaluate`; what it finds tells what the model was when it was called."""
    ids = model.tokenizer("1 + 2", return_tensors="pt").input_ids
    turns = float(model.model(ids).turns.float().mean())
    found = {"alias": "a task", "sample_len": limit, "acc,none": turns, "acc_stderr,none": 0.5}
    found |= {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"}
    return {"results": dict.fromkeys(tasks, found)}


@pytest.mark.parametrize("training", [True, False])
def test_every_metric_at_every_number_of_turns(ouro, judged, training):
    model, tokenizer = ouro
    model.train(training)
    modes = []

    def simple_evaluate(**given):
        modes.append((given["model"].model.training, given["limit"], given["bootstrap_iters"]))
        assert given["model"].tokenizer is tokenizer
        assert isinstance(given["task_manager"], TaskManager)
        return figures(**given)

    judged(simple_evaluate)
    before = TaskManager.made
    found = run_tasks(model, tokenizer, ("one", "two"), (2, 5), limit=7)
    assert TaskManager.made == before + 1
    index = index_tasks(("one",))
    assert run_tasks(model, tokenizer, ["one"], [3], index=index)["one/acc,none"] == {3: 3.0}
    assert TaskManager.made == before + 2
    modes.pop()
    assert found == {
        f"{task}/{metric}": values
        for task in ("one", "two")
        for metric, values in (
            ("acc,none", {2: 2.0, 5: 5.0}),
            ("exact_match,strict-match", {2: 0.25, 5: 0.25}),
        )
    }
    assert modes == [(False, 7, 0)] * 2
    assert model.config.total_ut_steps == 4
    assert all(module.training == training for module in model.modules())
    json.dumps(found)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_computes_as_the_autocast_around_it(ouro, judged, dtype):
    seen = []

    def simple_evaluate(**given):
        seen.append(given["model"].dtype)
        return {"results": {}}

    judged(simple_evaluate)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        run_tasks(*ouro, ["one"], [2])
    assert seen == [dtype]


def test_the_model_is_itself_again_after_a_failure(ouro, judged):
    model, tokenizer = ouro
    model.train()

    def simple_evaluate(**given):
        assert model.config.total_ut_steps == 2
        raise KeyError("no such task")

    judged(simple_evaluate)
    with pytest.raises(KeyError, match="no such task"):
        run_tasks(model, tokenizer, ["one"], [2, 5])
    assert model.config.total_ut_steps == 4
    assert model.training


def test_tasks_that_do_not_exist_are_named(judged, tmp_path):
    judged(figures)
    file = tmp_path / "own.yaml"
    missing = str(tmp_path / "other.yaml")
    file.write_text("task: own")
    index_tasks(["one", str(file)])
    with pytest.raises(ConfigError, match=rf"eval\.tasks must be .* got four, {missing}$"):
        index_tasks(["one", "four", str(file), missing])


def test_without_lm_eval_the_error_says_how_to_install_it(ouro, monkeypatch):
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    with pytest.raises(ConfigError, match=r'eval\.tasks .*pip install "stars-fast\[eval\]"'):
        run_tasks(*ouro, ["one"], [2])
    with pytest.raises(ConfigError, match=r'eval\.tasks .*pip install "stars-fast\[eval\]"'):
        index_tasks(["one"])


def test_the_stand_in_takes_what_lm_eval_takes():
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    import lm_eval
    from lm_eval.models import huggingface

    for real, ours in ((lm_eval.simple_evaluate, figures), (huggingface.HFLM, HFLM)):
        theirs = inspect.signature(real).parameters
        for name, parameter in inspect.signature(ours).parameters.items():
            assert theirs[name].default == parameter.default, name


def test_lm_eval_itself_on_a_task_of_local_rows(ouro, tmp_path):
    """Its figure is that of the log-likelihoods of the choices, computed here."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    model, tokenizer = ouro
    rows = [
        {"question": f"{a} + {b} =", "choices": [f" {a + b}", f" {a + b + 1}", " 7"], "label": 0}
        for a, b in ((1, 2), (3, 5), (2, 2), (8, 1), (6, 6), (4, 9))
    ]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tmp_path / "sums.yaml"
    task.write_text(
        json.dumps(  # which is YAML
            {
                "task": "sums",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"validation": str(file)}},
                "output_type": "multiple_choice",
                "validation_split": "validation",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "label",
                "target_delimiter": "",
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            }
        )
    )
    found = run_tasks(model, tokenizer, [str(task)], [1, 3])

    def log_likelihood(question, choice, turns):
        asked, both = (tokenizer(text).input_ids for text in (question, question + choice))
        with torch.no_grad():
            logits = model(torch.tensor([both]), turns=turns).logits.log_softmax(-1)[0]
        return sum(float(logits[i - 1, both[i]]) for i in range(len(asked), len(both)))

    model.eval()
    for turns in (1, 3):
        right = 0
        for row in rows:
            values = [log_likelihood(row["question"], c, turns) for c in row["choices"]]
            right += values.index(max(values)) == row["label"]
        assert found["sums/acc,none"][turns] == pytest.approx(right / len(rows))

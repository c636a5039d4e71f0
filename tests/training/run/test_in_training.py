"""lm-eval on a model in memory, as the trainer calls it."""

import json
import sys

import pytest
import torch

from stars_fast.base.errors import ConfigError
from stars_fast.evaluation.benchmarks import check_tasks
from stars_fast.training.run import in_training
from stars_fast.training.run.in_training import run_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

pytestmark = pytest.mark.slow


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


ROWS = [
    {"question": f"{a} + {b} =", "choices": [f" {a + b}", f" {a + b + 1}", " 7"], "label": 0}
    for a, b in ((1, 2), (3, 5), (2, 2), (8, 1), (6, 6), (4, 9))
]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A task of sums with choices."""
    folder = tmp_path_factory.mktemp("sums")
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = folder / "sums.yaml"
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
    return str(task)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_the_figure_is_that_of_the_log_likelihoods_of_the_choices(
    ouro, sums, monkeypatch, chat, training
):
    model, tokenizer = ouro
    model.train(training)
    template = tokenizer.chat_template
    assert template
    monkeypatch.setattr(tokenizer, "chat_template", template if chat else None)
    found = run_tasks(model, tokenizer, [sums], [1, 3])
    assert list(found) == ["sums/acc,none"]
    assert model.config.total_ut_steps == 4
    assert all(module.training == training for module in model.modules())

    def log_likelihood(question, choice, turns):
        if chat:
            messages = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        asked, both = (tokenizer(text).input_ids for text in (question, question + choice))
        with torch.no_grad():
            logits = model(torch.tensor([both]), turns=turns).logits.log_softmax(-1)[0]
        return sum(float(logits[i - 1, both[i]]) for i in range(len(asked), len(both)))

    model.eval()
    for turns in (1, 3):
        right = 0
        for row in ROWS:
            values = [log_likelihood(row["question"], c, turns) for c in row["choices"]]
            right += values.index(max(values)) == row["label"]
        assert found["sums/acc,none"][turns] == pytest.approx(right / len(ROWS))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_computes_as_the_autocast_around_it_and_takes_the_limit(ouro, sums, monkeypatch, dtype):
    seen = []

    def judge(model, task, limit, **options):
        assert task.task_name == "sums"
        assert options == {"apply_chat_template": True, "fewshot_as_multiturn": True}
        logits = model._model_call(torch.tensor([[5, 6, 7]]))
        seen.append((model.mixed_precision_dtype, logits.dtype, model.model.training, limit))
        return {"results": {"sums": {"acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 3}}}

    monkeypatch.setattr(in_training, "judge", judge)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        found = run_tasks(*ouro, [sums], [2], limit=3)
    assert seen == [(dtype, dtype or torch.float32, False, 3)]
    assert found == {"sums/acc,none": {2: 0.5}}


def test_a_small_model_generates_up_to_half_of_its_length(ouro, tmp_path, monkeypatch):
    """As `stars-fast eval --tasks` asks it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1 + 2 =", "answer": "3"}) + "\n")
    file = tmp_path / "said.yaml"
    task = {
        "task": "said", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "output_type": "generate_until", "test_split": "test", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "generation_kwargs": {"do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    file.write_text(json.dumps(task))
    model, tokenizer = ouro
    real, asked = model.generate, []

    def generate(**options):
        asked.append(options["max_new_tokens"])
        return real(**options)

    monkeypatch.setattr(model, "generate", generate)
    found = run_tasks(model, tokenizer, [str(file)], [1])
    assert found == {"said/exact_match,none": {1: pytest.approx(0.0)}}
    assert asked == [model.config.max_position_embeddings // 2]


def test_the_model_is_itself_again_after_a_failure(ouro, sums, monkeypatch):
    model, tokenizer = ouro
    model.train()

    def judge(*given, **options):
        assert model.config.total_ut_steps == 2
        raise KeyError("no such task")

    monkeypatch.setattr(in_training, "judge", judge)
    with pytest.raises(KeyError, match="no such task"):
        run_tasks(model, tokenizer, [sums], [2, 5])
    assert model.config.total_ut_steps == 4
    assert model.training


def test_tasks_that_do_not_exist_are_named(tmp_path):
    missing = str(tmp_path / "other.yaml")
    with pytest.raises(ConfigError, match=rf"eval\.tasks: expected .* got no-such, {missing}$"):
        check_tasks(["gsm8k", "svamp", "stars_fast_svamp", "no-such", missing], "eval.tasks")


def test_without_lm_eval_the_error_says_how_to_install_it(ouro, monkeypatch):
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    with pytest.raises(ConfigError, match=r'eval\.tasks .*pip install "stars-fast\[eval\]"'):
        run_tasks(*ouro, ["one"], [2])
    with pytest.raises(ConfigError, match=r'eval\.tasks .*pip install "stars-fast\[eval\]"'):
        check_tasks(["one"], "eval.tasks")

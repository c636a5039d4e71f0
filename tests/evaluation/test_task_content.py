"""Results of a task whose files have changed are no results of it."""

import json

import pytest
from benchmark_data import SUMS, row_of, write_rows

from stars_fast.cli import main
from stars_fast.evaluation.benchmarks import open_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

BASE = """
dataset_path: json
test_split: test
output_type: generate_until
doc_to_text: "{{Body}} =>"
doc_to_target: "{{Answer}}"
process_docs: !function utils.process_docs
process_results: !function utils.score
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
generation_kwargs: {until: ["Question:"]}
num_fewshot: 1
fewshot_config: {sampler: first_n, samples: !function examples.read}
"""
OWN = """
include: base.yaml
task: own
dataset_kwargs: {data_files: {test: ROWS}}
"""
UTILS = """
from helpers import verdict
def named(doc):
    return dict(doc, Body=doc["Body"].replace("Jan", "Jan"))
def process_docs(dataset):
    return dataset.map(named)
def score(doc, results):
    return {"exact_match": verdict(results[0])}
"""
HELPERS = """
def verdict(response):
    return 0
"""
EXAMPLES = """
import json, pathlib
def read():
    lines = (pathlib.Path(__file__).parent / "shots.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A task of all kinds of files: included, of rows, of code and beside it, of examples."""
    folder = tmp_path / "task"
    write_rows(folder / "rows.jsonl", [row_of("svamp", a, b, a + b) for a, b in SUMS])
    write_rows(folder / "shots.jsonl", [row_of("svamp", 1, 1, 2)])
    own = OWN.replace("ROWS", str(folder / "rows.jsonl"))
    texts = {"own.yaml": own, "base.yaml": BASE, "utils.py": UTILS, "helpers.py": HELPERS}
    for name, text in (texts | {"examples.py": EXAMPLES}).items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "helpers", raising=False)
    return folder


def content(task):
    (opened,) = open_tasks([str(task / "own.yaml")], None, 6, None)
    return opened.content


def rewrite(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


CHANGES = {
    "rows, an answer": ("rows.jsonl", '"Answer": "3"', '"Answer": "4"', "rows"),
    "rows, a column not read": ("rows.jsonl", '"question_concat": ""', '"question_concat": "x"',
                                "rows"),
    "rows, a question": ("rows.jsonl", "Jan has 1 and 2", "Eva has 1 and 2", "prompts"),
    "an included file": ("base.yaml", "{{Body}} =>", "{{Body}} is", "prompts"),
    "a function of a function": ("utils.py", '"Jan", "Jan"', '"Jan", "Evelyn"', "prompts"),
    "a file of examples": ("shots.jsonl", "Jan has 1 and 1", "Eva has 1 and 1", "prompts"),
    "code of scores beside": ("helpers.py", "return 0", "return 1", "code"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", list(CHANGES))
def test_every_file_of_a_task_is_part_of_its_content(task, change):
    name, old, new, field = CHANGES[change]
    before = content(task)
    assert content(task) == before
    rewrite(task / name, old, new)
    assert getattr(content(task), field) != getattr(before, field)


@pytest.mark.slow
def test_a_task_in_another_place_has_the_same_content(task, tmp_path):
    before = content(task)
    (tmp_path / "other").mkdir()
    (task / "rows.jsonl").rename(tmp_path / "other" / "moved.jsonl")
    rewrite(task / "own.yaml", str(task / "rows.jsonl"), str(tmp_path / "other" / "moved.jsonl"))
    assert content(task) == before


@pytest.mark.slow
def test_a_changed_file_never_brings_back_old_scores(task, tmp_path, monkeypatch, capsys):
    from stars_fast.models.ouro import OuroForCausalLM
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "remote_code": False}
    model, out = write_tiny_ouro(tmp_path / "tiny", **sizes), tmp_path / "out"
    words = f"eval {model} --tasks {task}/own.yaml --turns 2 --max-new-tokens 4 --device cpu"
    words = [*words.split(), "--out", str(out)]

    def score():
        (result,) = json.loads((out / "results.json").read_text())["results"]
        return result["accuracy"]

    assert main(words) == 0
    assert score() == 0
    real, made = OuroForCausalLM.generate, []

    def generate(self, *args, **options):
        made.append(1)
        return real(self, *args, **options)

    monkeypatch.setattr(OuroForCausalLM, "generate", generate)
    rewrite(task / "helpers.py", "return 0", "return 1")
    import sys

    sys.modules.pop("helpers")  # as in a fresh process
    rewrite(task / "utils.py", "from helpers", "# again\nfrom helpers")
    assert main(words) == 0
    assert (score(), made) == (1, [])  # the generations of before, scored anew
    rewrite(task / "rows.jsonl", '"Answer": "3"', '"Answer": "4"')
    capsys.readouterr()
    assert main(words) == 2
    assert "holds generations of another setting: rows was" in capsys.readouterr().err
    fresh = [*words[:-1], str(tmp_path / "fresh")]
    assert main(fresh) == 0


def test_numbers_that_code_of_tasks_draws_are_the_same_and_others_go_on():
    import random

    import numpy as np

    from stars_fast.evaluation.harness import seeded

    random.seed(3)
    expected = [random.random() for _ in range(2)]
    random.seed(3)
    first = random.random()
    drawn = []
    for _ in range(2):
        with seeded():
            drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]
    assert [first, random.random()] == expected


SHUFFLED = """
import random
def process_docs(dataset):
    def drawn(doc):
        names = ["Ann", "Bob", "Cy", "Di"]
        random.shuffle(names)
        return {"Body": names[0] + doc["Body"], "Answer": names[0]}
    return dataset.map(drawn)
def score(doc, results):
    return {"exact_match": int(results[0].startswith(doc["Answer"]))}
"""


@pytest.mark.slow
def test_documents_that_are_drawn_are_the_same_each_time_they_are_looked_at(task):
    from lm_eval.api.model import LM

    from stars_fast.evaluation.harness import judge

    class Echo(LM):
        """It answers each prompt with the prompt's last line."""

        def generate_until(self, requests, disable_tqdm=False):
            return [request.args[0].splitlines()[-1] for request in requests]

        loglikelihood = loglikelihood_rolling = None

    (task / "utils.py").write_text(SHUFFLED)
    (opened,) = open_tasks([str(task / "own.yaml")], None, 6, None)
    before = opened.content
    found = judge(Echo(), opened.task)
    assert found["results"]["own"]["exact_match,none"] == 1
    assert len({doc["Answer"] for doc in opened.task.eval_docs}) > 1
    assert content(task) == before

"""`--samples`: draws, what is kept, and their scores."""

import json
import re
from statistics import mean, stdev

import pytest
import torch
from benchmark_data import row_of, write_rows
from tiny_models import llama, speaking_plainly

from stars_fast.cli import main
from stars_fast.evaluation.recording import Key
from stars_fast.evaluation.sampling import GumbelNoise

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

PAIRS = [(1, 2), (3, 7), (5, 2), (20, 4), (2, 30)]
CAP = 6
HOT = 1.5


def test_draws_are_those_of_the_softmax_at_the_temperature():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    count, temperature = 20000, 0.7
    noise = GumbelNoise(range(count), temperature, torch.device("cpu"))
    drawn = noise(None, logits.expand(count, -1)).argmax(-1)
    found = torch.bincount(drawn, minlength=5).double() / count
    wanted = (logits.double() / temperature).softmax(-1)
    error = (wanted * (1 - wanted) / count).sqrt()
    assert ((found - wanted).abs() <= 4 * error).all()
    assert found[4] == 0


def test_a_row_draws_the_same_whatever_is_beside_it_and_goes_on_drawing():
    logits = torch.zeros(3, 1000)
    device = torch.device("cpu")
    together, alone = GumbelNoise([5, 6, 7], 1.0, device), GumbelNoise([6], 1.0, device)
    steps = [(together(None, logits)[1], alone(None, logits[:1])[0]) for _ in range(3)]
    assert all(torch.equal(one, other) for one, other in steps)
    assert len({int(one.argmax()) for one, _ in steps}) == 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A standard one, quick."""
    from transformers import AutoTokenizer

    from stars_fast.data.tiny_tokenizer import TINY_VOCABULARY, train_tokenizer, write_tokenizer

    folder = tmp_path_factory.mktemp("models") / "plain"
    folder.mkdir()
    write_tokenizer(folder, train_tokenizer(TINY_VOCABULARY), 512)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    speaking_plainly(llama(), tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def targets(model, tmp_path_factory):
    """Right answers: what one of the samples says, and one that none does."""
    folder = tmp_path_factory.mktemp("before")
    write_rows(folder / "svamp.jsonl", [row_of("svamp", a, b, 0) for a, b in PAIRS])
    assert main(words_for(model, folder, folder / "out", "--samples", "4")) == 0
    found = responses(folder / "out")
    said = [last_number(found[doc, doc % 4]) for doc in range(len(PAIRS))]
    return [77 if number is None or doc == 3 else number for doc, number in enumerate(said)]


@pytest.fixture(scope="module")
def data(targets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [row_of("svamp", *pair, target) for pair, target in zip(PAIRS, targets, strict=True)]
    write_rows(folder / "svamp.jsonl", rows)
    return folder


def words_for(model, data, out, *more):
    words = f"eval {model} --tasks svamp --max-new-tokens {CAP} --device cpu --temperature {HOT}"
    return [*words.split(), "--data", str(data), "--out", str(out), *more]


def result_of(out):
    (result,) = json.loads((out / "results.json").read_text())["results"]
    return result


def samples_of(out):
    (file,) = out.glob("plain-*/svamp-temp1.5/samples.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def responses(out):
    return {(each["doc_id"], each["sample"]): each["response"] for each in samples_of(out)}


@pytest.fixture(scope="module")
def swept(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    assert main(words_for(model, data, out, "--samples", "4", "--batch-size", "3")) == 0
    return out


def last_number(text):
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


@pytest.mark.slow
def test_every_sample_is_kept_and_scored(swept, targets):
    found, result = responses(swept), result_of(swept)
    assert sorted(found) == [(doc, i) for doc in range(len(PAIRS)) for i in range(4)]
    assert len(set(found.values())) > len(PAIRS)
    verdicts = [
        [int(last_number(found[doc, i]) == target) for i in range(4)]
        for doc, target in enumerate(targets)
    ]
    assert 0 < sum(map(sum, verdicts)) < 4 * len(PAIRS)
    shares = [sum(each) / 4 for each in verdicts]
    assert (result["n"], result["samples_each"], result["temperature"]) == (len(PAIRS), 4, HOT)
    assert result["accuracy"] == pytest.approx(mean(shares))
    assert result["stderr"] == pytest.approx(stdev(shares) / len(PAIRS) ** 0.5)
    passed = [float(any(each)) for each in verdicts]
    assert result["pass_at"]["4"]["value"] == pytest.approx(mean(passed))
    assert result["pass_at"]["4"]["stderr"] == pytest.approx(stdev(passed) / len(PAIRS) ** 0.5)
    assert list(result["pass_at"]) == ["1", "2", "4"]
    heads = (swept / "results.md").read_text().splitlines()[0]
    assert f"svamp avg@4 (n = {len(PAIRS)} of 300)" in heads
    assert "svamp pass@4" in heads


@pytest.mark.slow
def test_a_sample_is_drawn_token_by_token(swept, model):
    """By hand, from the model's logits and the generator of the sample's seed."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer, llama = AutoTokenizer.from_pretrained(model), LlamaForCausalLM.from_pretrained(model)
    for sample in samples_of(swept)[::7]:
        key = Key.of(sample["prompt"], sample["doc_id"], sample["sample"])
        generator = torch.Generator().manual_seed(key.seed)
        ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
        made = []
        while len(made) < CAP and (not made or made[-1] not in (0, 2)):
            with torch.no_grad():
                logits = llama(ids).logits[0, -1].double()
            noise = torch.empty_like(logits).exponential_(generator=generator)
            made.append(int((logits / HOT - noise.log()).argmax()))
            ids = torch.cat([ids, torch.tensor([made[-1:]])], 1)
        said = tokenizer.decode([token for token in made if token not in (0, 2)])
        assert sample["response"] == said


@pytest.mark.slow
def test_samples_do_not_depend_on_the_batch_nor_on_where_a_sweep_stopped(
    model, data, swept, tmp_path, monkeypatch
):
    from transformers import LlamaForCausalLM

    real, calls = LlamaForCausalLM.generate, []

    def generate(self, *args, **options):
        calls.append(len(options["input_ids"]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    words = words_for(model, data, tmp_path, "--samples", "4", "--batch-size", "2")
    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    assert main(words) == 130
    assert main(words) == 0
    assert sum(calls) == 4 * len(PAIRS) + calls[2]  # of the batch that failed
    assert responses(tmp_path) == responses(swept)
    calls.clear()
    assert main(words) == 0
    assert calls == []


@pytest.mark.slow
def test_more_samples_go_on_from_fewer(model, data, swept, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    assert main(words_for(model, data, tmp_path, "--samples", "1")) == 0
    first = responses(tmp_path)
    assert first == {key: text for key, text in responses(swept).items() if key[1] == 0}
    assert result_of(tmp_path)["pass_at"]["1"]["value"] == result_of(tmp_path)["accuracy"]
    real, made = LlamaForCausalLM.generate, []

    def generate(self, *args, **options):
        made.append(len(options["input_ids"]))
        return real(self, *args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    assert main(words_for(model, data, tmp_path, "--samples", "4")) == 0
    assert sum(made) == 3 * len(PAIRS)
    assert responses(tmp_path) == responses(swept)
    assert main(words_for(model, data, tmp_path, "--samples", "2")) == 0
    assert sum(made) == 3 * len(PAIRS)
    assert len(samples_of(tmp_path)) == 2 * len(PAIRS)


CHOICE = {
    "task": "choice", "dataset_path": "json", "test_split": "test",
    "output_type": "multiple_choice", "doc_to_text": "{{Body}}", "doc_to_choice": ["a", "b"],
    "doc_to_target": 0,
}  # fmt: skip


@pytest.mark.slow
def test_mistakes_are_named(model, data, tmp_path, capsys):
    rows = {"data_files": {"test": str(data / "svamp.jsonl")}}
    choice, voting = tmp_path / "choice.yaml", tmp_path / "voting.yaml"
    choice.write_text(json.dumps(CHOICE | {"dataset_kwargs": rows}))
    drawn = {"output_type": "generate_until", "repeats": 3, "doc_to_target": "{{Answer}}"}
    drawn |= {"doc_to_choice": None, "generation_kwargs": {"until": []}}
    voting.write_text(json.dumps(CHOICE | {"dataset_kwargs": rows, "task": "voting"} | drawn))
    for words, message in (
        (["--tasks", "svamp", "--temperature", "1"], "--temperature: expected none without --samp"),
        (
            ["--tasks", "svamp", "--samples", "2", "--temperature", "0"],
            "--temperature: expected a value above 0, got 0; without --samples the answers are gre",
        ),
        (["--text", "x.txt", "--samples", "2"], "--samples is an option of --tasks"),
        (["--tasks", str(choice), "--samples", "2"], "--samples: expected tasks answered by gener"),
        (
            ["--tasks", str(voting), "--samples", "2"],
            "--samples: expected tasks that take one samp",
        ),
    ):
        where = ["--data", str(data)] if "svamp" in words else []
        assert main(["eval", str(model), *words, *where, "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert message in said, said

"""One command, one table: standard models beside Ouro, Huginn and looped decoders."""

import json
import re

import pytest
import torch
from benchmark_data import row_of, write_rows
from tiny_models import CAP, CLASSES, LENGTH, answer, write_models

from stars_fast.cli import main
from stars_fast.evaluation.kv_memory import key_values

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

pytestmark = pytest.mark.slow

TURNS = (2, 4, 8)
PAIRS = [(a, b) for a in range(1, 6) for b in (2, 7)]
DEPTHS = dict.fromkeys(("ouro", "huginn", "looped"), TURNS) | {"standard": (None,)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def prompt_of(a, b):
    asked = f"Question: Jan has {a} and {b}. What is {a} plus {b}?\nAnswer:"
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def said(models):
    """What each model says at each depth, each prompt by itself: (text, tokens)."""
    from transformers import AutoTokenizer

    found = {}
    for name, folder in models.items():
        model = CLASSES[name].from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for turns in DEPTHS[name]:
            found[name, turns] = [answer(model, tokenizer, prompt_of(*p), turns) for p in PAIRS]
    return found


def number_in(text):
    """The last number, by hand: what a pupil would point at."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


@pytest.fixture(scope="module")
def targets(said):
    """Right answers: for each question what one of the models says at one of its depths."""
    rows = list(said.values())
    chosen = [number_in(rows[(3 * i) % len(rows)][i][0]) for i in range(len(PAIRS))]
    return [7 if number is None else number for number in chosen]


@pytest.fixture(scope="module")
def swept(models, targets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [row_of("svamp", *p, target) for p, target in zip(PAIRS, targets, strict=True)]
    write_rows(folder / "svamp.jsonl", rows)
    paths = [str(models[name]) for name in ("standard", "ouro", "huginn", "looped")]
    words = f"--tasks svamp --turns 2,4,8 --max-new-tokens {CAP} --batch-size 4 --device cpu"
    where = ["--data", str(folder), "--out", str(folder / "out")]
    assert main(["eval", *paths, *words.split(), *where]) == 0
    return folder / "out"


def test_the_table_is_a_hand_count(swept, said, targets):
    results = json.loads((swept / "results.json").read_text())["results"]
    assert [(each["model"], each["turns"]) for each in results] == [
        (name, turns) for name in ("standard", "ouro", "huginn", "looped") for turns in DEPTHS[name]
    ]
    shares = []
    for each in results:
        answers = said[each["model"], each["turns"]]
        right = [number_in(text) == t for (text, _), t in zip(answers, targets, strict=True)]
        assert each["n"] == len(PAIRS)
        assert each["accuracy"] == pytest.approx(sum(right) / len(right))
        assert each["tokens"] == pytest.approx(sum(n for _, n in answers) / len(answers))
        assert each["tokens_per_second"] > 0
        shares.append(each["accuracy"])
    assert len(set(shares)) > 2
    lines = (swept / "results.md").read_text().splitlines()
    heads, _, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    assert heads[:3] == ["model", "turns", f"svamp (n = {len(PAIRS)} of 300)"]
    assert heads[3:] == ["KV/token", "KV at context", "tokens/s"]
    assert [row[:2] for row in rows] == [
        [each["model"], str(each["turns"] or "-")] for each in results
    ]
    assert [row[2].split(" ")[0] for row in rows] == [f"{100 * share:.2f}" for share in shares]
    assert (swept / "accuracy.png").exists() or (swept / "accuracy-svamp.png").exists()


def test_samples_are_those_generated_by_hand(swept, said):
    for (name, turns), answers in said.items():
        setting = "svamp" if turns is None else f"svamp-turns{turns}"
        (file,) = swept.glob(f"{name}-*/{setting}/samples.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(each["response"], each["tokens"]) for each in samples] == answers
        if turns is not None:
            assert {each["mean_turns"] for each in samples} == {turns}


SLOTS = {
    "standard": lambda turns: 2 * 2 * 8,  # layers x heads of keys x width of a head
    "ouro": lambda turns: turns * 1 * 4 * 8,
    "huginn": lambda turns: (1 + 2 * turns + 1) * 4 * 8,
    "looped": lambda turns: (1 + 2 * turns + 1) * 2 * 8,
}


def test_key_value_memory_is_a_count_of_slots(swept):
    results = json.loads((swept / "results.json").read_text())["results"]
    for each in results:
        size = 2 * SLOTS[each["model"]](each["turns"]) * 4  # keys and values, fp32
        assert each["kv_bytes_per_token"] == size
        assert (each["kv_bytes_at_context"], each["context_length"]) == (size * LENGTH, LENGTH)


@pytest.mark.parametrize("name", list(CLASSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_value_memory_is_that_of_the_real_cache(models, name, dtype):
    model = CLASSES[name].from_pretrained(models[name], dtype=dtype).eval()
    ids = torch.randint(3, 200, (1, 37))
    for turns in DEPTHS[name]:
        if turns is not None:
            model.config.set_depth(turns, None)
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert key_values(model, 37).context == held
        assert key_values(model, 37).token * 37 == held


def test_a_sliding_window_bounds_the_memory():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=16, max_position_embeddings=99,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        cache = model(torch.randint(1, 64, (1, 50)), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    found = key_values(model, 50)
    assert found.context == held
    assert found.token == 4 * 2 * 2 * 8 * 4

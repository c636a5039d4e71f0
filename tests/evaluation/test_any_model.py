"""One command, one table: standard models beside Ouro, Huginn and looped decoders."""

import json
import re
import shutil

import pytest
import torch
from benchmark_data import row_of, write_rows
from tiny_models import CAP, CLASSES, LENGTH, answer, write_models

from stars_fast.base.errors import ConfigError
from stars_fast.cli import main
from stars_fast.evaluation.kv_memory import key_values
from stars_fast.models.standard import find_standard

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


@pytest.mark.parametrize("name", ["standard", "ouro"])
def test_generation_settings_of_a_checkpoint_change_no_answer(models, said, tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(models[name], folder)
    file = folder / "generation_config.json"
    own = {"max_new_tokens": 2, "num_beams": 3, "repetition_penalty": 5.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    write_rows(tmp_path / "svamp.jsonl", [row_of("svamp", *p, 7) for p in PAIRS])
    words = f"--tasks svamp --turns 2 --max-new-tokens {CAP} --batch-size 4 --device cpu"
    where = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["eval", str(folder), *words.split(), *where]) == 0
    (found,) = (tmp_path / "out").glob("*/*/samples.jsonl")
    samples = [json.loads(line) for line in found.read_text().splitlines()]
    answers = said[name, None if name == "standard" else 2]
    assert [(each["response"], each["tokens"]) for each in samples] == answers


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


TEXT = "Jan has 3 pencils and 4 books. What is 3 plus 4? It is 7, of course."


def test_the_loss_of_a_text_of_all_of_them(models, tmp_path):
    """Of standard models one, at each number of turns of the others: as by the logits."""
    from transformers import AutoTokenizer

    (tmp_path / "a.txt").write_text(TEXT)
    names = ["standard", "huginn", "looped"]
    words = ["--text", str(tmp_path / "a.txt"), "--turns", "2,4", "--length", "16"]
    paths = [str(models[name]) for name in names]
    assert main(["eval", *paths, *words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "text-loss.json").read_text())["models"]
    assert list(written["standard"]["loss"]) == ["-"]
    for name in names:
        model = CLASSES[name].from_pretrained(models[name]).eval()
        ids = AutoTokenizer.from_pretrained(models[name])(TEXT).input_ids
        for depth, loss in written[name]["loss"].items():
            total = 0.0
            for start in range(0, len(ids), 15):
                row = torch.tensor([[0, *ids[start : start + 15]]])
                given = {} if depth == "-" else {"turns": int(depth)}
                with torch.no_grad():
                    said = model(row[:, :-1], use_cache=False, **given).logits[0].log_softmax(-1)
                total -= float(said.gather(1, row[0, 1:, None]).sum())
            assert loss == pytest.approx(total / len(ids), rel=1e-5)
            assert written[name]["tokens"] == len(ids)
    assert (tmp_path / "text-loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_standard_model_in_16_bits_keeps_its_positions(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, dtype="bfloat16")).to(
        torch.bfloat16
    ).save_pretrained(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = torch.randint(64, (1, 600), generator=torch.Generator().manual_seed(1))
    for dtype in (None, torch.bfloat16):
        mine = find_standard(str(tmp_path)).load(dtype)
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine(ids).logits, theirs(ids).logits)


def test_damaged_files_of_a_standard_model_are_named(models, tmp_path, capsys):
    folder = tmp_path / "damaged"
    shutil.copytree(models["standard"], folder)
    (tmp_path / "a.txt").write_text(TEXT)
    words = ["eval", str(folder), "--text", str(tmp_path / "a.txt"), "--device", "cpu"]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(words) == 2
    assert f"{weights}: the weights can't be read" in capsys.readouterr().err
    (folder / "tokenizer.json").write_text(
        "{}"
    )  # over which the tokenizers library raises Exception
    with pytest.raises(ConfigError, match="damaged: can't load its tokenizer"):
        find_standard(str(folder)).tokenizer()


def test_an_adapter_of_a_standard_model_is_one(models, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(models["standard"])
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "a.txt").write_text(TEXT)
    words = ["--text", str(tmp_path / "a.txt"), "--length", "99", "--device", "cpu"]
    folders = [str(tmp_path / "adapter"), str(models["standard"])]
    assert main(["eval", *folders, *words, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "text-loss.json").read_text())["models"]
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(models["standard"])(TEXT).input_ids
    row = torch.tensor([[0, *ids]])
    labels = row.masked_fill(torch.arange(row.shape[1]) < 1, -100)
    with torch.no_grad():
        wanted = float(adapted.eval()(row, labels=labels).loss)
    assert written["adapter"]["loss"]["-"] == pytest.approx(wanted, rel=1e-5)
    assert abs(written["standard"]["loss"]["-"] - wanted) > 1e-2
    assert not (tmp_path / "text-loss.png").exists()  # nothing to draw against turns


@pytest.mark.parametrize("shape", ["huginn", "llama", "olmo2"])
def test_huginn_is_lm_evals_model_at_any_depth(tmp_path, shape):
    """Rows of a batch, some padded, are those by themselves; so are likelihoods."""
    from lm_eval.api.instance import Instance
    from transformers import AutoTokenizer

    from stars_fast.evaluation.lm_model import StarsFastLM
    from stars_fast.models.huginn import HuginnForCausalLM
    from stars_fast.models.huginn.tiny import write_tiny_huginn

    folder = write_tiny_huginn(tmp_path / "tiny", shape=shape, seed=2)
    given = {"device": "cpu", "dtype": "float64", "batch_size": 3}
    judged = StarsFastLM(str(folder), turns=5, **given)
    assert judged.model.config.mean_recurrence == 5
    model = HuginnForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = ["1 + 2 =", "And what is 40 plus 2, Jan?", "7"]
    options = {"until": [], "do_sample": False, "max_gen_toks": 8}
    asked = [Instance("generate_until", {}, (each, options), 0) for each in prompts]
    made = judged.generate_until(asked, disable_tqdm=True)
    alone = [answer(model, tokenizer, prompt, 5, cap=8)[0] for prompt in prompts]
    assert made == [tokenizer.decode(tokenizer(t, add_special_tokens=False).input_ids,
                                     skip_special_tokens=True) for t in alone]  # fmt: skip
    asked = Instance("loglikelihood", {}, (prompts[1], " 42"), 0)
    ((value, _),) = judged.loglikelihood([asked], disable_tqdm=True)
    first, both = (tokenizer(text).input_ids for text in (prompts[1], prompts[1] + " 42"))
    with torch.no_grad():
        logits = model(torch.tensor([both[:-1]]), turns=5).logits.log_softmax(-1)[0]
    wanted = sum(float(logits[i - 1, both[i]]) for i in range(len(first), len(both)))
    assert value == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"mean_recurrence: expected .* got 0"):
        StarsFastLM(str(folder), turns=0, **given)


def test_turns_of_huginn_are_counted_and_an_adaptive_sweep_takes_fewer(models, tmp_path):
    rows = [row_of("svamp", *pair, 1) for pair in PAIRS[:3]]
    write_rows(tmp_path / "svamp.jsonl", rows)
    words = "--tasks svamp --turns 8 --tol 0,0.9 --tol-per token --max-new-tokens 4 --device cpu"
    where = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["eval", str(models["huginn"]), *words.split(), *where]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert results[0]["mean_turns"] == 8
    assert 1 < results[1]["mean_turns"] < 8


def test_what_is_no_causal_language_model_is_refused(models, tmp_path, capsys):
    """transformers would load each, and make up the weights that are not there."""
    import shutil

    from safetensors.torch import load_file, save_file
    from transformers import BartConfig, BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    bart = BartConfig(architectures=["BartForConditionalGeneration"])
    bart.save_pretrained(tmp_path / "bart")
    for name in ("bare", "headless"):
        shutil.copytree(models["standard"], tmp_path / name)
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]})
    )
    weights = load_file(tmp_path / "headless" / "model.safetensors")
    del weights["lm_head.weight"]
    file = tmp_path / "headless" / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    (tmp_path / "a.txt").write_text(TEXT)
    for name, message in (
        ("bert", r"expected a causal language model, .* got \['BertForMaskedLM'\]"),
        ("bart", "expected a causal language model, .* got an encoder and a decoder"),
        ("bare", r"expected a causal language model, .* got \['LlamaForSequenceClassification'\]"),
        ("headless", "lacks 1 weights of LlamaForCausalLM: lm_head.weight"),
    ):
        words = ["eval", str(tmp_path / name), "--text", str(tmp_path / "a.txt")]
        assert main([*words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert re.search(message, said), said


def test_tasks_in_the_training_of_huginn_leave_its_depth(models, tmp_path):
    from transformers import AutoTokenizer

    from stars_fast.models.huginn import HuginnForCausalLM
    from stars_fast.training.run.in_training import run_tasks

    write_rows(tmp_path / "rows.jsonl", [row_of("svamp", *pair, 1) for pair in PAIRS[:2]])
    task = {
        "task": "own", "dataset_path": "json", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test", "doc_to_text": "{{Body}}", "doc_to_choice": ["a", "b"],
        "doc_to_target": 0,
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(json.dumps(task))
    model = HuginnForCausalLM.from_pretrained(models["huginn"]).train()
    before = model.config.mean_recurrence
    tokenizer = AutoTokenizer.from_pretrained(models["huginn"])
    found = run_tasks(model, tokenizer, [str(tmp_path / "own.yaml")], [1, 3])
    assert list(found["own/acc,none"]) == [1, 3]
    assert (model.config.mean_recurrence, model.training) == (before, True)


def test_a_model_of_transformers_that_loops_by_itself_is_one(tmp_path):
    """Its class reads the keys that tell of the loop; one of another class does not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from stars_fast.base.errors import ConfigError
    from stars_fast.models.standard import find_standard

    if "hrm_text" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no hrm_text")
    config = CONFIG_MAPPING["hrm_text"]().to_dict() | {"architectures": ["HrmTextForCausalLM"]}
    assert config["H_cycles"] > 1
    for kind, cycles in (("hrm_text", config), ("llama", {"H_cycles": 2})):
        (tmp_path / kind).mkdir()
        told = cycles | {"model_type": kind}
        (tmp_path / kind / "config.json").write_text(json.dumps(told, default=str))
        (tmp_path / kind / "model.safetensors").write_bytes(b"")
    assert find_standard(str(tmp_path / "hrm_text")).label == "hrm_text"
    with pytest.raises(ConfigError, match=r"a configuration whose loop is known.*H_cycles"):
        find_standard(str(tmp_path / "llama"))

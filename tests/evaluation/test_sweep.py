"""`stars-fast eval DIR --tasks`: scores, resumption, what is written, mistakes."""

import json
import re
import shutil
import sys

import pytest
import torch
from benchmark_data import row_of, write_rows
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from stars_fast.base.errors import ConfigError
from stars_fast.cli import main
from stars_fast.evaluation import native_model, setting
from stars_fast.evaluation.sweep import SweepOptions, run_sweep

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

pytestmark = pytest.mark.slow

CAP = 20
TURNS = (1, 2, 4)
PAIRS = [(a, b) for a in range(1, 7) for b in (2, 7, 30)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    folder = tmp_path_factory.mktemp("models") / "tiny-ouro"
    write_tiny_ouro(folder, hidden_size=32, num_hidden_layers=1, remote_code=False)
    return speaking_plainly(folder)


def speaking_plainly(folder):
    """A model that says digits, letters and stops alone: of any other token the logit is half that
    of one of these."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    plain = [
        0,
        2,
        *(i for i in range(3, len(head)) if re.fullmatch("[0-9a-f]", said(tokenizer, i))),
    ]
    others = [i for i in range(len(head)) if i not in plain]
    head[others] = head[[plain[i % len(plain)] for i in others]] / 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def said(tokenizer, i):
    return tokenizer.decode([i]) if i < tokenizer.get_vocab_size() else ""


@pytest.fixture(scope="module")
def ouro(checkpoint):
    from transformers import AutoTokenizer

    from stars_fast.models.ouro import OuroForCausalLM

    model = OuroForCausalLM.from_pretrained(checkpoint)
    return model.eval(), AutoTokenizer.from_pretrained(checkpoint)


def prompt_of(a, b):
    asked = f"Question: Jan has {a} and {b}. What is {a} plus {b}?\nAnswer:"
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def direct(ouro, prompt, **depth):
    """Text, tokens without a stop, whether the cap ended it, and the turns and their tokens, of one
    prompt by itself."""
    from stars_fast.models.ouro import count_turns

    model, tokenizer = ouro
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with count_turns(model) as count:
        made = model.generate(
            ids, max_new_tokens=CAP, do_sample=False, eos_token_id=[2, 0], pad_token_id=0, **depth
        )[0, ids.shape[1] :].tolist()
    ended = made[-1] in (0, 2)
    tokens = made[:-1] if ended else made
    read = torch.cat(count.calls, 1)[0, : ids.shape[1] + max(len(tokens) - 1, 0)]
    text = tokenizer.decode(tokens)
    assert "Question:" not in text
    return {
        "response": text,
        "tokens": len(tokens),
        "cut": not ended,
        "turns": int(read.sum()),
        "read": len(read),
    }


def last_number(text):
    return int(re.findall(r"\d+", text)[-1])


@pytest.fixture(scope="module")
def rows(ouro, tmp_path_factory):
    """Questions whose right answers are what the model says at some depth, the folder of their
    file, and what it says at each."""
    said = {}
    for a, b in PAIRS:
        by_turns = {turns: direct(ouro, prompt_of(a, b), turns=turns) for turns in TURNS}
        texts = [each["response"] for each in by_turns.values()]
        if all(re.search(r"\d", text) for text in texts):
            said[a, b] = by_turns
    targets = {}
    for i, (pair, by_turns) in enumerate(said.items()):
        turns = (*TURNS, None)[i % 4]
        targets[pair] = 100 if turns is None else last_number(by_turns[turns]["response"])
    folder = tmp_path_factory.mktemp("data")
    write_rows(
        folder / "svamp.jsonl", [row_of("svamp", *pair, target) for pair, target in targets.items()]
    )
    return folder, said, targets


def words_for(checkpoint, rows, out, *more):
    folder = rows[0]
    given = f"eval {checkpoint} --tasks svamp --turns 1,2,4 --max-new-tokens {CAP} --device cpu"
    return [*given.split(), "--data", str(folder), "--out", str(out), *more]


@pytest.fixture(scope="module")
def swept(checkpoint, rows, tmp_path_factory):
    """The folder of a whole sweep, in batches of 5."""
    out = tmp_path_factory.mktemp("out")
    assert main(words_for(checkpoint, rows, out, "--batch-size", "5")) == 0
    return out


def results_of(out):
    return json.loads((out / "results.json").read_text())


def scores_of(out):
    """All of the results but how long they took."""
    timed = ("seconds", "tokens_per_second")
    return [
        {name: value for name, value in result.items() if name not in timed}
        for result in results_of(out)["results"]
    ]


def folder_of(out):
    (folder,) = out.glob("tiny-ouro-*")
    return folder


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_and_samples_are_those_of_generation_by_hand(swept, rows):
    _, said, targets = rows
    assert len(said) >= 8
    found = {result["turns"]: result for result in results_of(swept)["results"]}
    assert list(found) == list(TURNS)
    shares = []
    for turns, result in found.items():
        hits = [last_number(said[pair][turns]["response"]) == targets[pair] for pair in said]
        n = len(hits)
        share = sum(hits) / n
        shares.append(share)
        assert result["n"] == n
        assert result["accuracy"] == pytest.approx(share)
        assert result["stderr"] == pytest.approx((share * (1 - share) / (n - 1)) ** 0.5)
        assert result["cut"] == sum(said[pair][turns]["cut"] for pair in said) / n
        assert result["tokens"] == sum(said[pair][turns]["tokens"] for pair in said) / n
        assert result["mean_turns"] == turns
        samples = lines_of(folder_of(swept) / f"svamp-turns{turns}" / "samples.jsonl")
        for i, (pair, sample) in enumerate(zip(said, samples, strict=True)):
            assert {name: sample[name] for name in said[pair][turns]} == said[pair][turns]
            assert (sample["doc_id"], sample["prompt"]) == (i, prompt_of(*pair))
            assert sample["mean_turns"] == turns
            assert sample["target"] == str(targets[pair])
            assert sample["metrics"] == {"exact_match,none": int(hits[i])}
    assert all(0 < share < 1 for share in shares)


def test_what_is_written_tells_how_it_was_made(swept, checkpoint, rows):
    written = results_of(swept)
    assert {"stars-fast", "torch", "transformers", "lm-eval"} <= set(written["versions"])
    assert written["versions"]["torch"] == torch.__version__
    assert written["machine"]["threads"] == torch.get_num_threads()
    assert written["models"]["tiny-ouro"]["path"] == str(checkpoint)
    assert written["options"]["chat"] is True
    table = (swept / "results.md").read_text().splitlines()
    n = len(rows[1])
    assert table[0].split("|")[3].strip() == f"svamp (n = {n} of 300)"
    for line, result in zip(table[2:], written["results"], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        score = f"{100 * result['accuracy']:.2f} ± {100 * result['stderr']:.2f}"
        speed = f"{result['tokens_per_second']:.1f}"
        size = 2 * 32 * 4 * result["turns"]  # keys and values of one layer in fp32
        memory = [f"{size} B" if size < 1024 else "1.0 KiB", f"{size / 2:.1f} KiB (512)"]
        assert cells == ["tiny-ouro", str(result["turns"]), score, *memory, speed]
    assert (swept / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert not (swept / "compute.png").exists()


def counted(monkeypatch, fail_at=None):
    """The prompts of every batch that `generate` gets from now on; one of them fails."""
    from stars_fast.models.ouro import OuroForCausalLM

    batches = []
    real = OuroForCausalLM.generate

    def generate(self, *args, **options):
        if fail_at is not None and len(batches) == fail_at:
            raise KeyboardInterrupt
        batches.append(len(options["input_ids"]))
        return real(self, *args, **options)

    monkeypatch.setattr(OuroForCausalLM, "generate", generate)
    return batches


def test_a_stopped_sweep_goes_on_where_it_was(checkpoint, rows, swept, tmp_path, monkeypatch):
    words = words_for(checkpoint, rows, tmp_path, "--batch-size", "4")
    with monkeypatch.context() as patch:
        n = len(rows[1])
        per_setting = -(-n // 4)
        first = counted(patch, fail_at=per_setting + 1)  # in the middle of the second setting
        assert main(words) == 130
    unfinished = folder_of(tmp_path) / "svamp-turns2"
    assert not (unfinished / "metrics.json").exists()
    log = unfinished / "generations.jsonl"
    assert len(lines_of(log)) == 4
    with log.open("a") as file:
        file.write('{"prompt": "and here it di')  # as a process leaves it that is killed
    with monkeypatch.context() as patch:
        second = counted(patch)
        assert main(words) == 0
    assert sum(first) + sum(second) == 3 * n
    assert len(lines_of(log)) == n
    assert scores_of(tmp_path) == scores_of(swept)

    def fail(*given):
        raise AssertionError("loaded again")

    monkeypatch.setattr(native_model, "load_subject", fail)
    assert main(words) == 0
    assert scores_of(tmp_path) == scores_of(swept)


def test_a_larger_limit_goes_on_and_one_by_one_gives_the_same(
    checkpoint, rows, swept, tmp_path, monkeypatch
):
    words = words_for(checkpoint, rows, tmp_path, "--batch-size", "1")
    batches = counted(monkeypatch)
    assert main([*words, "--limit", "3"]) == 0
    assert [result["n"] for result in results_of(tmp_path)["results"]] == [3, 3, 3]
    assert main(words) == 0
    assert batches == [1] * 3 * len(rows[1])
    assert scores_of(tmp_path) == scores_of(swept)


def test_generations_of_another_setting_are_refused(checkpoint, rows, swept, tmp_path, capsys):
    for more, message in (
        (["--dtype", "bfloat16"], "dtype was the checkpoint's and is bfloat16"),
        (["--system", "Be brief."], "system was None and is Be brief."),
        (["--no-chat-template"], "chat template was .* and is None"),
    ):
        assert main(words_for(checkpoint, rows, swept, *more)) == 2
        said = capsys.readouterr().err
        assert re.search(f"holds generations of another setting: {message}", said)
        assert "--out" in said
    words = words_for(checkpoint, rows, swept)
    words[words.index(str(CAP))] = "16"
    assert main(words) == 2
    assert re.search("cap was 20 and is 16", capsys.readouterr().err)


def test_other_weights_and_other_rows_are_refused(checkpoint, tmp_path, capsys):
    copy, rows = tmp_path / "copy", tmp_path / "svamp.jsonl"
    shutil.copytree(checkpoint, copy)
    write_rows(rows, [row_of("svamp", 1, 2, 3)])
    words = f"eval {copy} --tasks svamp --turns 1 --max-new-tokens 4 --data {tmp_path}".split()
    words += ["--out", str(tmp_path / "out")]
    assert main(words) == 0
    write_rows(rows, [row_of("svamp", 1, 2, 4)])
    assert main(words) == 2
    assert "another setting: rows was" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
    assert main(words) == 0
    weights = load_file(copy / "model.safetensors")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert main(words) == 2
    assert "another setting: model.files was" in capsys.readouterr().err


def test_many_cut_generations_are_warned_of(checkpoint, rows, tmp_path, capsys):
    words = words_for(checkpoint, rows, tmp_path)
    words[words.index(str(CAP))] = "2"
    words[words.index("--turns") + 1] = "1"
    assert main([*words, "--limit", "4"]) == 0
    cut = results_of(tmp_path)["results"][0]["cut"]
    assert cut > 0.05
    said = capsys.readouterr().err
    assert f"warning: {cut:.0%} of the generations of svamp at 1 turns were cut at 2 tokens" in said


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_adaptive_depth(checkpoint, rows, ouro, tmp_path, per):
    """The mean turns are those that generation takes by itself, prompt by prompt."""
    tols = [0.0, 0.5, 0.05]
    options = SweepOptions(
        [str(checkpoint)], ["svamp"], [4], tols, limit=5, batch_size=3, device="cpu", cap=CAP,
        data=str(rows[0]), out=str(tmp_path), tol_per=per,
    )  # fmt: skip
    found = run_sweep(options)
    for result, tol in zip(found, tols, strict=True):
        alone = [
            direct(ouro, prompt_of(*pair), turns=4, tol=tol, tol_per=per)
            for pair in list(rows[1])[:5]
        ]
        taken = sum(each["turns"] for each in alone) / sum(each["read"] for each in alone)
        assert result.mean_turns == pytest.approx(taken)
        assert result.tol == (tol or None)
    assert found[0].mean_turns == 4
    assert found[1].mean_turns < found[2].mean_turns <= 4
    table = (tmp_path / "results.md").read_text().splitlines()
    assert [cell.strip() for cell in table[0].split("|")[3:5]] == ["tol", "mean turns"]
    assert [line.split("|")[4].strip() for line in table[2:]] == [
        f"{result.mean_turns:.2f}" for result in found
    ]
    assert (tmp_path / "compute.png").read_bytes().startswith(b"\x89PNG")


def test_several_tasks_and_models(checkpoint, rows, tmp_path, capsys):
    """A column a task and their average, each task counted once; models of one name by their
    paths; a figure a task."""
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    other = tmp_path / "b" / "tiny-ouro"
    write_tiny_ouro(other, hidden_size=32, num_hidden_layers=1, remote_code=False, seed=5)
    write_rows(tmp_path / "asdiv.jsonl", [row_of("asdiv", 1, 2, 3), row_of("asdiv", 3, 4, 7)])
    write_rows(tmp_path / "svamp.jsonl", [row_of("svamp", 1, 2, 3)])
    words = f"eval {checkpoint} {other} --tasks asdiv,svamp --turns 1,2 --max-new-tokens 4"
    out = tmp_path / "out"
    assert main([*words.split(), "--data", str(tmp_path), "--out", str(out)]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in table[0].strip("|").split("|")]
    tasks = ["asdiv (n = 2 of 2,305)", "svamp (n = 1 of 300)", "average"]
    assert heads == ["model", "turns", *tasks, "KV/token", "KV at context", "tokens/s"]
    assert [line.split("|")[1].strip() for line in table[2:]] == [str(checkpoint)] * 2 + [
        str(other)
    ] * 2
    figures = {path.name for path in out.glob("*.png")}
    assert figures == {"accuracy-asdiv.png", "accuracy-svamp.png", "accuracy-average.png"}


def test_mistakes_are_named(checkpoint, rows, tmp_path, monkeypatch, capsys):
    data = str(rows[0])
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    masked, again = tmp_path / "masked", tmp_path / "again"
    masked.mkdir()
    (masked / "config.json").write_text('{"model_type": "electra_like"}')
    again.mkdir()
    (again / "config.json").write_text('{"model_type": "llama", "num_loops": 2}')
    (again / "model.safetensors").write_bytes(b"")
    silent = tmp_path / "silent"
    silent.mkdir()
    for file in checkpoint.iterdir():
        (silent / file.name).write_bytes(file.read_bytes())
    settings = json.loads((silent / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (silent / "tokenizer_config.json").write_text(json.dumps(settings))
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "vllm", None)
    for words, message in (
        (
            f"{other} --tasks svamp",
            r"other has a config.json and no weights: expected model.safetensors",
        ),
        (
            f"{masked} --tasks svamp",
            r"expected a looped model \(model_type .*ouro\) or another causal language model of",
        ),
        (f"{again} --tasks svamp", r"expected a configuration whose loop is known .*num_loops=2"),
        (f"{run} --tasks svamp", "is no run of an Ouro model"),
        (f"{tmp_path}/nothing --tasks svamp", "nothing does not exist: expected a run folder"),
        (f"{checkpoint} --tasks svamp --step 3", "--step: expected none for a checkpoint"),
        (f"{silent} --tasks svamp", "no chat template; evaluate it with --no-chat-template"),
        (f"{checkpoint} --tasks svamp --tol 2", r"--tol: expected a value in \[0, 1\), got 2"),
        (f"{checkpoint} --tasks svamp --tol x", "expected numbers like 0,0.1, got 'x'"),
        (f"{checkpoint} --tasks svamp", "--max-new-tokens: expected less than the 512 tokens"),
        (f"{checkpoint} --tasks svamp --backend vllm", "--backend vllm needs vllm: pip install"),
        (f"{checkpoint} --tasks svamp --backend vllm --tol 0.1", "--tol: expected none"),
        (
            f"{checkpoint} --tasks svamp --num-fewshot -1",
            "--num-fewshot: expected 0 or more, got -1",
        ),
        (f"{checkpoint} --tasks svamp --length 7", "--length is an option of --text"),
        (f"{checkpoint} --batch-size 7", "--batch-size is an option of --tasks and --text"),
        (f"{checkpoint} --tasks svamp --text x.txt", "not allowed with --tasks"),
        (f"{checkpoint} --tasks ,", "expected names like gsm8k,math500"),
        (f"{checkpoint} --tasks svamp --no-chat-template --system x", "--system: expected none"),
    ):
        words = ["eval", *words.split(), "--out", str(tmp_path / "out")]
        words += ["--data", data] if "--length" not in words and "--tasks" in words else []
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code
        assert code == 2
        said = capsys.readouterr().err
        assert re.search(message, said), said


def test_a_metric_that_a_task_does_not_give_is_an_error():
    from stars_fast.evaluation.benchmarks import OpenTask

    task = OpenTask("svamp", None, "math_verify,none", 300)
    asked = setting.Setting(task, 2, 0.0, "sequence")
    with pytest.raises(ConfigError, match="svamp: lm-eval gave no metric math_verify,none, but"):
        setting._measures({"exact_match,none": 0.5}, [], asked, None)

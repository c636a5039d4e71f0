"""Inputs of the command line that are mistakes: the words, and what the one line says of them."""

import json
import os
import shutil
from pathlib import Path

RECIPE = """\
description: tiny
method: stars
model: {d_model: 16, n_heads: 2, d_ff: 16}
data: {digits: 1, train_samples: 30, test_samples: 9}
depth: {mu: 1.0, high: 4}
train: {steps: 1, batch_size: 8, threads: 1, report_to: []}
eval: {turns: [1], limit: 5}
"""
CHATS = """\
task: ouro
method: stars
model: {path: tiny, width: 16, layers: 1}
data: {source: tiny-chat, samples: 8, max_length: 96, workers: 1, cache: cache}
depth: {high: 3}
train: {steps: 1, batch_size: 2, threads: 1, report_to: []}
eval: {turns: []}
"""

RECIPES = {
    "tiny.yaml": RECIPE,
    "chats.yaml": CHATS,
    "text.yaml": "model: {family: looped_lm, d_model: 16, n_heads: 2}\nmethod: stars\n"
    "data: {kind: text, source: wiki.txt, length: 16}\ntrain: {steps: 1, batch_size: 2}\n",
    "empty.yaml": "# nothing\n",
    "list.yaml": "[1, 2]\n",
    "broken.yaml": "a: [\n",
    "twice.yaml": "method: stars\ntrain: {steps: 1}\nname: x\ntrain: {batch_size: 2}\n",
    "lr.yaml": "method: stars\noptim:\n  lr: 1\n  clip: 1\n  lr: 2\n",
    "merged.yaml": "x: &x {steps: 1}\nmethod: stars\ntrain:\n  <<: *x\n  <<: *x\n",
    "itself.yaml": "method: stars\ntrain: &t\n  steps: *t\n",
    "both.yaml": "base: tiny.yaml\ntrain: {steps: 1, epochs: 1}\n",
    "pair.yaml": "task: ouro\nmethod: sft\nmodel: {family: ouro}\ndata: {kind: chats}\n",
    "own.yaml": "base: own.yaml\n",
    "number.yaml": "base: 3\n",
    "orphan.yaml": "base: nowhere\n",
    "flat.yaml": "base: tiny.yaml\ntrain: 3\n",
    "unknown.yaml": "base: tiny.yaml\ntrain: {stpes: 3}\n",
    "section.yaml": "base: tiny.yaml\ntrian: {steps: 3}\n",
    "dotted.yaml": "base: tiny.yaml\ntrain.steps: 3\n",
    "typed.yaml": "base: tiny.yaml\ntrain: {steps: [3]}\n",
    "yes.yaml": "base: tiny.yaml\npenalty: {detach: 1.5}\n",
}

SUM = {"num1": 1, "num2": 2, "expression": "1 + 2", "answer": 3}


def chat(*messages):
    return {"messages": list(messages)}


def say(role, content, **others):
    return {"role": role, "content": content, **others}


ROWS = {
    "null.jsonl": [{"messages": None}] * 3,
    "none.jsonl": [{"messages": []}] * 3,
    "calls.jsonl": [chat(say("user", "q"), say("assistant", "", tool_calls=[{"name": "f"}]))] * 3,
    "thoughts.jsonl": [chat(say("user", "q"), say("assistant", "a", reasoning_content="t"))] * 3,
    "users.jsonl": [chat(say("user", "q"))] * 3,
    "spoken.jsonl": [chat({"speaker": "a", "text": "b"})] * 3,
    "numbers.jsonl": [chat(say("user", 1))] * 3,
    "pairs.jsonl": [{"task": "q", "reply": "a"}] * 3,
    "several.jsonl": [{"problem": "q", "solution": "a", "question": "q", "answer": "a"}] * 3,
    "counts.jsonl": [{"question": 1, "answer": 2}] * 3,
    "good.jsonl": [chat(say("user", "q"), say("assistant", "a"))] * 9,
}


def write_files(folder: Path) -> None:
    """Write everything but models to `folder`."""
    for name, text in RECIPES.items():
        (folder / name).write_text(text)
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "wiki.txt").write_text("One and two are three. " * 20)
    (folder / "latin.txt").write_bytes("café ".encode("latin-1") * 20)
    (folder / "utf16.yaml").write_text(RECIPE, encoding="utf-16")
    (folder / "nothing.jsonl").write_text("")
    (folder / "nothing.txt").write_text("")
    (folder / "broken.jsonl").write_text('{"messages": [\n')
    (folder / "rows.txt").write_text("question,answer\n1,2\n")
    double = json.dumps(SUM).replace('"num2"', '"num1": 1, "num2"')
    for name, line in {
        "wrong.jsonl": json.dumps(SUM | {"answer": 4}),
        "double.jsonl": double,
        "short.jsonl": '{"num1": 1}',
        "digits.jsonl": json.dumps(SUM | {"num1": 11}),
        "sums.jsonl": json.dumps(SUM),
    }.items():
        (folder / name).write_text(line + "\n")
    (folder / "file").write_text("x")
    (folder / "full").mkdir()
    (folder / "full" / "thing").write_text("x")
    run = folder / "runs" / "bad"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("a: [\n")
    (folder / "runs" / "bare").mkdir()
    (folder / "runs" / "bare" / "metrics.jsonl").write_text("")


def write_models(folder: Path) -> None:
    """Write a whole Ouro, `whole`, and copies of it with a fault each."""
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    whole = folder / "whole"
    write_tiny_ouro(
        whole, seed=0, hidden_size=16, intermediate_size=32, num_hidden_layers=1, remote_code=False
    )
    for name, change in FAULTS.items():
        change(Path(shutil.copytree(whole, folder / name)))


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def _fill(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def _lose(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def _set(**fields):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"xx")


def _others_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    known = json.loads(file.read_text())
    known["model"]["vocab"]["1"] = 5000
    file.write_text(json.dumps(known))


FAULTS = {
    "m-cut": _cut,
    "m-garbage": _fill("model.safetensors", "garbage!" * 9),
    "m-empty": _fill("model.safetensors", ""),
    "m-pickle": _pickle,
    "m-no-config": _lose("config.json"),
    "m-no-weights": _lose("model.safetensors"),
    "m-no-tokenizer": _lose("tokenizer.json", "tokenizer_config.json"),
    "m-half-tokenizer": _lose("tokenizer.json"),
    "m-bad-config": _fill("config.json", "{"),
    "m-list-config": _fill("config.json", "[]"),
    "m-bad-tokenizer": _fill("tokenizer.json", "{"),
    "m-empty-tokenizer": _fill("tokenizer.json", "{}"),
    "m-other-tokens": _others_tokens,
    "m-turns": _set(total_ut_steps="four"),
    "m-heads": _set(num_attention_heads=3),
    "m-size": _set(hidden_size=32),
    "m-type": _set(model_type="llama"),
}

T, C, X = "train tiny.yaml", "train chats.yaml", "train text.yaml"

SETTINGS = {
    "train": "usage: stars-fast train RECIPE",
    "train --steps 3": "usage: stars-fast train RECIPE",
    "train nothing": "no recipe, YAML file or run folder named 'nothing'",
    "train no.yaml": "cannot read the recipe no.yaml: No such file or directory",
    "train full": "full is a folder without config.yaml",
    "train empty.yaml": "recipe empty.yaml is empty",
    "train list.yaml": "recipe list.yaml: expected a mapping, got list",
    "train broken.yaml": "recipe broken.yaml: not YAML: expected the node content, but found",
    "train utf16.yaml": "begins as UTF-16",
    "train latin.txt": "no recipe, YAML file or run folder named 'latin.txt'",
    "train twice.yaml": "recipe twice.yaml: train is there twice, in line 2 and in line 4",
    "train lr.yaml": "recipe lr.yaml: optim.lr is there twice, in line 3 and in line 5",
    "train merged.yaml": "train.<< is there twice, in line 4 and in line 5",
    "train itself.yaml": "holds itself, by an alias of its own anchor",
    "train both.yaml": "train: epochs: expected none beside steps, 1, got 1",
    "train pair.yaml": "task: expected none beside model.family and data.kind",
    "train own.yaml": "is its own base",
    "train number.yaml": "base: expected the name of a recipe, got 3",
    "train orphan.yaml": "no recipe, YAML file or run folder named 'nowhere'",
    "train flat.yaml": "train: expected a mapping, got 3",
    "train unknown.yaml": "unknown field train.stpes; did you mean train.steps?",
    "train section.yaml": "unknown field trian; did you mean train?",
    "train dotted.yaml": "unknown field train.steps; did you mean",
    "train typed.yaml": "train.steps: expected int, got [3]",
    "train yes.yaml": "penalty.detach: expected bool, got 1.5",
    "train runs/bad": "recipe runs/bad: not YAML",
    f"{T} --stpes 3": "unknown field stpes; did you mean steps?",
    f"{T} steps 3": "expected --field value, got 'steps'",
    f"{T} --steps": "--steps needs a value",
    f"{T} --steps --lr 1": "--steps needs a value",
    f"{T} --steps many": "train.steps: expected int, got 'many'",
    f"{T} --steps 1.5": "train.steps: expected int, got '1.5'",
    f"{T} --steps 0": "train: steps: expected at least 1 or none, got 0",
    f"{T} --steps 3 --steps 4": "train.steps is given twice: --steps 3 and --steps 4",
    f"{T} --steps 3 --train.steps=3": "train.steps is given twice: --steps 3 and --train.steps 3",
    f"{T} --steps 3 --epochs 1": "train: epochs: expected none beside steps, 3, got 1",
    f"{T} --epochs 0": "train: epochs: expected a positive number, got 0",
    f"{T} --epochs nan": "train.epochs: expected float, got 'nan'",
    f"{T} --lr nan": "optim.lr: expected float, got 'nan'",
    f"{T} --lr -1": "optim: lr: expected at least 0, got -1",
    f"{T} --betas 0.9": "optim: betas: expected two numbers",
    f"{T} --clip 0": "optim: clip: expected a positive number or none, got 0",
    f"{T} --schedule linear": "optim.schedule: expected one of cosine|wsd, got 'linear'",
    f"{T} --min_lr_ratio 2": "optim: min_lr_ratio: expected a value in [0, 1], got 2",
    f"{T} --warmup_steps 1.5": "warmup_steps: expected a whole number of steps, or a fraction",
    f"{T} --method adam": "method: expected one of sft,",
    f"{T} --method sft": "method sft trains at a fixed number of turns but depth.law is lognormal",
    f"{T} --depth.law fixed": "method stars draws the number of turns but depth.law is fixed",
    f"{T} --depth.law gamma": "depth: law: expected one of",
    f"{T} --depth.low 9": "depth: high: expected at least low=9, got 4",
    f"{T} --depth.sigma 0": "depth: sigma: expected a positive finite number, got 0",
    f"{T} --penalty.weight 2": "penalty: weight: expected >= 0, and <= 1",
    f"{T} --penalty.weight -1": "penalty: weight: expected >= 0",
    f"{T} --penalty.at last": "penalty: detach: expected false with at=last",
    f"{T} --penalty.fraction 0": "penalty: fraction: expected a value in (0, 1], got 0",
    f"{T} --penalty.wieght 1": "unknown field penalty.wieght; did you mean penalty.weight?",
    f"{T} --power_steps 0": "penalty: power_steps: expected at least 1, got 0",
    f"{T} --penalty.draw rows": "penalty.draw: expected one of samples|micro-batches, got 'rows'",
    f"{T} --batch_size 0": "train: batch_size: expected at least 1, got 0",
    f"{T} --batch_size 8 --accumulation 3": "batch_size: expected a multiple of accumulation",
    f"{T} --micro_batch_size 3": "batch_size: expected a multiple of micro_batch_size",
    f"{T} --accumulation 2 --micro_batch_size 2": "accumulation: expected none beside micro",
    f"{T} --penalty.fraction 0.3 --penalty.draw micro-batches": "expected a whole number of the 1",
    f"{T} --device tpu": "train.device: expected one of auto|cpu|cuda, got 'tpu'",
    f"{T} --precision half": "precision: expected one of mixed|float32|bfloat16, got 'half'",
    f"{T} --report_to mlflow": "train: report_to: expected some of",
    f"{T} --parallel.shard 2": "parallel: shard goes with kind hsdp, got 2",
    f"{T} --offload true": "parallel: offload goes with kind fsdp or hsdp",
    f"{T} --parallel.kind fsdp": "parallel.kind: expected auto or ddp with model.family looped_lm",
    f"{T} --stochastic_rounding true": "optim.stochastic_rounding is for precision bfloat16",
    f"{T} --lora.rank 0": "lora: rank: expected an integer >= 1, got 0",
    f"{T} --lora.rank 2 --freeze head": "train.freeze: expected none with lora.rank",
    f"{T} --per_turn true": "lora: per_turn: expected false, got true",
    f"{T} --family gpt": "model.family: expected one of",
    f"{T} --family ouro --model.family huginn": "model.family is given twice",
    f"{T} --data.kind images": "data.kind: expected one of chats, parity, sums, text, got 'images'",
    f"{T} --task maths": "task: expected one of addition, ouro, got 'maths'",
    f"{T} --n_heads 5": "model: n_heads must divide d_model",
    f"{T} --model.max_length 3": "model.max_length: expected at least 6 for the data, got 3",
    f"{T} --digits 12": "data: digits: expected at most 9, got 12",
    f"{T} --eval.turns 0": "eval: turns: expected a positive number, got [0]",
    f"{T} --eval.turns 1,x": "eval.turns: expected int, got 'x'",
    f"{T} --recompute all": "memory.recompute: expected one of auto|none|selective|turn|layer, got",
    f"{T} --budget 0": "memory: budget: expected a number in (0, inf), got 0",
    f"{C} --data.prompt q": "prompt and answer must come together, got 'q' and None",
    f"{C} --data.prompt q --data.answer a --data.messages m": "messages: expected none beside",
    f"{C} --row_length 50": "row_length: expected at least max_length, 96, or none, got 50",
    f"{C} --supervise user": "data.supervise: expected one of assistant|all, got 'user'",
    f"{C} --model.width 20": "model: width: expected a multiple of 16, got 20",
    f"{C} --gate trained": "model: gate: expected frozen or ignored",
    f"{C} --family looped_lm": "data.packing: expected false with model.family looped_lm",
    f"{C} --data.source=": "data: source: expected text, got none",
    f"{C} --family looped_lm --packing false --tokenizer none": "model.tokenizer: expected a hub",
    "train ouro-tiny --eval.tasks gsm8k --eval.turns=": "eval.turns: expected a number of turns",
    f"{T} --out=": "out: expected the name of a folder, got ''",
    f"{T} --out runs/\0": r"out: expected the name of a folder, got 'runs/\x00'",
    f"{T} --out runs/\ud800": "out: expected the name of a folder, got",
    f"{T} --name=": "name: expected the name of a folder, got ''",
    f"{T} --name ..": "name: expected the name of a folder, got '..'",
    f"{T} --out file": "file can't be a run folder: Not a directory",
    f"{T} --out full": "full exists; continue that run with --resume, or choose another folder",
    f"{T} --out file/run": "file/run",
    "train runs/none --resume": "--resume: runs/none does not exist, so there is no run",
    f"{T} --resume --out runs/none": "--resume: runs/none does not exist",
    f"{T} --resume --out runs/bare": "runs/bare holds no config.yaml",
    f"{T} --resume --out runs/bad": "runs/bad",
}
"""Mistakes in settings, told before data and model are loaded."""

DATA = {
    f"{T} --train_samples 100": "train_samples and test_samples must fit into the 81 sums",
    f"{T} --train_file no.jsonl": "data: no.jsonl: No such file or directory",
    f"{T} --train_file wrong.jsonl": "wrong.jsonl, line 1: answer: expected 1 + 2 = 3, got 4",
    f"{T} --train_file double.jsonl": "double.jsonl, line 1: not valid JSON (key 'num1' is there",
    f"{T} --train_file short.jsonl": "short.jsonl, line 1: missing key 'num2'",
    f"{T} --train_file digits.jsonl": "digits.jsonl, line 1: num1: expected 1 digits, got 11",
    f"{T} --train_file nothing.jsonl": "nothing.jsonl: expected at least one sum",
    f"{T} --train_file latin.txt": "latin.txt: expected text in UTF-8, got byte 0xe9",
    f"{T} --train_file sums.jsonl --test_file sums.jsonl": "test_file: expected no sums of train",
    f"{X} --data.source no.txt": "data.source: expected a text file or a glob of some",
    f"{X} --data.source latin.txt": "data.source: latin.txt: expected text in UTF-8",
    f"{X} --data.source nothing.txt": "data.source: expected a token at least, got none",
    f"{X} --validation 999": "data.validation: expected less than the",
    f"{C} --data.source no.jsonl": "data.source: expected a hub id, an existing file or folder",
    f"{C} --data.source no/*.jsonl": "data.source: no file fits 'no/*.jsonl'",
    f"{C} --data.source rows.txt": "data.source: expected files of one kind among .parquet",
    f"{C} --data.source nothing.jsonl": "data.source: nothing.jsonl is empty",
    f"{C} --data.source broken.jsonl": "data.source: can't load broken.jsonl",
    f"{C} --data.source pairs.jsonl": "data.source: expected one of the columns messages,",
    f"{C} --data.source several.jsonl": "or name its own with data.messages",
    f"{C} --data.source counts.jsonl": "data.prompt: expected a column of text, got 'question'",
    f"{C} --data.source good.jsonl --data.messages talk": "data.messages: expected one of the col",
    f"{C} --data.source good.jsonl --data.split test": "split test",
    f"{C} --data.source good.jsonl --data.subset x": "data.subset: expected none for files",
    f"{C} --data.source null.jsonl": "expected a conversation at least, got none: 3 of the source",
    f"{C} --data.source none.jsonl": "expected a conversation at least, got none: 3 of the source",
    f"{C} --data.source calls.jsonl": "none: 0 of the source's 3 without text, 3 for tool_calls",
    f"{C} --data.source thoughts.jsonl": "3 for reasoning_content",
    f"{C} --data.source users.jsonl": "no row for train has a token to predict",
    f"{C} --data.source spoken.jsonl": "expected a list of messages with role and content, or from",
    f"{C} --data.source numbers.jsonl": "data.messages: content in 'messages': expected text",
    f"{C} --data.source good.jsonl --validation 9": "data.validation must leave rows to train on",
    f"{C} --max_length 3": "has a token to predict",
    f"{C} --data.cache file": "data.cache: can't write the tokens to file/chats",
    f"{C} --model.path gone": "model.path gone, model.attention sdpa: gone does not exist here",
    f"{C} --model.path ./gone": "./gone does not exist: expected a run folder",
    f"{C} --model.path runs/gone": "runs/gone does not exist: expected a run folder",
    f"{C} --model.path file": "file is a file: expected a run folder",
    f"{C} --model.path full": "full holds no config.yaml and no config.json (thing)",
    f"{C} --model.attention flash": "model.attention flash",
    f"{C} --freeze nothing_such": "train.freeze",
    f"{C} --model.path m-cut": "m-cut/model.safetensors: the weights can't be read, the file is",
    f"{C} --model.path m-garbage": "m-garbage/model.safetensors: the weights can't be read",
    f"{C} --model.path m-empty": "m-empty/model.safetensors: the weights can't be read",
    f"{C} --model.path m-pickle": "m-pickle/pytorch_model.bin: the weights can't be read",
    f"{C} --model.path m-no-config": "m-no-config holds a tokenizer alone, no config.json",
    f"{C} --model.path m-no-weights": "m-no-weights has a config.json and no weights",
    f"{C} --model.path m-no-tokenizer": "m-no-tokenizer has no tokenizer: expected tokenizer.json",
    f"{C} --model.path m-half-tokenizer": "can't load its tokenizer: tokenizer.json is missing",
    f"{C} --model.path m-bad-config": "m-bad-config/config.json: can't be read as JSON in UTF-8",
    f"{C} --model.path m-list-config": "m-list-config/config.json: expected a mapping, got list",
    f"{C} --model.path m-bad-tokenizer": "m-bad-tokenizer: can't load its tokenizer: EOF while",
    f"{C} --model.path m-empty-tokenizer": "m-empty-tokenizer: can't load its tokenizer: Model mis",
    f"{C} --model.path m-other-tokens": "data: token 5000, '1', is beyond the 320",
    f"{C} --model.path m-turns": "total_ut_steps: expected an integer >= 1, got 'four'",
    f"{C} --model.path m-heads": "num_key_value_heads must divide num_attention_heads, got 4 and 3",
    f"{C} --model.path m-size": "the checkpoint does not fit the model",
    f"{C} --model.path m-type": "expected model_type ouro in its config.json, got 'llama'",
}
"""Mistakes in files, told when they are read."""

COMMANDS = {
    "": "the following arguments are required: COMMAND",
    "trian": "invalid choice: 'trian'",
    "eval": "the following arguments are required: DIR",
    "eval nowhere": "nowhere is not a run folder: there is no such folder",
    "eval full": "full holds no config.yaml and no config.json (thing)",
    "eval runs/bad": "runs/bad/config.yaml can't be read: not YAML",
    "eval runs/bad --turns 1,x": "expected a positive integer, got 'x'",
    "eval runs/bad --turns 0": "expected a positive integer, got '0'",
    "eval runs/bad --turns 1 --turns 2": "argument --turns: given twice",
    "eval runs/bad --tol 1": "--tol: expected a value in [0, 1), got 1.0",
    "eval runs/bad --tol-per token": "--tol-per: expected --tol beside it",
    "eval runs/bad --tol x": "expected numbers like 0,0.1, got 'x'",
    "eval runs/bad --column text": "--column is an option of --text",
    "eval runs/bad --tasks gsm8k --text wiki.txt": "--text: not allowed with --tasks",
    "eval runs/bad --tasks ,": "expected names like gsm8k,math500",
    "eval whole --text no.txt": "cannot read --text no.txt: No such file or directory",
    "eval whole --text wiki.txt --column x": "--column: expected none for a .txt file",
    "eval whole --text latin.txt": "cannot read --text latin.txt",
    "eval whole --text nothing.txt": "--text nothing.txt: texts: expected a token at least",
    "eval whole --text good.jsonl": "--column: expected one of the columns ['messages']",
    "eval whole --text wiki.txt --step 3": "--step: expected none for a checkpoint",
    "eval whole --text wiki.txt --device tpu": "--device: expected cpu, cuda, cuda:1",
    "eval m-cut --text wiki.txt": "m-cut/model.safetensors: the weights can't be read",
    "eval m-no-tokenizer --text wiki.txt": "m-no-tokenizer has no tokenizer",
    "eval m-type --text wiki.txt": "m-type: model: expected a configuration whose loop",
    "eval whole --text wiki.txt --out file": "--out file can't be made",
    "analyze": "the following arguments are required: RUN",
    "analyze whole": "whole is no run folder; for a checkpoint or a hub id give samples",
    "analyze whole --tol 2": "expected a number in (0, 1), got '2'",
    "analyze whole --turns 1": "--turns: expected at least 2, got 1",
    "analyze whole --turns 4 --jacobian-at 9": "--jacobian-at: expected at most --turns, 4, got 9",
    "analyze whole --seed 1 --seed 2": "argument --seed: given twice",
    "analyze whole --text no.txt": "cannot read --text no.txt",
    "export": "the following arguments are required: RUN, DIR",
    "export whole full": "out: expected a new or empty folder",
    "export nowhere new": "nowhere does not exist here and can't be loaded from the hub",
    "export whole new --step 3": "--step: expected none for a checkpoint, which whole is, got 3",
    "export whole new --turns 0": "expected a positive integer, got '0'",
    "export whole new --dtype int8": "argument --dtype: invalid choice: 'int8'",
    "export whole new --adapter keep": "adapter",
    "export m-cut new": "m-cut/model.safetensors: the weights can't be read",
    "recipes now": "no recipe, YAML file or run folder named 'now'",
}
"""Mistakes in other commands."""

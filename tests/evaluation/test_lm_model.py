"""Ouro as lm-eval's model `stars_fast`, and lm-eval's command line with it."""

import json
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from benchmark_data import SUMS, row_of, write_rows

from stars_fast.base.errors import ConfigError
from stars_fast.cli import main

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")


@pytest.fixture(scope="module", autouse=True)
def _read_once():
    """lm-eval reads its own files of tasks, over ten thousand, for each index anew; in this module
    what it read the first time serves all. Folders that it is told of are read each time."""
    from lm_eval.tasks._index import TaskIndex

    build, own = TaskIndex.build, Path(lm_eval.__file__).parent / "tasks"
    read = cache(lambda: build([own]))

    def built(paths):
        parts = [read() if path == own else build([path]) for path in paths]
        return {name: entry for part in parts for name, entry in part.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "build", staticmethod(built))
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One whose settings know no stop but the end of the text, as the published ones."""
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    folder = tmp_path_factory.mktemp("models") / "tiny-ouro"
    write_tiny_ouro(folder, hidden_size=32, num_hidden_layers=1, remote_code=False, seed=3)
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 0}')
    return folder


@pytest.fixture(scope="module")
def model(checkpoint):
    from stars_fast.evaluation.lm_model import StarsFastLM

    return StarsFastLM(str(checkpoint), device="cpu", batch_size=4, dtype="float64")


def requests(prompts, **options):
    from lm_eval.api.instance import Instance

    options = {"until": [], "do_sample": False, "max_gen_toks": 16} | options
    return [
        Instance("generate_until", {}, (prompt, options), i) for i, prompt in enumerate(prompts)
    ]


TOL = 0.8
"""At which some tokens of a short text come to rest within 6 turns, each after its own number."""

PROMPTS = [f"<|im_start|>user\n{a} + {b}?<|im_end|>\n<|im_start|>assistant\n" for a, b in SUMS]


def alone(model, prompt, **options):
    ids = model.tokenizer(prompt, return_tensors="pt").input_ids
    given = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}
    return model.model.generate(ids, **(given | options))[0, ids.shape[1] :]


def test_importing_the_module_registers_it(model):
    from lm_eval.api import registry

    assert registry.get_model("stars_fast") is type(model)
    assert issubclass(type(model), registry.get_model("hf"))


def test_turns_and_tol_reach_the_model(checkpoint):
    from stars_fast.evaluation.lm_model import StarsFastLM

    given = {"device": "cpu", "dtype": "float64"}
    arguments = f"pretrained={checkpoint},turns=7,tol=0.25,max_length=100"
    deep = StarsFastLM.create_from_arg_string(arguments, given)
    config = deep.model.config
    assert (config.total_ut_steps, config.convergence_tol) == (7, 0.25)
    assert (deep.max_length, deep.model.dtype) == (100, torch.float64)
    own = StarsFastLM(str(checkpoint), **given).model.config
    assert (own.total_ut_steps, own.convergence_tol) == (4, None)


def test_wrong_arguments_are_named(checkpoint, tmp_path):
    from stars_fast.evaluation.lm_model import StarsFastLM

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"expected a checkpoint with model_type .* 'llama'"):
        StarsFastLM(str(tmp_path), device="cpu")
    with pytest.raises(TypeError, match=r"pretrained: expected .* got Linear"):
        StarsFastLM(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"total_ut_steps: expected .* got 0"):
        StarsFastLM(str(checkpoint), turns=0, device="cpu")
    with pytest.raises(ValueError, match=r"convergence_tol: expected .* got -1"):
        StarsFastLM(str(checkpoint), tol=-1, device="cpu")
    with pytest.raises(ValueError, match=r"tol_per: expected one of .* got 'word'"):
        StarsFastLM(str(checkpoint), tol_per="word", device="cpu")
    with pytest.raises(ConfigError, match="unknown argument turn; did you mean turns"):
        StarsFastLM(str(checkpoint), turn=3, device="cpu")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'nonsense'"):
        StarsFastLM(str(checkpoint), nonsense=3, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("turn=3", "stars-fast: model_args: unknown argument turn; did you mean turns?"),
        ("turns=0", "stars-fast: turns, tol: total_ut_steps: expected an integer >= 1, got 0"),
        ("tol_per=word", "stars-fast: lm-eval: tol_per: expected one of"),
        ("dtype=float99", "stars-fast: lm-eval: module 'torch' has no attribute 'float99'"),
        ("device=cpu", "stars-fast: lm-eval: Tasks not found: no_such_task"),
    ],
)
def test_the_command_says_a_mistake_in_a_line(checkpoint, capsys, arguments, message):
    task = "no_such_task" if arguments == "device=cpu" else "gsm8k"
    words = ["--model", "stars_fast", "--tasks", task, "--limit", "1"]
    assert main(["lm-eval", *words, "--model_args", f"pretrained={checkpoint},{arguments}"]) == 2
    assert capsys.readouterr().err.rstrip().split("\n")[-1].startswith(message)


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_log_likelihoods_are_those_of_the_adaptive_model(checkpoint, per):
    from lm_eval.api.instance import Instance

    from stars_fast.evaluation.lm_model import StarsFastLM

    given = {"device": "cpu", "dtype": "float64"}
    judged = StarsFastLM(str(checkpoint), turns=6, tol=TOL, tol_per=per, **given)
    asked, answer = "1 + 2 =", " 3 or so"
    ((value, _),) = judged.loglikelihood(
        [Instance("loglikelihood", {}, (asked, answer), 0)], disable_tqdm=True
    )
    first, both = (judged.tokenizer(text).input_ids for text in (asked, asked + answer))
    with torch.no_grad():
        out = judged.model(torch.tensor([both[:-1]]), turns=6, tol=TOL, tol_per=per)
    logits = out.logits.log_softmax(-1)[0]
    wanted = sum(float(logits[i - 1, both[i]]) for i in range(len(first), len(both)))
    assert value == pytest.approx(wanted)
    assert out.turns.float().mean() < 6
    assert (len(set(out.turns.flatten().tolist())) > 1) == (per == "token")


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_log_likelihoods_do_not_depend_on_the_batch(checkpoint, per):
    """At a tolerance at which the sequences, each by itself, take different numbers of turns."""
    from lm_eval.api.instance import Instance

    from stars_fast.evaluation.lm_model import StarsFastLM

    given = {"device": "cpu", "dtype": "float64", "turns": 6, "tol": TOL, "tol_per": per}
    pairs = [("1 + 2 =", " 3"), ("And 40 + 2 is", " 42, of course"), ("0", "0"), (PROMPTS[0], "7")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    values, rolled = [], []
    for batch_size in (1, 4):
        judged = StarsFastLM(str(checkpoint), batch_size=batch_size, **given)
        values.append(judged.loglikelihood(asked, disable_tqdm=True))
        texts = [Instance("loglikelihood_rolling", {}, (a + b,), 0) for a, b in pairs]
        rolled.append(judged.loglikelihood_rolling(texts, disable_tqdm=True))
        assert judged.batch_size == batch_size
    assert [value for value, _ in values[0]] == pytest.approx([value for value, _ in values[1]])
    assert rolled[0] == pytest.approx(rolled[1])
    turns = set()
    for a, b in pairs:
        ids = judged.tokenizer(a + b, return_tensors="pt").input_ids[:, :-1]
        with torch.no_grad():
            turns |= set(judged.model(ids, tol_per=per).turns.flatten().tolist())
    assert len(turns) > 1


def test_likelihoods_of_a_model_in_16_bits_are_not_rounded_to_16(checkpoint):
    from lm_eval.api.instance import Instance

    from stars_fast.evaluation.lm_model import StarsFastLM

    judged = StarsFastLM(str(checkpoint), device="cpu", dtype="bfloat16", batch_size=1)
    asked = [Instance("loglikelihood", {}, ("It is", f" {i} " + "and so on " * 9), i) for i in "42"]
    for (value, _), request in zip(judged.loglikelihood(asked), asked, strict=True):
        start, ids = (
            judged.tokenizer(t).input_ids for t in (request.args[0], "".join(request.args))
        )
        with torch.no_grad():
            logits = judged.model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
        picked = logits.gather(1, torch.tensor(ids[1:])[:, None])[len(start) - 1 :]
        assert value == pytest.approx(float(picked.sum()), rel=1e-6)
        assert value != float(torch.tensor(value).bfloat16())
    own = StarsFastLM(str(checkpoint), device="cpu", softmax_dtype="bfloat16")
    assert own.softmax_dtype == torch.bfloat16


def test_likelihoods_that_are_no_numbers_are_warned_of(checkpoint):
    from lm_eval.api.instance import Instance

    from stars_fast.evaluation.lm_model import StarsFastLM

    judged = StarsFastLM(str(checkpoint), device="cpu", batch_size=2)
    asked = [Instance("loglikelihood", {}, ("It is", f" {i}."), 0) for i in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        judged.loglikelihood(asked, disable_tqdm=True)
    with torch.no_grad():
        judged.model.lm_head.weight.fill_(torch.nan)
    with pytest.warns(RuntimeWarning, match="3 of 3 log-likelihoods are NaN"):
        judged.loglikelihood(asked, disable_tqdm=True)


def test_a_batch_is_generated_as_one_by_one_and_stops_at_the_end_of_a_message(model):
    made = model.generate_until(requests(PROMPTS), disable_tqdm=True)
    found = [alone(model, prompt) for prompt in PROMPTS]
    assert made == [model.tokenizer.decode(each, skip_special_tokens=True) for each in found]
    assert set(model.end_ids) == {2, 0}


def test_a_message_ends_even_where_the_settings_say_otherwise(model):
    """The token of the third place of a generation is made to be the end of a message."""
    model.model.generation_config.eos_token_id = 0
    assert model.tokenizer.get_vocab()["<|im_end|>"] == 2
    third = int(alone(model, PROMPTS[0])[2])
    weight = model.model.lm_head.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[2] = weight[third] * 1.01
    try:
        made = alone(model, PROMPTS[0], eos_token_id=None)
        place = made.tolist().index(2)
        (text,) = model.generate_until(requests(PROMPTS[:1]), disable_tqdm=True)
        assert text == model.tokenizer.decode(made[:place], skip_special_tokens=True)
        assert place <= 2
    finally:
        weight.data.copy_(before)


def test_each_row_ends_at_its_own_string(model):
    """As lm-eval's own model in what comes out, and with no more tokens than each row takes."""
    from lm_eval.models.huggingface import HFLM

    whole = model.generate_until(requests(PROMPTS), disable_tqdm=True)
    until = [next(text[3:5] for text in whole if len(text) > 6), "\n\n"]
    stops = requests(PROMPTS, until=until)
    made = model.generate_until(stops, disable_tqdm=True)
    assert any(len(a) < len(b) for a, b in zip(made, whole, strict=True))
    assert made == [text.split(until[0])[0].split(until[1])[0] for text in whole]
    theirs = HFLM(model.model, tokenizer=model.tokenizer, batch_size=4)
    assert theirs.generate_until(requests(PROMPTS, until=until), disable_tqdm=True) == made

    row = next(i for i, text in enumerate(whole) if until[0] in text)
    ids = model.tokenizer(PROMPTS[row], return_tensors="pt").input_ids
    tokens = model._model_generate(ids, ids.shape[1] + 16, until, attention_mask=ids > -1)
    text = model.tokenizer.decode(tokens[0, ids.shape[1] :])
    assert until[0] in text
    assert until[0] not in model.tokenizer.decode(tokens[0, ids.shape[1] : -1])


@pytest.mark.parametrize("string", [" pencils", "\n\n", "é。"])
def test_a_string_is_found_in_whatever_tokens_it_is_written(model, string):
    from stars_fast.evaluation.hf_model import StopStrings

    def spelled(text):
        return [i for letter in text for i in model.tokenizer.encode(letter)]

    prompt, last = spelled(string[:-1]), spelled(string[-1])
    begun_in_prompt = last + spelled("xy" + string[:-1])
    ids = torch.tensor([prompt + spelled("xy" + string), prompt + begun_in_prompt])
    stops = StopStrings(model.tokenizer, ["other", string], len(prompt))
    assert stops(ids, None).tolist() == [True, False]
    assert stops(ids[:, :-1], None).tolist() == [False, False]
    assert stops(ids[:, : len(prompt + last)], None).tolist() == [False, False]


@pytest.fixture(scope="module")
def own_task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    rows = folder / "rows.jsonl"
    write_rows(rows, [row_of("svamp", a, b, a + b) for a, b in SUMS])
    task = {
        "task": "own_sums", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(rows)}}, "output_type": "generate_until",
        "doc_to_text": "{{Body}}", "doc_to_target": "{{Answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 99},
    }  # fmt: skip
    (folder / "own.yaml").write_text(json.dumps(task))
    return folder


@pytest.mark.slow
def test_lm_evals_command_line_with_our_model_in_a_process_of_its_own(checkpoint, own_task, model):
    words = (
        f"lm-eval --model stars_fast --model_args pretrained={checkpoint},turns=3,dtype=float64 "
        f"--tasks own_sums --include_path {own_task} --apply_chat_template --device cpu "
        f"--gen_kwargs max_gen_toks=6 --log_samples --output_path {own_task}/out --limit 3 "
        "--batch_size 2"
    )
    run = subprocess.run(
        [sys.executable, "-m", "stars_fast.cli", *words.split()], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "|own_sums|" in run.stdout
    (file,) = own_task.glob("out/**/samples_own_sums_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == 3
    for sample, (a, b) in zip(samples, SUMS, strict=False):
        prompt = f"<|im_start|>user\nJan has {a} and {b}.<|im_end|>\n<|im_start|>assistant\n"
        assert sample["arguments"]["gen_args_0"]["arg_0"] == prompt
        said = alone(model, prompt, turns=3, max_new_tokens=6)
        assert sample["resps"] == [[model.tokenizer.decode(said, skip_special_tokens=True)]]


@pytest.mark.slow
def test_our_tasks_are_known_beside_lm_evals_and_the_users(own_task, capsys):
    before = list(sys.argv)
    words = "stars_fast_asdiv,stars_fast_svamp,stars_fast_amc23,gsm8k,stars_fast_gsm8k,own_sums"
    assert main(["lm-eval", "validate", "--tasks", words, "--include_path", str(own_task)]) == 0
    assert "All tasks found and valid" in capsys.readouterr().out
    assert sys.argv == before


def test_its_own_help_and_mistakes(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["lm-eval", "run", "--no-such-option"])
    assert exit.value.code == 2
    assert main(["lm-eval"]) == 0
    assert "ls" in capsys.readouterr().out


@pytest.fixture
def answers_of(own_task, tmp_path):
    """The answers of lm-eval's evaluation with its cache of answers, and the turns that were
    executed for them, none where all are from the cache."""
    from lm_eval.tasks import TaskManager

    from stars_fast.evaluation.lm_model import StarsFastLM
    from stars_fast.models.ouro import count_turns

    index = TaskManager(include_path=str(own_task))

    def evaluate(pretrained, **given):
        model = StarsFastLM(str(pretrained), device="cpu", dtype="float64", batch_size=4, **given)
        with count_turns(model.model) as count:
            found = lm_eval.simple_evaluate(
                model, tasks=["own_sums"], task_manager=index, use_cache=str(tmp_path / "cache"),
                gen_kwargs="max_gen_toks=6", bootstrap_iters=0,
            )  # fmt: skip
        turns = {int(each) for call in count.calls for each in call.flatten()}
        return [sample["resps"][0][0] for sample in found["samples"]["own_sums"]], turns

    return evaluate


@pytest.mark.slow
def test_the_cache_of_answers_keeps_depths_and_models_apart(checkpoint, answers_of, tmp_path):
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "remote_code": False}
    other = write_tiny_ouro(tmp_path / "tiny-ouro", seed=4, **sizes)
    deep, turns = answers_of(checkpoint, turns=4)
    assert turns == {4}
    shallow, turns = answers_of(checkpoint, turns=1)
    assert turns == {1}
    assert shallow != deep
    assert answers_of(checkpoint, turns=4) == (deep, set())
    assert answers_of(checkpoint, turns=1) == (shallow, set())
    _, turns = answers_of(checkpoint, turns=4, tol=0.5)
    assert len(turns) > 1
    others, turns = answers_of(other, turns=4)
    assert turns == {4}
    assert others != deep
    assert answers_of(other, turns=4) == (others, set())
    assert answers_of(checkpoint, turns=4, max_length=80)[1] == {4}


@pytest.mark.slow
def test_the_cache_of_answers_on_the_command_line(checkpoint, own_task, model, tmp_path):
    for turns in (4, 1):
        out = tmp_path / str(turns)
        words = (
            f"lm-eval run --model stars_fast --tasks own_sums --include_path {own_task} --device "
            f"cpu --model_args pretrained={checkpoint},turns={turns},dtype=float64 --log_samples "
            f"--use_cache {tmp_path}/cache --gen_kwargs max_gen_toks=6 --output_path {out}"
        )
        assert main(words.split()) == 0
        (file,) = out.glob("**/samples_own_sums_*.jsonl")
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            said = alone(
                model, sample["arguments"]["gen_args_0"]["arg_0"], turns=turns, max_new_tokens=6
            )
            assert sample["resps"] == [[model.tokenizer.decode(said, skip_special_tokens=True)]]

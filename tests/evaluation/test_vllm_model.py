"""Ouro in vLLM: lm-eval's own model of it, with a stand-in of the vLLM underneath."""

import importlib.metadata
import json
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from benchmark_data import row_of, write_rows

from stars_fast.base.errors import ConfigError
from stars_fast.cli import main
from stars_fast.evaluation.backend_check import Comparison, first_differences
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.evaluation.vllm_model import VLLM_BATCH, longest_sequence, vllm_arguments
from stars_fast.models.export import export_run
from stars_fast.models.saved import find_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

LENGTH = 512
MEMORY = 8 * 2**30
CAP = 50


def answer_to(prompt):
    """Of several lengths."""
    return "It is " + "really " * (sum(prompt) % 3) + "7."


class LLM:
    """As much of vllm.LLM as lm-eval takes: it answers 7 to everything, and ends the message."""

    loaded: list = []  # noqa: RUF012
    batches: list = []  # noqa: RUF012
    asked: list = []  # noqa: RUF012
    fails_at: int | None = None

    def __init__(self, **arguments):
        LLM.loaded.append(arguments)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LENGTH))
        self.tokenizer = get_tokenizer(arguments["model"])

    def generate(self, prompts, sampling_params, use_tqdm, lora_request):
        if len(LLM.batches) == LLM.fails_at:
            raise KeyboardInterrupt
        LLM.batches.append(len(prompts))
        LLM.asked.extend(sampling_params)
        prompts = [prompt["prompt_token_ids"] for prompt in prompts]
        return [self.answer(*each) for each in zip(prompts, sampling_params, strict=True)]

    def answer(self, prompt, given):
        """The ids with the token that stops it, the text without."""
        text = answer_to(prompt)
        ids = self.tokenizer.encode(text + "<|im_end|>")
        cut = len(ids) > given.max_tokens
        if cut:
            ids = ids[: given.max_tokens]
            text = self.tokenizer.decode(ids)
        how = "length" if cut else "stop"
        return SimpleNamespace(
            outputs=[SimpleNamespace(text=text, token_ids=ids, finish_reason=how)]
        )


class Platform:
    """As much of vllm.platforms.current_platform as is asked."""

    @staticmethod
    def get_device_total_memory():
        return MEMORY


def get_tokenizer(name, **_):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    folder = tmp_path_factory.mktemp("models") / "tiny-ouro"
    write_tiny_ouro(folder, hidden_size=32, num_hidden_layers=1, remote_code=False)
    return folder


@pytest.fixture(scope="module")
def installed():
    """lm-eval's model of vLLM can be imported."""
    plain = {"SamplingParams": SimpleNamespace, "TokensPrompt": dict, "LLM": LLM}
    modules = {
        "vllm": plain,
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": None},
        "vllm.renderers": {},
        "vllm.renderers.hf": {"resolve_chat_template": lambda tokenizer, **_: None},
        "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
        "vllm.platforms": {"current_platform": Platform},
    }
    version = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in modules.items():
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            vars(module).update(contents)
            patch.setitem(sys.modules, name, module)
        patch.setattr(
            importlib.metadata,
            "version",
            lambda name: "0.12" if name == "vllm" else version(name),
        )
        patch.delitem(sys.modules, "lm_eval.models.vllm_causallms", raising=False)
        yield
        sys.modules.pop("lm_eval.models.vllm_causallms", None)


@pytest.fixture
def vllm(installed, monkeypatch):
    LLM.loaded.clear()
    LLM.batches.clear()
    LLM.asked.clear()
    monkeypatch.setattr(LLM, "fails_at", None)
    return LLM


def other(words, option, value):
    """The words with another value of an option."""
    place = words.index(option) + 1
    return [*words[:place], value, *words[place + 1 :]]


@pytest.fixture
def words(checkpoint, tmp_path):
    """A sweep of two tasks, each with five samples, two of which are answered by 7."""
    for name in ("svamp", "asdiv"):
        pairs = [(3, 4), (1, 2), (5, 2), (2, 3), (1, 8)]
        write_rows(tmp_path / f"{name}.jsonl", [row_of(name, a, b, a + b) for a, b in pairs])
    given = f"eval {checkpoint} --tasks svamp,asdiv --backend vllm --max-new-tokens {CAP}"
    return [*given.split(), "--data", str(tmp_path), "--out", str(tmp_path / "out")]


def results_of(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())["results"]


@pytest.mark.slow
def test_it_is_loaded_once_a_number_of_turns(vllm, words, checkpoint, tmp_path):
    assert main([*words, "--turns", "2,8", "--dtype", "bfloat16"]) == 0
    asked = [(each["model"], each["dtype"], each["hf_overrides"]) for each in vllm.loaded]
    assert asked == [(str(checkpoint), "bfloat16", {"total_ut_steps": t}) for t in (2, 8)]
    assert [(r["turns"], r["task"]) for r in results_of(tmp_path)] == [
        (2, "svamp"), (2, "asdiv"), (8, "svamp"), (8, "asdiv"),
    ]  # fmt: skip
    for result in results_of(tmp_path):
        assert result["accuracy"] == pytest.approx(2 / 5)
        assert (result["cut"], result["mean_turns"]) == (0, None)


def samples_of(tmp_path):
    files = tmp_path.glob("out/**/samples.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_tokens_and_cuts_are_those_that_it_reports(vllm, words, checkpoint, tmp_path):
    """A generation with as many tokens as the cap is cut unless the last of them ends it."""
    tokenizer = get_tokenizer(checkpoint)
    lengths = [len(tokenizer.encode("It is " + "really " * i + "7.")) for i in range(3)]
    cap = lengths[1] + 1
    assert main([*other(words, "--max-new-tokens", str(cap)), "--turns", "2"]) == 0
    samples = samples_of(tmp_path)
    for sample in samples:
        length = len(tokenizer.encode(answer_to(tokenizer.encode(sample["prompt"]))))
        cut = length > lengths[1]
        assert (sample["tokens"], sample["cut"]) == (cap if cut else length, cut)
    assert {sample["tokens"] for sample in samples} == {lengths[0], lengths[1], cap}


def test_what_is_made_is_kept_batch_by_batch(vllm, words, tmp_path, monkeypatch):
    words = [*words, "--turns", "2", "--batch-size", "2"]
    monkeypatch.setattr(vllm, "fails_at", 2)
    assert main(words) == 130
    (kept,) = tmp_path.glob("out/**/generations.jsonl")
    assert len(kept.read_text().splitlines()) == 4
    monkeypatch.setattr(vllm, "fails_at", None)
    assert main(words) == 0
    assert vllm.batches == [2, 2, 1, 2, 2, 1]


def test_the_prompts_of_a_large_task_are_not_handed_over_at_once(vllm, words, tmp_path):
    count = VLLM_BATCH + 3
    write_rows(tmp_path / "svamp.jsonl", [row_of("svamp", i, 2, 7) for i in range(count)])
    assert main([*other(words, "--tasks", "svamp"), "--turns", "2"]) == 0
    assert vllm.batches == [VLLM_BATCH, 3]


def test_the_longest_sequence_is_what_the_memory_holds(checkpoint):
    """Ouro-1.4B: 96 GiB of keys and values for all its 65,536 tokens at 8 turns in bf16."""
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "vocab_size": 49152,
        "max_position_embeddings": 65536,
        "torch_dtype": "bfloat16",
    }
    gib, token = 2**30, 8 * 2**10 * 24 * 8
    assert token * 65536 == 96 * gib
    weights = 2 * (24 * (4 * 2048**2 + 3 * 2048 * 5632) + 2 * 49152 * 2048)
    assert 2.6 * gib < weights < 2.8 * gib
    enough = (96 * gib + weights + 4 * gib) / 0.9
    assert longest_sequence(sizes, None, 8, int(enough) + gib) == 65536
    short = longest_sequence(sizes, None, 8, int(enough) - gib)
    assert 65536 - 1.1 * gib / token < short < 65536
    assert short % 16 == 0
    for memory in (24 * gib, 80 * gib):
        got = longest_sequence(sizes, None, 8, memory)
        assert 0 <= 0.9 * memory - weights - 4 * gib - got * token < 16 * token
        assert abs(longest_sequence(sizes, None, 4, memory) - min(65536, 2 * got)) <= 32
        wide = longest_sequence(sizes, "float32", 8, memory)
        assert wide < got / 2
        grouped = longest_sequence(sizes | {"num_key_value_heads": 4}, None, 8, memory)
        assert min(65536, 4 * got) <= grouped
    assert longest_sequence(sizes, None, 8, 4 * gib) == 0


def test_it_is_told_how_long_a_sequence_may_be(vllm, words):
    assert main([*words, "--turns", "2"]) == 0
    (asked,) = vllm.loaded
    assert (asked["max_model_len"], asked["gpu_memory_utilization"]) == (512, 0.9)


def test_a_memory_that_holds_no_whole_generation_is_named(checkpoint):
    options = SweepOptions(models=[], tasks=[], turns=[8], cap=100)
    source = find_model(checkpoint)
    message = r"--turns 8: the GPU holds keys and values of 96 tokens, fewer than the 100 of"
    token = 2 * 32 * 8 * 4  # one layer, fp32
    with pytest.raises(ConfigError, match=message):
        vllm_arguments(source, options, 8, int((4 * 2**30 + 122_880 + 100 * token) / 0.9))


def test_the_code_of_a_folder_is_run_where_it_is_ours(vllm, words, checkpoint, tmp_path):
    folder = export_run(checkpoint, tmp_path / "portable", portable=True)
    options = SweepOptions(models=[], tasks=[], turns=[2])
    for change, trusted in (("", True), ("print()", False)):
        code = folder / "modeling_ouro_portable.py"
        code.write_text(code.read_text() + change)
        arguments = vllm_arguments(find_model(folder), options, 2, MEMORY)
        assert arguments["trust_remote_code"] is trusted
    assert not vllm_arguments(find_model(checkpoint), options, 2, MEMORY)["trust_remote_code"]


def test_a_prompt_that_would_lose_its_beginning_is_refused(
    vllm, words, checkpoint, tmp_path, capsys
):
    """As by the other backend: lm-eval cuts it off."""
    write_rows(tmp_path / "svamp.jsonl", [row_of("svamp", 1, 2, 3)])
    words = other(words, "--tasks", "svamp")
    assert main([*other(words, "--max-new-tokens", str(LENGTH - 8)), "--turns", "2"]) == 2
    said = capsys.readouterr().err
    assert "--max-new-tokens must leave room for the prompts: one has" in said
    assert f"and 8 of the model's {LENGTH} are left for it" in said
    assert not vllm.batches


def test_a_device_is_refused(vllm, words, capsys):
    assert main([*words, "--turns", "2", "--device", "cuda:1"]) == 2
    said = capsys.readouterr().err
    assert re.search("--device: expected none with --backend vllm.* got cuda:1", said), said
    assert not vllm.loaded


def test_samples_have_a_seed_each(vllm, words, tmp_path):
    assert main([*other(words, "--tasks", "svamp"), "--turns", "2", "--samples", "3"]) == 0
    asked = vllm.asked
    assert len(asked) == 15
    assert len({each.seed for each in asked}) == 15
    assert {each.temperature for each in asked} == {0.6}
    assert [each["sample"] for each in samples_of(tmp_path)] == [0] * 5 + [1] * 5 + [2] * 5
    (result,) = results_of(tmp_path)
    assert result["pass_at"]["3"]["value"] == result["accuracy"] == pytest.approx(2 / 5)
    assert result["kv_bytes_per_token"] == 2 * 32 * 4 * 2


class GeneratingLLM(LLM):
    """Answers as the model of the folder does, at the turns that it is loaded for."""

    def answer(self, prompt, given):
        from stars_fast.models.ouro import OuroForCausalLM

        loaded = LLM.loaded[-1]
        model = OuroForCausalLM.from_pretrained(loaded["model"]).eval()
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=given.max_tokens,
            do_sample=False, eos_token_id=[2, 0], pad_token_id=0, **self.depth(loaded),
        )[0, len(prompt) :].tolist()  # fmt: skip
        cut = made[-1] not in (0, 2)
        text = self.tokenizer.decode(made if cut else made[:-1])
        how = "length" if cut else "stop"
        answer = SimpleNamespace(text=text, token_ids=made, finish_reason=how)
        return SimpleNamespace(outputs=[answer])

    def depth(self, loaded):
        return {"turns": loaded["hf_overrides"]["total_ut_steps"]}


class ShallowLLM(GeneratingLLM):
    """One that reads no turns out of what it is given."""

    def depth(self, loaded):
        return {"turns": 1}


@pytest.fixture
def both(vllm, words, monkeypatch):
    """A sweep of both backends, vLLM's with an engine of a class."""

    def sweep(engine, *more):
        monkeypatch.setattr(sys.modules["lm_eval.models.vllm_causallms"], "LLM", engine)
        given = other(words, "--backend", "native,vllm")
        for option, value in zip(more[::2], more[1::2], strict=True):
            given = other(given, option, value) if option in given else [*given, option, value]
        return main([*given, "--turns", "3"])

    import lm_eval.models.vllm_causallms  # noqa: F401

    return sweep


@pytest.mark.slow
def test_two_backends_that_agree_say_so(both, tmp_path, capsys):
    assert both(GeneratingLLM) == 0
    said = capsys.readouterr().err
    message = "native and vllm give the same greedy answers to 5 prompts"
    assert f"svamp-turns3: {message}" in said
    assert f"warning: svamp-turns3: {message}" not in said
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["backends"] == {"tiny-ouro": message}
    assert [each["turns"] for each in written["results"]] == [3, 3]
    assert len(LLM.loaded) == 1


@pytest.mark.slow
def test_two_backends_that_differ_are_warned_of(both, checkpoint, tmp_path, capsys, monkeypatch):
    """One reads no turns; where they part, and in how many, is what generation by hand tells."""
    from stars_fast.models.ouro import OuroForCausalLM

    tokenizer = get_tokenizer(checkpoint)
    model = OuroForCausalLM.from_pretrained(checkpoint).eval()

    def tokens(prompt, turns):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=CAP, do_sample=False,
            eos_token_id=[2, 0], pad_token_id=0, turns=turns,
        )[0, ids.shape[1] :]  # fmt: skip
        text = tokenizer.decode([i for i in made.tolist() if i not in (0, 2)])
        return tokenizer(text, add_special_tokens=False).input_ids

    assert both(ShallowLLM, "--tasks", "svamp") == 0
    said = capsys.readouterr().err
    places = []
    for sample in samples_of(tmp_path):
        deep, shallow = tokens(sample["prompt"], 3), tokens(sample["prompt"], 1)
        if deep != shallow:
            places.append(next(i for i in range(CAP) if deep[i : i + 1] != shallow[i : i + 1]))
    assert places
    assert (
        f"warning: svamp-turns3: native and vllm differ in {len(places)} of 5 greedy answers, "
        f"first at token {min(places)} of prompt "
    ) in said
    loaded = len(LLM.loaded)
    assert both(ShallowLLM, "--tasks", "svamp") == 0  # all is done: nothing is asked again
    assert len(LLM.loaded) == loaded
    assert "warning: svamp-turns3: native" not in capsys.readouterr().err


@pytest.mark.slow
def test_of_two_backends_vllm_takes_what_it_knows(both, checkpoint, words, tmp_path, monkeypatch):
    """A looped decoder is for ours, and so not compared."""
    from stars_fast.models.families import family_named

    family = family_named("looped_decoder")
    section = family.section(path="tiny", width=32, injection="adapter")
    looped, tokenizer = family.start(section, torch.float32, 0)
    folder = tmp_path / "looped"
    looped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words[1:2] = [str(checkpoint), str(folder)]
    assert both(GeneratingLLM, "--tasks", "svamp", "--limit", "2") == 0
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(written["backends"]) == ["tiny-ouro"]
    assert [each["model"] for each in written["results"]] == ["tiny-ouro", "looped"]
    backends = {
        json.loads(file.read_text())["backend"] for file in (tmp_path / "out").rglob("setting.json")
    }
    assert backends == {"native", "vllm"}


def test_where_answers_part_is_told_in_tokens(checkpoint):
    tokenizer = get_tokenizer(checkpoint)
    first = ["3 + 4 is 7.", "It is 8.", "It is", "same"]
    second = ["3 + 4 is 8.", "It is 8.", "It is 9", "same"]
    one, other = first_differences(first, second, tokenizer)
    shared = len(tokenizer("3 + 4 is", add_special_tokens=False).input_ids)
    assert (one.prompt, other.prompt) == (0, 2)
    assert shared <= one.token <= shared + 1
    assert (one.first.strip(), one.second.strip()) == ("7", "8")
    assert other.first == ""
    assert "differ in 2 of 4 greedy answers, first at token" in str(
        Comparison(("native", "vllm"), 4, [one, other])
    )

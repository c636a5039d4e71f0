"""Token loss on plain text."""

import copy
import json
import math
from functools import partial

import pytest
import torch

from stars_fast.cli import main
from stars_fast.evaluation.text_loss import standard_text_loss, text_loss

TEXTS = [
    "The sum of 3 and 4 is 7. " * 5,
    "",
    "Zwölf Äpfel – wie viele sind es?",
    "x",
    "Each of 5 boxes holds 6 pencils, so all of them hold 30.",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    folder = tmp_path_factory.mktemp("models") / "tiny-ouro"
    return write_tiny_ouro(folder, hidden_size=32, remote_code=False, convergence_tol=0.9)


@pytest.fixture(scope="module")
def ouro(checkpoint):
    from transformers import AutoTokenizer

    from stars_fast.models.ouro import OuroForCausalLM

    model = OuroForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    return model, AutoTokenizer.from_pretrained(checkpoint)


def by_hand(model, tokenizer, texts, turns, length):
    """Summed loss and number of tokens: window by window, from all logits."""
    total, count = 0.0, 0
    for text in texts:
        tokens = tokenizer(text).input_ids
        for start in range(0, len(tokens), length - 1):
            window = torch.tensor([[0, *tokens[start : start + length - 1]]])
            logits = model(window, turns=turns, tol=0, use_cache=False).logits[0, :-1]
            picked = logits.log_softmax(-1).gather(1, window[0, 1:, None])
            total, count = total - float(picked.sum()), count + len(picked)
    return total, count


@pytest.mark.parametrize(("length", "batch"), [(16, 3), (2048, 1), (2, 64)])
def test_it_is_that_of_all_logits(ouro, length, batch):
    model, tokenizer = ouro
    model.train()
    found = text_loss(model, tokenizer, TEXTS, [5, 1, 2], length=length, batch_size=batch)
    assert model.training
    model.eval()
    size = sum(len(text.encode()) for text in TEXTS)
    assert list(found.nats) == [5, 1, 2]
    assert found.size == size
    with torch.no_grad():
        for turns, value in found.nats.items():
            total, count = by_hand(model, tokenizer, TEXTS, turns, length)
            assert found.tokens == count
            assert value == pytest.approx(total / count, rel=1e-10)
            assert found.perplexity[turns] == pytest.approx(math.exp(total / count))
            assert found.bits_per_byte[turns] == pytest.approx(total / size / math.log(2))


def test_one_pass_is_the_whole_sweep(ouro):
    model, tokenizer = ouro
    calls = []
    hook = model.model.norm.register_forward_hook(lambda *given: calls.append(1))
    try:
        text_loss(model, tokenizer, [TEXTS[0]], [1, 2, 4, 6], batch_size=99)
    finally:
        hook.remove()
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": []}, "turns: expected"),
        ({"turns": [0]}, "turns: expected"),
        ({"length": 1}, "length: expected"),
        ({"batch_size": 0}, "batch_size: expected"),
        ({"texts": ["", ""]}, "texts: expected a token"),
    ],
)
def test_wrong_arguments_are_named(ouro, change, message):
    given = {"texts": TEXTS, "turns": [1]} | change
    with pytest.raises(ValueError, match=message):
        text_loss(*ouro, given.pop("texts"), given.pop("turns"), **given)


def written(folder):
    return json.loads((folder / "text-loss.json").read_text())["models"]


def test_the_command_on_a_file_of_text_and_on_rows(checkpoint, ouro, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    lines = (json.dumps({"said": text}) + "\n" for text in (*TEXTS[:3], None, *TEXTS[3:]))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    out = tmp_path / "out"
    model, tokenizer = ouro
    words = f"eval {checkpoint} --turns 1,3 --length 16 --batch-size 4 --out {out}".split()
    for more, texts in (
        (f"--text {tmp_path}/a.txt", TEXTS[:1]),
        (f"--text {tmp_path}/rows.jsonl --column said", TEXTS),
        (f"--text {tmp_path}/rows.jsonl --column said --limit 2", TEXTS[:2]),
    ):
        assert main([*words, *more.split()]) == 0
        wanted = text_loss(model, tokenizer, texts, [1, 3], length=16)
        found = written(out)["tiny-ouro"]
        assert (found["tokens"], found["bytes"]) == (wanted.tokens, wanted.size)
        for name, values in (("loss", wanted.nats), ("bits_per_byte", wanted.bits_per_byte)):
            assert found[name] == {str(t): pytest.approx(v, rel=1e-5) for t, v in values.items()}
        table = capsys.readouterr().out.splitlines()
        assert table[1].split()[:3] == ["tiny-ouro", "1", f"{wanted.nats[1]:.4f}"]
    assert (out / "text-loss.png").read_bytes().startswith(b"\x89PNG")


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("factor", [1e6, math.nan])
def test_a_model_that_falls_apart_is_told_in_json(checkpoint, ouro, tmp_path, capsys, factor):
    """Its perplexity is larger than any number, or its loss is none."""
    model, tokenizer = copy.deepcopy(ouro[0]), ouro[1]
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    folder = tmp_path / "broken"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "a.txt").write_text(TEXTS[0])
    words = f"eval {folder} --text {tmp_path}/a.txt --turns 1,2 --out {tmp_path}/out"
    assert main(words.split()) == 0
    text = (tmp_path / "out" / "text-loss.json").read_text()
    (found,) = json.loads(text, parse_constant=refuse)["models"].values()
    assert found["perplexity"] == {"1": None, "2": None}
    assert (found["loss"]["1"] is None) == math.isnan(factor)
    assert ("nan" if math.isnan(factor) else "inf") in capsys.readouterr().out


@pytest.mark.parametrize("looped", [False, True])
def test_windows_longer_than_a_table_of_positions_are_refused(ouro, looped):
    from transformers import GPT2Config, GPT2LMHeadModel

    from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM

    _, tokenizer = ouro
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).double().eval()
    losses = standard_text_loss
    if looped:
        model = LoopedDecoderForCausalLM.from_decoder(model, prelude=1, block=1, coda=1)
        losses = partial(text_loss, turns=[2])
    with pytest.raises(ValueError, match=r"length: expected at most 17, .* 16 positions, got 18"):
        losses(model, tokenizer, TEXTS, length=18)
    assert losses(model, tokenizer, ["x"], length=18).tokens == 1
    (nats,) = losses(model, tokenizer, TEXTS, length=17).nats.values()
    assert 0 < nats < 20


def with_positions(name, vocabulary, places):
    """A tiny decoder of transformers with that many positions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "opt": {"word_embed_proj_dim": 32, "ffn_dim": 32, "max_position_embeddings": places},
        "gptj": {"n_positions": places, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8},
        "roberta": {"is_decoder": True, "max_position_embeddings": places + 2, "pad_token_id": 1},
        "xglm": {"d_model": 32, "ffn_dim": 32, "attention_heads": 2, "num_layers": 1},
        "jamba": {"max_position_embeddings": places, "use_mamba_kernels": False},
    }[name]
    if name == "xglm":
        config["max_position_embeddings"] = places
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": vocabulary}
    kept = {} if name in ("gptj", "xglm") else sizes
    config = AutoConfig.for_model(name, **{**kept, **config, "vocab_size": vocabulary})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", ["opt", "gptj", "roberta", "xglm", "jamba"])
def test_positions_are_those_of_a_table_alone(ouro, name):
    """Whose rows may be more than its positions; what has no table reads on."""
    _, tokenizer = ouro
    model = with_positions(name, len(tokenizer), 16)
    assert standard_text_loss(model, tokenizer, TEXTS, length=17).nats[None] > 0
    if name in ("xglm", "jamba"):
        assert standard_text_loss(model, tokenizer, TEXTS, length=24).nats[None] > 0
        return
    with pytest.raises(ValueError, match=r"length: expected at most 17, .* 16 positions, got 24"):
        standard_text_loss(model, tokenizer, TEXTS, length=24)


def test_mistakes_of_the_command_are_named(checkpoint, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"said": "a", "count": 1}\n')
    (tmp_path / "empty.txt").write_text("")
    for more, message in (
        (f"--text {tmp_path}/none.txt", "none.txt: No such file"),
        (f"--text {tmp_path}/none.jsonl", "--text"),
        (f"--text {tmp_path}/empty.txt", "texts: expected a token"),
        (
            f"--text {tmp_path}/rows.jsonl",
            "--column: expected one of the columns ['said', 'count']",
        ),
        (f"--text {tmp_path}/rows.jsonl --column count", "--column: expected text, got 1"),
        (
            f"--text {tmp_path}/empty.txt --tol 0.1",
            "--tol is an option of runs of the addition study and --tasks",
        ),
    ):
        assert main(["eval", str(checkpoint), *more.split(), "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err


def test_an_ouro_run_is_evaluated_at_its_newest_checkpoint_or_the_one_asked_for(
    tmp_path, monkeypatch, capsys
):
    """Its loss is that of the exported checkpoint; benchmarks take the run too."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setenv("STARS_FAST_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    words = "--steps 2 --save_every 1 --samples 40 --validation 0 --width 16 --batch_size 4"
    words = ["train", "ouro-tiny", *words.split(), "--workers", "1", "--eval.turns", ""]
    assert main([*words, "--out", str(run)]) == 0
    text = tmp_path / "a.txt"
    text.write_text(TEXTS[0])
    losses = {}
    for step in (1, 2):
        export = tmp_path / f"step{step}"
        assert main(["export", str(run), str(export), "--step", str(step)]) == 0
        for name, path, more in (("run", run, ["--step", str(step)]), ("export", export, [])):
            out = tmp_path / f"out-{name}-{step}"
            given = ["eval", str(path), "--text", str(text), "--turns", "1,2", "--out", str(out)]
            assert main([*given, *more]) == 0
            (losses[name, step],) = (values["loss"] for values in written(out).values())
        assert losses["run", step] == losses["export", step]
    assert losses["run", 1] != losses["run", 2]
    given = ["eval", str(run), "--text", str(text), "--turns", "1,2"]
    assert main(given) == 0
    assert written(run / "evaluation")["ouro-tiny"]["loss"] == losses["run", 2]

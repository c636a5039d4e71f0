"""Looped decoders as lm-eval's model `stars_fast`, and in a sweep."""

import json

import pytest
import torch
from benchmark_data import SUMS, row_of, write_rows

from stars_fast.base.errors import ConfigError
from stars_fast.base.quiet import quiet_import
from stars_fast.evaluation.sweep import SweepOptions, run_sweep
from stars_fast.models.families import family_named

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A looped decoder of random weights with its tokenizer."""
    family = family_named("looped_decoder")
    section = family.section(path="tiny", width=32, injection="adapter")
    model, tokenizer = family.start(section, torch.float64, 0)
    folder = tmp_path_factory.mktemp("models") / "looped"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judged(folder):
    with quiet_import():
        from stars_fast.evaluation.lm_model import StarsFastLM

    return StarsFastLM(str(folder), turns=3, device="cpu", batch_size=4, dtype="float64")


def test_generations_and_likelihoods_are_the_models(judged):
    from lm_eval.api.instance import Instance

    options = {"until": [], "do_sample": False, "max_gen_toks": 8}
    prompts = [f"{a} + {b} =" for a, b in SUMS]
    asked = [Instance("generate_until", {}, (each, options), i) for i, each in enumerate(prompts)]
    said = judged.generate_until(asked, disable_tqdm=True)
    for prompt, answer in zip(prompts, said, strict=True):
        ids = judged.tokenizer(prompt, return_tensors="pt").input_ids
        alone = judged.model.generate(
            ids, turns=3, max_new_tokens=8, do_sample=False, eos_token_id=[2, 0], pad_token_id=0
        )[0, ids.shape[1] :]
        assert answer == judged.tokenizer.decode(alone, skip_special_tokens=True)
    asked = Instance("loglikelihood", {}, ("1 + 2 =", " 3"), 0)
    ((value, _),) = judged.loglikelihood([asked], disable_tqdm=True)
    first, both = (judged.tokenizer(text).input_ids for text in ("1 + 2 =", "1 + 2 = 3"))
    with torch.no_grad():
        logits = judged.model(torch.tensor([both[:-1]]), turns=3).logits.log_softmax(-1)[0]
    wanted = sum(float(logits[i - 1, both[i]]) for i in range(len(first), len(both)))
    assert value == pytest.approx(wanted)


def test_a_sweep_over_turns(folder, tmp_path):
    rows = [row_of("svamp", a, b, a + b) for a, b in SUMS]
    write_rows(tmp_path / "data" / "svamp.jsonl", rows)
    options = SweepOptions(
        models=[str(folder)], tasks=["svamp"], turns=[1, 3], limit=2, cap=8, device="cpu",
        data=str(tmp_path / "data"), out=str(tmp_path / "out"),
    )  # fmt: skip
    found = run_sweep(options)
    assert [each.turns for each in found] == [1, 3]
    for turns in (1, 3):
        (journal,) = (tmp_path / "out").rglob(f"*{turns}*/generations.jsonl")
        made = [json.loads(line) for line in journal.read_text().splitlines()]
        assert len(made) == 2
        assert all(each["turns"] == turns * each["read"] for each in made)


def test_vllm_is_refused(folder):
    with pytest.raises(ConfigError, match=r"--backend: expected native .* a model of Looped decod"):
        run_sweep(SweepOptions(models=[str(folder)], tasks=["svamp"], turns=[1], backend="vllm"))

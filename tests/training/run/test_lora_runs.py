"""Runs that train adapters alone: the base stays to the last bit, resumed and on two processes, and
what is exported, merged or kept, is the model that was trained."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ouro_runs import ouro_run, rows_of

from stars_fast.base import optional
from stars_fast.base.checkpoints import checkpoints, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.cli import main
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.evaluation.vllm_model import VllmModel
from stars_fast.models.export import export_run
from stars_fast.models.families import family_named, family_of
from stars_fast.models.lora import fingerprint
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro
from stars_fast.models.saved import find_model, load_model
from stars_fast.training.config import load_config, save_config
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.task import Task
from stars_fast.training.run.trainer import Trainer, train
from stars_fast.training.scale.distributed import processes

pytest.importorskip("peft")
pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "ouro.py")
IDS = torch.arange(3, 23).view(2, 10)


def lora_run(folder, cache, name, **changes):
    changes.setdefault("lora", {"rank": 8, "alpha": 16.0})
    return ouro_run(folder / name, cache, **changes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint with weights in bf16, as the published ones."""
    folder = tmp_path_factory.mktemp("base") / "ouro"
    return str(write_tiny_ouro(folder, dtype=torch.bfloat16, remote_code=False))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, cache, base):
    """A run in mixed precision on that checkpoint."""
    folder = tmp_path_factory.mktemp("mixed")
    config = lora_run(folder, cache, "run", precision="mixed", model={"path": base})
    return train(config).folder


# -- a run


@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16"])
def test_adapters_move_and_nothing_else(tmp_path, cache, precision):
    config = lora_run(tmp_path, cache, "run", precision=precision)
    with processes("cpu") as world:
        task = Task(config, world)
        model = task.loop.model
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer = Trainer(config, task, RunFolder(config.out), world)
        trainer.run()
    adapters = {name for name in before if "lora_" in name}
    assert len(adapters) == 2 * 2 * 7
    frozen = torch.float32 if precision == "float32" else torch.bfloat16
    moving = torch.bfloat16 if precision == "bfloat16" else torch.float32
    for name, p in model.named_parameters():
        assert p.dtype == (moving if name in adapters else frozen), name
        assert torch.equal(p, before[name]) == (name not in adapters), name
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(held) == len(adapters)
    saved = saved_tensors(checkpoints(RunFolder(config.out).checkpoints)[6])
    weights = {name for name in saved if name.startswith("model.")}
    assert weights == {f"model.{name}" for name in adapters}
    rows = read_metrics(Path(config.out) / "metrics.jsonl")
    assert all(row["penalty"] > 0 and row["skipped"] == 0 for row in rows)
    loaded = dict(load_model(find_model(config.out)).named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(loaded[name], p.to(loaded[name].dtype)), name


def test_the_loss_falls(tmp_path, cache):
    changes = {"train": {"steps": 40}, "optim": {"lr": 1e-2}}
    rows = rows_of(train(lora_run(tmp_path, cache, "run", **changes)).folder)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5


def test_what_runs_is_said(tmp_path, cache, capfd):
    config = lora_run(tmp_path, cache, "run", train={"steps": 1})
    train(config)
    assert re.search(r"M parameters \(0\.01 M of them adapters, which are", capfd.readouterr().err)


def test_any_family(tmp_path):
    """Another one, on sums, in mixed precision: its accuracy is judged with adapters too."""
    words = ["--steps", "3", "--train_samples", "40", "--test_samples", "20", "--batch_size", "4"]
    words += [
        "--d_model",
        "16",
        "--n_heads",
        "2",
        "--d_ff",
        "32",
        "--digits",
        "1",
        "--threads",
        "1",
    ]
    words += ["--lora.rank", "2", "--lora.targets", "qkv,mlp.f.up", "--precision", "mixed"]
    words += ["--report_to", "none", "--out", str(tmp_path / "run"), "--eval.turns", "1,2"]
    folder = train(load_config("addition-quick-stars", words)).folder
    assert json.loads((folder / "results.json").read_text())["accuracy"].keys() == {"1", "2"}
    saved = saved_tensors(checkpoints(folder / "checkpoints")[3])
    targets = {name.split(".lora_")[0] for name in saved if name.startswith("model.")}
    assert {name.rpartition(".")[2] for name in targets} == {"qkv", "up"}
    assert main(["eval", str(folder), "--turns", "1,2", "--out", str(tmp_path / "eval")]) == 0
    out = export_run(folder, tmp_path / "out")
    assert family_of(out) is family_named("looped_lm")
    run, plain = (load_model(find_model(each), torch.float64) for each in (folder, out))
    ids = torch.arange(3, 9)[None]
    torch.testing.assert_close(plain(ids, 3), run(ids, 3), rtol=0, atol=1e-6)


# -- resumed, and on two processes


def parallel_run(folder, cache, kind, precision="float32"):
    return lora_run(
        folder,
        cache,
        f"{kind}-{precision}",
        precision=precision,
        train={"steps": 8, "accumulation": 2, "batch_size": 8},
        parallel={"kind": kind},
        data={"validation": 8},
        eval={"turns": [2], "rows": 4},
    )


def resumed_run(folder, cache, fate, precision):
    return lora_run(
        folder,
        cache,
        f"{precision}-{fate}",
        precision=precision,
        lora={"rank": 8, "dropout": 0.1},
        train={"steps": 9, "save_every": 5, "accumulation": 2},
    )


@pytest.fixture(scope="module")
def runs(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    cache = folder / "cache"

    def written(config):
        path = folder / f"{config.name}.yaml"
        save_config(config, path)
        return str(path)

    precisions = ("float32", "mixed")
    lost = [written(resumed_run(folder, cache, "lost", each)) for each in precisions]
    straight = [written(resumed_run(folder, cache, "straight", each)) for each in precisions]
    alone = [written(parallel_run(folder, cache, "auto", each)) for each in precisions]
    assert launch([SCRIPT, *straight, *alone, *lost, *lost], timeout=300) == [0]
    both = [written(parallel_run(folder, cache, k, p)) for p in precisions for k in ("ddp", "fsdp")]
    assert launch([SCRIPT, *both], 2, timeout=300) == [0, 0]
    return folder


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_a_run_resumes_to_the_last_bit(runs, precision):
    straight, lost = runs / f"{precision}-straight", runs / f"{precision}-lost"
    assert [row["step"] for row in rows_of(lost)] == list(range(1, 10))
    assert rows_of(lost) == rows_of(straight)
    one, other = (saved_tensors(checkpoints(run / "checkpoints")[9]) for run in (straight, lost))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    starts = (lost / "environment.jsonl").read_text().splitlines()
    assert len(starts) == 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_are_one(runs, kind):
    """In fp32; what differs is the order of sums, which AdamW's division blows up where a gradient
    is near zero, as it is in adapters that begin with zeros."""
    one, two = runs / "auto-float32", runs / f"{kind}-float32"
    gradients = [
        torch.cat([g.flatten() for g in torch.load(f"{run}.grad.pt")]) for run in (one, two)
    ]
    assert relative_difference(*gradients[::-1]) < 1e-5
    for expected, row in zip(rows_of(one), rows_of(two), strict=True):
        assert row["depth"] == expected["depth"]
        for figure in ("loss", "penalty", "grad_norm"):
            assert row[figure] == pytest.approx(expected[figure], rel=1e-4), figure
    weights = [saved_tensors(checkpoints(run / "checkpoints")[8]) for run in (one, two)]
    names = [name for name in weights[0] if name.startswith("model.")]
    assert len(names) == 28
    vectors = [torch.cat([each[name].flatten() for name in names]) for each in weights]
    assert relative_difference(*vectors[::-1]) < 1e-4
    judged = [json.loads((run / "results.json").read_text()) for run in (one, two)]
    assert judged[1]["validation_loss"] == pytest.approx(judged[0]["validation_loss"], rel=1e-4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_in_mixed_precision(runs, kind):
    """The base in bf16 and the adapters in fp32, whole or as shards: equal up to rounding in bf16,
    of some hundred ops of 2^-8 each."""
    one, two = runs / "auto-mixed", runs / f"{kind}-mixed"
    first, row = rows_of(one)[0], rows_of(two)[0]
    for figure in ("loss", "penalty", "grad_norm"):
        assert row[figure] == pytest.approx(first[figure], rel=0.05), figure
    saved = saved_tensors(checkpoints(two / "checkpoints")[8])
    assert {value.dtype for name, value in saved.items() if name.startswith("model.")} == {
        torch.float32
    }
    assert rows_of(two)[-1]["loss"] == pytest.approx(rows_of(one)[-1]["loss"], rel=0.02)


def relative_difference(mine, other):
    return float((mine.double() - other.double()).norm() / other.double().norm())


# -- exported and judged


def test_an_export_is_the_model_that_was_trained(mixed, tmp_path):
    run = load_model(find_model(mixed), torch.float64)
    merged = export_run(mixed, tmp_path / "merged", dtype=torch.float32)
    plain = OuroForCausalLM.from_pretrained(merged, dtype=torch.float64)
    names = {name for name, _ in plain.named_parameters()}
    assert not [name for name in names if "lora" in name or "base_layer" in name]
    with torch.no_grad():
        expected, found = run(IDS, turns=3).logits, plain(IDS, turns=3).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # weights merged in fp32
    assert (
        OuroForCausalLM.from_pretrained(export_run(mixed, tmp_path / "own"), dtype="auto").dtype
        == torch.bfloat16
    )


def test_an_export_warns_of_what_rounding_takes(tmp_path, cache, base):
    """Steps of 1e-5, in bf16 weights of about 1/6."""
    changes = {"model": {"path": base}, "optim": {"lr": 1e-5}, "train": {"steps": 2}}
    run = train(lora_run(tmp_path, cache, "run", precision="mixed", **changes)).folder
    with pytest.warns(
        UserWarning, match=r"weights in bfloat16 keep -?\d+% of what the adapters add"
    ):
        export_run(run, tmp_path / "rounded")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export_run(run, tmp_path / "whole", dtype=torch.float32)


def test_an_adapter_that_was_kept_is_a_model(mixed, base, tmp_path, capsys):
    kept = tmp_path / "kept"
    assert main(["export", str(mixed), str(kept), "--adapter", "keep"]) == 0
    assert not (kept / "model.safetensors").exists()
    named = json.loads((kept / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(Path(base).resolve())
    source = find_model(kept)
    assert source.base == named
    assert family_of(kept) is family_named("ouro")
    run, again = (load_model(find_model(each), torch.float64) for each in (mixed, kept))
    for (name, a), (other, b) in zip(run.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
    one, two = (export_run(each, tmp_path / f"{i}-merged", dtype=torch.float32)
                for i, each in enumerate((mixed, kept)))  # fmt: skip
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    (tmp_path / "a.txt").write_text("one and two are three\n\nthree and four are seven\n")
    words = ["--text", str(tmp_path / "a.txt"), "--turns", "1,2", "--out", str(tmp_path / "eval")]
    words += ["--dtype", "float32"]
    assert main(["eval", str(mixed), str(kept), str(one), *words]) == 0
    losses = re.findall(
        r" ([0-9.]+) +[0-9.]+ +[0-9.]+ +\d+$", capsys.readouterr().out, re.MULTILINE
    )
    assert len(losses) == 6
    assert losses[:2] == losses[2:4] == losses[4:]
    words = ["--text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "analysis")]
    words += ["--turns", "4", "--samples", "2"]
    assert main(["analyze", str(kept), *words]) == 0


def test_an_adapter_s_tokenizer_and_base_are_found(mixed, tmp_path):
    kept = export_run(mixed, tmp_path / "kept", adapter="keep")
    for file in kept.glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="kept is an adapter: write one with stars-fast export"):
        VllmModel(find_model(kept), SweepOptions([str(kept)], ["gsm8k"], [2]))
    out = export_run(kept, tmp_path / "merged")
    assert (out / "tokenizer_config.json").exists()  # the base's
    config = json.loads((kept / "adapter_config.json").read_text())
    for base, message in (
        (str(tmp_path / "gone"), "kept: the base model of the adapter: .*gone does not exist"),
        (None, "base_model_name_or_path: expected the model that it adapts, got None"),
    ):
        changed = config | {"base_model_name_or_path": base}
        (kept / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message):
            find_model(kept)


def test_options_that_do_not_fit(mixed, tmp_path, cache):
    for options, message in (
        ({"turns": 3}, "turns: expected none with adapter keep"),
        ({"dtype": torch.float32}, "dtype: expected none with adapter keep"),
        ({"portable": True}, "portable: expected none with adapter keep"),
    ):
        with pytest.raises(ConfigError, match=message):
            export_run(mixed, tmp_path / "out", adapter="keep", **options)
    made = train(lora_run(tmp_path, cache, "made", train={"steps": 1})).folder
    with pytest.raises(ConfigError, match="made, whose base model the package made"):
        export_run(made, tmp_path / "out", adapter="keep")
    with pytest.raises(ValueError, match=r"adapter: expected one of .*'keep'\), got 'drop'"):
        export_run(mixed, tmp_path / "out", adapter="drop")
    whole = export_run(mixed, tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"whole, which is no run with lora\.rank, got keep"):
        export_run(whole, tmp_path / "out", adapter="keep")
    assert not (tmp_path / "out").exists()


# -- another base


def test_another_base_is_noticed(mixed, tmp_path, cache):
    other = write_tiny_ouro(tmp_path / "ouro", dtype=torch.bfloat16, remote_code=False)
    config = lora_run(
        tmp_path, cache, "run", precision="mixed", model={"path": str(other)},
        train={"steps": 2, "save_every": 1},
    )  # fmt: skip
    run = train(replace(config, train=replace(config.train, steps=1))).folder
    for file in other.glob("*"):
        file.unlink()
    write_tiny_ouro(other, seed=1, dtype=torch.bfloat16, remote_code=False)
    with pytest.raises(ConfigError, match="weights that its adapters were trained on are not"):
        load_model(find_model(run))
    with pytest.raises(ConfigError, match=r"weights that the adapters of .* were trained on are"):
        train(config, resume=True)


def test_settings_of_adapters_stay_those_of_the_run(mixed):
    for changed in ("--lora.rank", "4"), ("--lora.targets", "q_proj"), ("--lora.alpha", "1"):
        config = load_config(str(mixed), changed)
        with pytest.raises(ConfigError, match=f"cannot resume .*{changed[0][2:]} was"):
            train(config, resume=True)


# -- errors before anything is loaded


def test_a_target_that_is_not_there(tmp_path, cache):
    config = lora_run(tmp_path, cache, "run", lora={"rank": 4, "targets": ["query"]})
    with pytest.raises(ConfigError, match=r"lora\.targets: expected .*q_proj, k_proj.* got query"):
        train(config)
    assert not Path(config.out).exists()


def test_without_peft_the_extra_is_named(tmp_path, cache, monkeypatch):
    config = lora_run(tmp_path, cache, "run")
    real = optional.import_module

    def blocked(name):
        if name.partition(".")[0] == "peft":
            raise ImportError("no peft here", name="peft")
        return real(name)

    monkeypatch.setattr(optional, "import_module", blocked)
    with pytest.raises(
        ConfigError, match=r'LoRA adapters need peft: pip install "stars-fast\[lora'
    ):
        train(config)


def test_recipes_say_what_they_train():
    assert load_config("ouro-tiny-lora").lora.rank == 8
    config = load_config("ouro-numina-lora")
    assert (config.lora.rank, config.lora.targets) == (16, ("all-linear",))
    assert config.precision == "mixed"
    with processes("cpu") as world:
        task = Task(load_config("ouro-tiny-lora", ["--samples", "20"]), world)
        assert task.base == fingerprint(task.loop.model)

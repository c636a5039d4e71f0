"""Every setting is read by a run, or told to be without effect when it is given.

The reads are recorded in runs of a step: a new field that nothing reads fails here."""

import dataclasses
import sys

import pytest
import yaml

from stars_fast.base import tree
from stars_fast.base.tree import merge
from stars_fast.cli import main
from stars_fast.data.kinds import kinds
from stars_fast.models.families import families
from stars_fast.training.config import config_class, config_from, load_config, save_config
from stars_fast.training.recipes import recipe_names
from stars_fast.training.run.trainer import train
from stars_fast.training.unread import unread, without_effect

NOT_OF_A_STEP = {
    "description": "the list of recipes",
    "lora.per_turn": "only false is accepted",
    "train.freeze": "with adapters it is refused",
    "train.epochs": "in place of steps alone",
    "parallel.shard": "refused but with hsdp",
    "parallel.reshard": "refused but with fsdp and hsdp",
    "parallel.offload": "refused but with fsdp and hsdp",
    "data.answer": "with a prompt alone",
    "model.adapter_start": "refused but with an adapter",
    "depth.low": "a fixed depth is held against it",
    "depth.high": "a fixed depth is held against it",
}
"""Fields that a run of a step need not read, and what does."""

_NO_READER = ("dataclasses.py", "copy.py", "base/tree.py", "base/checks.py", "training/unread.py")
_NO_USE = ("__post_init__", "_check_together", "__eq__", "__hash__", "__repr__")


@pytest.fixture
def reads(monkeypatch):
    """reads(config) -> a set that fields come into when they are read, by dotted path."""

    def record(config):
        seen = set()
        sections = {"": type(config)}
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if dataclasses.is_dataclass(value):
                sections[field.name] = type(value)
        for where, cls in sections.items():
            names = {field.name for field in dataclasses.fields(cls)}

            def read(self, name, where=where, names=names):
                code = sys._getframe(1).f_code
                counts = not code.co_filename.endswith((*_NO_READER, "<string>"))
                if name in names and counts and code.co_name not in _NO_USE:
                    seen.add(f"{where}.{name}" if where else name)
                return object.__getattribute__(self, name)

            monkeypatch.setattr(cls, "__getattribute__", read)
        return seen

    return record


SUMS = {
    "model": {"d_model": 16, "n_heads": 2, "d_ff": 16},
    "data": {"digits": 1, "train_samples": 30, "test_samples": 9},
    "depth": {"high": 3},
    "train": {"steps": 1, "batch_size": 8, "threads": 1, "report_to": []},
    "eval": {"turns": [1], "limit": 5},
}
FIXED = {"law": "fixed", "value": 2}
TEXT = {
    "data": {"kind": "chats", "source": "tiny-chat", "samples": 8, "max_length": 96, "workers": 1},
    "depth": {"high": 2},
    "train": {"steps": 1, "batch_size": 2, "threads": 1, "report_to": []},
    "eval": {"turns": [1]},
}
TINY = {"path": "tiny", "width": 16}

RUNS = {
    "sft": {"method": "sft", "depth": FIXED},
    "random-loop": {"method": "random-loop"},
    "jsrr": {"method": "jsrr", "depth": FIXED},
    "l2": {"method": "l2"},
    "fixed-point": {"method": "fixed-point"},
    "one-step": {"method": "one-step", "model": {"injection": "add"}},
    "no weight": {"method": "stars", "penalty": {"weight": 0.0}},
    "poisson": {"method": "stars", "depth": {"law": "poisson", "stratified": True}},
    "huginn's law": {"method": "stars", "depth": {"law": "poisson-lognormal"}},
    "uniform": {"method": "stars", "depth": {"law": "uniform", "curriculum_steps": 1}},
    "at last": {
        "method": "stars",
        "penalty": {"at": "last", "detach": False, "fraction": 0.5, "direction": "step"},
    },
    "micro-batches": {
        "method": "stars",
        "penalty": {"fraction": 0.5, "draw": "micro-batches"},
        "train": {"micro_batch_size": 4},
    },
    "wsd": {"method": "stars", "optim": {"schedule": "wsd", "decay_steps": 0.5}},
    "constant": {"method": "stars", "optim": {"schedule": "wsd"}},
    "epochs": {"method": "stars", "train": {"steps": None, "epochs": 0.1}},
    "not judged": {"method": "stars", "eval": {"turns": []}, "memory": {"recompute": "turn"}},
    "progressive": {"method": "stars", "loop": {"progressive": 0.5, "free_turns": 1}},
    "wandb": {"method": "stars", "memory": {"budget": 1.0}},
}


def check_reads(config, seen):
    declared = unread(config)
    train(config)
    fields = set(tree.leaves(type(config)))
    missed = fields - seen - set(declared) - set(NOT_OF_A_STEP)
    assert missed == set(), "not read, and not said to be without effect"


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_every_setting_of_a_run_on_sums_is_read_or_named(tmp_path, reads, run, figures):
    config = config_from(merge(merge(SUMS, RUNS[run]), {"out": str(tmp_path / "run")}))
    check_reads(config, reads(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({"family": "ouro", **TINY}, {"data": {"validation": 2}}),
        ({"family": "ouro", **TINY}, {"data": {"packing": False}}),
        ({"family": "huginn", **TINY}, {"data": {"packing": False, "validation": 2}}),
        ({"family": "looped_decoder", **TINY}, {"data": {"validation": 2}}),
        ({"family": "looped_lm", "d_model": 16, "n_heads": 2, "d_ff": 16},
         {"data": {"packing": False, "validation": 2}}),
        ({"family": "ouro", **TINY}, {"lora": {"rank": 2}}),
    ],
)  # fmt: skip
def test_every_setting_of_a_run_on_chats_is_read_or_named(tmp_path, reads, model, changes, figures):
    places = {"out": str(tmp_path / "run"), "data": {"cache": str(tmp_path / "cache")}}
    mapping = merge(merge(TEXT | {"method": "stars", "model": model}, changes), places)
    config = config_from(mapping)
    check_reads(config, reads(config))


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        ("addition", "--depth.value 8", "depth.value 8 is without effect: depth.law is lognormal"),
        ("addition", "--depth.rate 5", "depth.rate 5 is without effect: depth.law is lognormal"),
        ("addition-sft", "--depth.mu 2", "depth.mu 2 is without effect: depth.law is fixed"),
        ("addition", "--curriculum_start 2",
         "depth.curriculum_start 2 is without effect: depth.curriculum_steps is 0"),
        ("addition-sft", "--penalty.weight 0.1",
         "penalty.weight 0.1 is without effect: method sft has no penalty"),
        ("addition", "--penalty.weight 0 --penalty.at next",
         "penalty.at next is without effect: penalty.weight is 0"),
        ("addition-l2", "--power_steps 2",
         "penalty.power_steps 2 is without effect: method l2 takes no Jacobian"),
        ("addition", "--method fixed-point --penalty.fraction 0.25",
         "penalty.fraction 0.25 is without effect: method fixed-point takes no Jacobian"),
        ("addition", "--penalty.draw micro-batches",
         "penalty.draw micro-batches is without effect: penalty.fraction is 1"),
        ("addition", "--schedule cosine --decay_steps 9", "optim.decay_steps 9 is without effect: "
         "optim.schedule is cosine, which decays all along"),
        ("addition", "--schedule wsd --decay_steps 0 --min_lr_ratio 0.1",
         "optim.min_lr_ratio 0.1 is without effect: optim.decay_steps is 0"),
        ("addition", "--loop.free_turns 3",
         "loop.free_turns 3 is without effect: loop.progressive is 0"),
        ("addition", "--project x", "train.project x is without effect: train.report_to names"),
        ("addition", "--memory.recompute none --budget 4",
         "memory.budget 4 is without effect: memory.recompute is none"),
        ("addition", "--eval.turns= --eval.every 5",
         "eval.every 5 is without effect: eval.turns is empty"),
        ("ouro-tiny", "--tasks_limit 5",
         "eval.tasks_limit 5 is without effect: there are no eval.tasks"),
        ("ouro-tiny", "--data.validation 0 --eval.rows 4", "eval.rows 4 is without effect: "
         "data.validation is 0 and there are no eval.tasks"),
        ("ouro-tiny", "--packing false --row_length 512",
         "data.row_length 512 is without effect: data.packing is false"),
        ("ouro-tiny", "--data.split test",
         "data.split test is without effect: data.source is tiny-chat"),
        ("ouro-numina", "--model.width 32", "model.width 32 is without effect: model.path is not"),
        ("looped-smollm2", "--model.depth 3", "model.depth 3 is without effect: model.path is not"),
        ("huginn-tiny", "--model.path a/b --model.shape llama", "model.shape llama is without"),
        ("addition", "--data.train_file a --data.test_file b --data.seed 3",
         "data.seed 3 is without effect: both splits are files"),
    ],
)  # fmt: skip
def test_what_is_given_in_vain_is_told(recipe, words, expected):
    (line,) = without_effect(recipe, words.split(), load_config(recipe, words.split()))
    assert line.startswith(expected)


def test_what_is_read_is_not_told(tmp_path):
    for name in recipe_names():
        assert without_effect(name, [], load_config(name)) == []
    words = ["--depth.mu", "2", "--penalty.weight", "0", "--lora.rank", "2", "--lora.alpha", "4"]
    assert without_effect("addition", words, load_config("addition", words)) == []
    # A full configuration says every field; only what is added to it counts.
    save_config(load_config("addition-sft"), tmp_path / "config.yaml")
    again = load_config(str(tmp_path), ["--depth.mu", "2"])
    assert len(without_effect(str(tmp_path), [], again)) == 0
    assert len(without_effect(str(tmp_path), ["--depth.mu", "2"], again)) == 1
    # Also that of a run of before there were some of the fields.
    full = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del full["train"]["deterministic"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(full))
    assert len(without_effect(str(tmp_path), [], again)) == 0


def test_the_command_tells_it_of_a_recipe_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.yaml").write_text(
        "base: addition-quick-sft\npenalty: {ramp_steps: 5}\n"
        "data: {digits: 1, train_samples: 9, test_samples: 9}\n"
    )
    monkeypatch.chdir(tmp_path)
    words = "train mine.yaml --d_model 16 --n_heads 2 --steps 1 --batch_size 3 --eval.turns none"
    assert main([*words.split(), "--depth.mu", "2", "--report_to", "none"]) == 0
    said = capsys.readouterr().err
    assert "warning: penalty.ramp_steps 5 is without effect: method sft has no penalty" in said
    assert "warning: depth.mu 2 is without effect: depth.law is fixed" in said
    assert said.count("without effect") == 2


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("family", families())
def test_fields_without_effect_are_fields(family, kind):
    needed = {"model": {"family": family}, "data": {"kind": kind}}
    if any(field.name == "source" for field in dataclasses.fields(kinds()[kind].section)):
        needed["data"] |= {"source": "tiny-chat"} | ({"packing": False} if kind == "chats" else {})
    config = config_from({"method": "sft", "depth": FIXED, **needed})
    assert set(unread(config)) <= set(tree.leaves(config_class(family, kind)))

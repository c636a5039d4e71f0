"""Every setting that a task accepts is read by it, and does what it says."""

import dataclasses
import json
import sys
import typing

import pytest
import torch

from stars_fast.base import tree
from stars_fast.base.checkpoints import latest, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.data.addition import AdditionData
from stars_fast.data.kinds.sums import Sums
from stars_fast.evaluation.addition import evaluate
from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.saved import find_model, load_model
from stars_fast.training.config import config_class, load_config
from stars_fast.training.run.trainer import train

DTYPES = {  # of weights and averages, and of the states
    "float32": (torch.float32, torch.float32),
    "mixed": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("method", ["sft", "stars", "l2"])
@pytest.mark.parametrize("precision", DTYPES)
def test_the_addition_task_computes_in_its_precision(tiny, monkeypatch, method, precision):
    states = []
    read = LoopedLoop.token_loss
    monkeypatch.setattr(
        LoopedLoop, "token_loss", lambda *args: (states.append(args[1].dtype), read(*args))[1]
    )
    folder = train(tiny(method=method, precision=precision, train={"steps": 2})).folder
    weights, computed = DTYPES[precision]
    assert set(states) == {computed}
    saved = saved_tensors(latest(folder / "checkpoints"))
    kept = {t.dtype for name, t in saved.items() if not name.endswith(".step")}
    assert kept == {weights}
    assert {p.dtype for p in load_model(find_model(folder)).parameters()} == {weights}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["loss"] > 0 and row["skipped"] == 0 for row in rows)


def test_a_run_in_bf16_is_evaluated_as_it_judged_itself(tiny):
    folder = train(tiny(precision="bfloat16", eval={"turns": [1, 3]})).folder
    said = json.loads((folder / "results.json").read_text())["accuracy"]
    model, config = load_model(find_model(folder)), load_config(str(folder))
    again = evaluate(LoopedLoop(model), Sums(AdditionData(config.data), "test"), [1, 3])
    assert {int(turns): value for turns, value in said.items()} == again


@pytest.mark.slow
def test_stochastic_rounding_trains_sums(tiny):
    pytest.importorskip("torchao")
    config = tiny(precision="bfloat16", optim={"stochastic_rounding": True}, train={"steps": 2})
    assert train(config).step == 2


# -- every field


CHECKS, COPIES = ("__post_init__", "check_types"), ("dataclasses.py", "base/tree.py")
"""Functions and files that read fields without their having an effect."""

LOOKED_AT = {
    "description": "in the list of recipes",
    "lora.per_turn": "only false",
    "parallel.shard": "of hsdp: refused with another kind",
    "parallel.reshard": "of fsdp and hsdp: refused with another kind",
    "parallel.offload": "of fsdp and hsdp: refused with another kind",
}
"""Fields that a plain run need not read, and why."""


def sections(cls, where=""):
    """The dataclasses of a configuration by dotted path."""
    found = {where: cls}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= sections(hint, f"{where}{name}.")
    return found


@pytest.fixture
def reads(monkeypatch):
    """reads(cls) -> the fields of a configuration that are read from then on, by dotted path."""

    def watch(cls):
        seen = set()
        for where, kind in sections(cls).items():
            names = {field.name for field in dataclasses.fields(kind)}

            def read(self, name, where=where, names=names):
                if name in names:
                    code = sys._getframe(1).f_code
                    copies = code.co_filename.endswith(COPIES)
                    if not copies and code.co_name not in CHECKS:
                        seen.add(where + name)
                return object.__getattribute__(self, name)

            monkeypatch.setattr(kind, "__getattribute__", read)
        return seen

    return watch


VARIANTS = (
    {"method": "stars"},
    {"method": "sft", "eval": {"every": 1, "turns": [1]}, "loop": {"progressive": 0.5}},
    {
        "method": "stars",
        "depth": {"law": "poisson"},
        "optim": {"schedule": "wsd"},
        "memory": {"recompute": "layer"},
    },
    {"method": "stars", "lora": {"rank": 2}},
    {"method": "stars", "depth": {"curriculum_steps": 2}, "train": {"steps": None, "epochs": 0.1}},
)


def test_every_setting_of_the_addition_task_is_read(tiny_in, tmp_path, reads):
    pytest.importorskip("peft")
    Config = config_class("looped_lm", "sums")
    seen = reads(Config)
    injected = {"method": "one-step", "model": {"injection": "adapter"}}
    for number, changes in enumerate((*VARIANTS, injected)):
        config = tiny_in(tmp_path / str(number), **tree.merge({"train": {"steps": 2}}, changes))
        train(config)
    assert set(tree.leaves(Config)) - seen == LOOKED_AT.keys()


def test_every_setting_of_ouro_is_read(tmp_path, reads):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from ouro_runs import ouro_run

    Config = config_class("ouro", "chats")

    seen = reads(Config)
    short = {"train": {"steps": 2}, "data": {"validation": 4}, "eval": {"turns": [1]}}
    (tmp_path / "chats").mkdir()
    row = {"prompt": "1 + 2?", "answer": "It is 3."}
    lines = "".join(json.dumps(row | {"prompt": f"{i} + 2?"}) + "\n" for i in range(40))
    (tmp_path / "chats" / "train.jsonl").write_text(lines)
    own = {"source": str(tmp_path / "chats"), "prompt": "prompt", "answer": "answer"}
    padded = {"method": "stars", "data": {**own, "samples": 20, "packing": False}}
    for number, changes in enumerate((*VARIANTS, padded)):
        changes = tree.merge(short, changes)
        train(ouro_run(tmp_path / str(number), tmp_path / "cache", **changes))
    tasks = {"eval.tasks_limit"}  # of lm-eval's
    assert set(tree.leaves(Config)) - seen == LOOKED_AT.keys() | tasks


@pytest.mark.parametrize(
    ("field", "value"),
    [("shard", 2), ("reshard", True), ("offload", True), ("kind", "fsdp"), ("kind", "hsdp")],
)
def test_what_the_addition_task_can_not_do_is_refused(tiny, field, value):
    with pytest.raises(ConfigError, match=rf"{field}|parallel.kind"):
        tiny(parallel={field: value})

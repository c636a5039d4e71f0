"""Runs that leave parts of the model as they are."""

import pytest
import torch

from stars_fast.base.checkpoints import checkpoints, saved_tensors
from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.models.families import family_named
from stars_fast.models.saved import find_model, load_model
from stars_fast.training.run.trainer import train


def test_frozen_parts_stay_and_the_others_move(tiny):
    config = tiny(train={"freeze": ["tokens", "block.0.mlp"]})
    before = dict(
        family_named("looped_lm").start(config.model, torch.float32, 0)[0].named_parameters()
    )
    train(config)
    after = dict(load_model(find_model(config.out)).named_parameters())
    frozen = {name for name in after if torch.equal(after[name], before[name])}
    assert frozen == {name for name in after if name.startswith(("tokens", "block.0.mlp."))}
    assert len(frozen) == 9
    saved = saved_tensors(checkpoints(RunFolder(config.out).checkpoints)[6])
    averaged = {n.removeprefix("optimizer.").rpartition(".")[0] for n in saved if "exp_avg" in n}
    assert averaged == after.keys() - frozen


def test_names_of_nothing_and_of_everything(tiny):
    with pytest.raises(ConfigError, match=r"train\.freeze: expected parts .*tokens, .*got head"):
        train(tiny(train={"freeze": ["tokens", "head"]}))
    everything = ["tokens", "positions", "block", "norm"]
    with pytest.raises(ConfigError, match="expected to leave something to train"):
        train(tiny(train={"freeze": everything}))
    with pytest.raises(ConfigError, match=r"train\.freeze: expected none with lora\.rank"):
        tiny(train={"freeze": ["tokens"]}, lora={"rank": 2})

"""The name of a model's answers in lm-eval's cache."""

import copy

import pytest
import torch
from torch import nn

from stars_fast.evaluation.answer_cache import identity_of


class Settings:
    def to_dict(self):
        return {}


class Model(nn.Linear):
    config = generation_config = Settings()


class Words:
    def get_vocab(self):
        return {"a": 0}


def name_of(model):
    return identity_of(model, Words(), "sequence", {})


def test_quantised_weights_have_a_name_of_their_own():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = Model(64, 64)
    plain = name_of(model)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    quantised = name_of(model)
    assert quantised not in (plain, name_of(Model(64, 64)))
    other = copy.deepcopy(model)
    assert name_of(other) == quantised
    with torch.no_grad():
        other.weight.qdata[3, 5] += 1
    assert name_of(other) != quantised

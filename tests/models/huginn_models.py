"""Tiny Huginn models for the tests, with weights and a tokenizer in the public format."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from stars_fast.models.huginn import HuginnForCausalLM
from stars_fast.models.huginn.tiny import write_tiny_huginn

_folders = []


@cache
def checkpoint(shape="huginn", **fields) -> Path:
    """A checkpoint with these fields, kept until the end of the process."""
    _folders.append(TemporaryDirectory())
    return write_tiny_huginn(Path(_folders[-1].name) / "tiny-huginn", shape=shape, **fields)


def model(shape="huginn", dtype=torch.float64, **fields):
    """A fresh model, in evaluation mode."""
    return HuginnForCausalLM.from_pretrained(checkpoint(shape, **fields), dtype=dtype)


def files(folder):
    """The weights and the configuration of a checkpoint, as they lie in its files."""
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    return weights, json.loads((Path(folder) / "config.json").read_text())


def tokens(batch, length, seed=0, vocab=320):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, length), generator=generator)

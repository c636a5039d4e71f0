"""Tiny Ouro models for the tests, with weights and a tokenizer in the public format."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro

_folders = []


@cache
def checkpoint(**fields) -> Path:
    """A checkpoint with these fields, kept until the end of the process."""
    fields = {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}
    _folders.append(TemporaryDirectory())
    return write_tiny_ouro(Path(_folders[-1].name) / "tiny-ouro", **fields)


def model(dtype=torch.float64, **fields):
    """A fresh model, in evaluation mode."""
    return OuroForCausalLM.from_pretrained(checkpoint(**fields), dtype=dtype)


def tokens(batch, length, seed=0, vocab=320):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, length), generator=generator)


def greedy(model, ids, new=8, **options):
    """New tokens alone; no token stops."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(ids, max_new_tokens=new, **options)[:, ids.shape[1] :]

"""lm-eval's cache of answers (`use_cache`), whose keys are the requests alone: each model, at each
depth, gets a table of its own in the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stars_fast.base.optional import need

_PLACES = ("device", "batch_size", "max_batch_size", "tokenizer", "trust_remote_code")
"""Arguments of a model of lm-eval that its answers do not depend on, or that are looked at here."""


def own_table(answers: Any, identity: str) -> None:
    """Turn lm-eval's open cache, a `SqliteDict`, to the table of a name, which is made if it is not
    there. lm-eval keeps one object for reading and writing."""
    made = need("sqlitedict", "a cache of answers").SqliteDict(answers.filename, tablename=identity)
    answers.tablename = made.tablename
    made.close()


def identity_of(model: Any, tokenizer: Any, tol_per: str, given: Mapping[str, Any]) -> str:
    """A name that differs where answers may: by the weights, bit for bit, the configuration, which
    holds turns and tolerance, the settings of generation, the vocabulary, and the arguments of
    lm-eval's model.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        tol_per: what rests by itself.
        given: arguments of lm-eval's model.
    """
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        for tensor in _parts(weight.detach()):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    settings = model.config.to_dict() | {"_name_or_path": None}
    arguments = {name: value for name, value in given.items() if name not in _PLACES}
    rest = [settings, model.generation_config.to_dict(), tokenizer.get_vocab(), tol_per, arguments]
    found.update(json.dumps(rest, sort_keys=True, default=repr).encode())
    return found.hexdigest()[:32]


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The ordinary tensors that a tensor is made of: a quantised one has several."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))

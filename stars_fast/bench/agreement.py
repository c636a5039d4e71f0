"""Whether the published way computes what ours does: a gate before the two are timed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stars_fast.bench.published import Published
from stars_fast.bench.workload import RandomChats, one_by_one, random_model
from stars_fast.training.batches import MicroBatch, micro_batch, to_device
from stars_fast.training.chats import PackedChats
from stars_fast.training.config import config_from
from stars_fast.training.ouro import OuroLoop
from stars_fast.training.precision import autocast
from stars_fast.training.samples import Samples
from stars_fast.training.step import Plan, StepLoss

TURNS = 2

TOLERANCES = {
    # Sums of a few thousand terms in another order.
    "float32": {"token loss": 1e-5, "its gradient": 1e-5, "penalty": 1e-5},
    # Each way rounds its activations to 8 bits, at other places.
    "bfloat16": {"token loss": 1e-3, "its gradient": 5e-2, "penalty": 2e-2},
    "mixed": {"token loss": 1e-3, "its gradient": 5e-2, "penalty": 2e-2},
}
"""Relative errors at most, by precision; of the gradient in the L2 norm over all weights."""


class DisagreementError(RuntimeError):
    """Two ways that should compute the same do not."""


def check(fields: dict[str, Any], device: torch.device, precision: str) -> dict[str, float]:
    """The differences on a model of the widths in `fields` (of an `OuroConfig`), with two layers
    and few words, on packed documents.

    Raises:
        DisagreementError: one of them is above its tolerance; it is named.
    """
    fields = fields | {"num_hidden_layers": 2, "vocab_size": 320}
    model = random_model(fields, device, precision)
    chats = RandomChats(3, 64, model.config.vocab_size)
    source = PackedChats(chats, int(chats.lengths.sum()), 0)
    found = differences(model, to_device(micro_batch(source, np.array([0])), device), precision)
    for what, error in found.items():
        if not error <= TOLERANCES[precision][what]:
            raise DisagreementError(
                f"the published way differs from ours in the {what} by {error:.1e}, expected "
                f"{TOLERANCES[precision][what]:.0e} at most"
            )
    return found


def differences(model: Any, batch: MicroBatch, precision: str) -> dict[str, float]:
    """The published way against the trainer's loss on the documents of a packed `batch`: token loss
    summed over all tokens, its gradient; and ||v^T J||^2 of a document for one v, against our turn
    in fp64."""
    published = Published(model)
    documents = one_by_one([batch], [TURNS])
    with autocast(precision, batch.tokens.device, sharded=False):
        losses = [
            published.token_loss(published.states(each.tokens, TURNS), each.targets, "sum")
            for each in documents
        ]
        loss = torch.stack(losses).sum()
        ours = _trainers_loss(model, batch, precision)
    gradient, expected = _gradient(model, loss), _gradient(model, ours)

    h = model.model.embed_tokens(documents[0].tokens).detach()
    v = torch.randn_like(h)
    with autocast(precision, batch.tokens.device, sharded=False):
        penalty = published.penalty(h, v).detach()
    exact = _penalty_in_fp64(model, h, v)
    return {
        "token loss": _relative(loss, ours),
        "its gradient": _relative(gradient, expected),
        "penalty": _relative(penalty, exact),
    }


def _trainers_loss(model: Any, batch: MicroBatch, precision: str) -> Tensor:
    depth = {"law": "fixed", "value": TURNS}
    config = config_from(
        {"task": "ouro", "method": "sft", "precision": precision, "depth": depth}
        | {"data": {"source": "random"}}
    )
    plan = Plan(step=0, turns=[TURNS], weight=0.0, lr=0.0)
    return StepLoss(OuroLoop(model), config).share(batch, plan, TURNS, 1)[0]


def _gradient(model: Any, loss: Tensor) -> Tensor:
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, weights)])


def _penalty_in_fp64(model: Any, h: Tensor, v: Tensor) -> Tensor:
    wide = OuroLoop(copy.deepcopy(model).double())
    h, v = h.double().requires_grad_(), v.double()
    (j,) = torch.autograd.grad(wide.turn(h, Samples(1))(h), h, v / v.norm())
    return j.square().sum()


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()

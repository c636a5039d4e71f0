"""Whether the published way computes what ours does: a gate before the two are timed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.published import Published
from benchmarks.workload import RandomChats, one_by_one, random_model
from stars_fast.data.batches import MicroBatch, micro_batch, to_device
from stars_fast.data.documents import PackedChats
from stars_fast.jsrr import fused_jsrr
from stars_fast.models.families.ouro import OuroLoop
from stars_fast.tokens import Tokens
from stars_fast.training.config import config_from
from stars_fast.training.step.precision import autocast
from stars_fast.training.step.train_step import StepLoss, StepPlan

CHECKED_TURNS = 2
GRADIENT = ", gradient"

# Sums of a few thousand terms in another order.
SINGLE = {"token loss": 1e-5, "published penalty": 1e-5, "our penalty": 1e-5, "gradient": 1e-5}
# Each way rounds its activations to 8 bits, at other places: some 2^-8 by layer, in any direction.
# In the mean over tokens it cancels, in a penalty of one v in part, in a gradient's entries not.
HALF = {"token loss": 1e-3, "published penalty": 2e-2, "our penalty": 2e-2, "gradient": 5e-2}

TOLERANCES = {"float32": SINGLE, "bfloat16": HALF, "mixed": HALF}
"""Relative errors at most, by precision; of gradients in the L2 norm over all weights."""


class DisagreementError(RuntimeError):
    """Two ways that should compute the same do not."""


def check_agreement(
    fields: dict[str, Any], device: torch.device, precision: str
) -> dict[str, float]:
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
        most = TOLERANCES[precision]["gradient" if what.endswith(GRADIENT) else what]
        if not error <= most:
            raise DisagreementError(
                f"the published way and ours should compute the same: {what}: expected a relative "
                f"error of {most:.0e} at most, got {error:.1e}"
            )
    return found


def differences(model: Any, batch: MicroBatch, precision: str) -> dict[str, float]:
    """The published way against the trainer's loss on the documents of a packed `batch`: the token
    loss summed over all tokens. The penalty of a document for one v, ||v^T J||^2 the published way
    and ||J v||^2 ours, each against the same in fp64. All with their gradients."""
    device = batch.tokens.device
    published = Published(model, precision)
    documents = one_by_one([batch], [CHECKED_TURNS])
    with autocast(precision, device, sharded=False):
        losses = [
            published.token_loss(published.states(each.tokens, CHECKED_TURNS), each.targets, "sum")
            for each in documents
        ]
        loss = torch.stack(losses).sum()
        expected = _trainers_loss(model, batch, precision)
    found = _compared("token loss", (loss, model), (expected, model))

    h = published.start(documents[0].tokens).detach()
    v = torch.randn_like(h)
    with autocast(precision, device, sharded=False):
        rows = published.penalty(h, v)
        columns = fused_jsrr(OuroLoop(model).turn(h, Tokens(*h.shape[:2])), h, v=v)
    wide = copy.deepcopy(model).double()
    exact_rows, exact_columns = _penalties_in_fp64(wide, h, v)
    found |= _compared("published penalty", (rows, model), (exact_rows, wide))
    return found | _compared("our penalty", (columns, model), (exact_columns, wide))


def _compared(
    what: str, found: tuple[Tensor, Any], expected: tuple[Tensor, Any]
) -> dict[str, float]:
    """The relative errors of a loss and of its gradient; each loss comes with its model."""
    return {
        what: _relative(found[0].detach(), expected[0].detach()),
        what + GRADIENT: _relative(_gradient(*found), _gradient(*expected)),
    }


def _trainers_loss(model: Any, batch: MicroBatch, precision: str) -> Tensor:
    depth = {"law": "fixed", "value": CHECKED_TURNS}
    config = config_from(
        {"task": "ouro", "method": "sft", "precision": precision, "depth": depth}
        | {"data": {"source": "random"}}
    )
    plan = StepPlan(step=0, turns=[CHECKED_TURNS], weight=0.0, lr=0.0)
    return StepLoss(OuroLoop(model), config)(batch, plan, CHECKED_TURNS, 1)[0]


def _gradient(loss: Tensor, model: Any) -> Tensor:
    """In all weights, one after the other; 0 in those that the loss does not reach."""
    weights = [p for p in model.parameters() if p.requires_grad]
    if not loss.requires_grad:
        return torch.cat([torch.zeros_like(p).double().flatten() for p in weights])
    # Of several losses some share a graph.
    grads = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
    return torch.cat([g.double().flatten() for g in grads])


def _penalties_in_fp64(model: Any, h: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """||v^T J||^2 and ||J v||^2 at h [B, S, D] of a model in fp64, v scaled to unit norm, by plain
    operations and reverse mode alone."""
    h, v = h.double().requires_grad_(), v.double()
    v = v / v.norm()
    out = Published(model, "float32", checkpointed=False).turn(h, products=True)(h)
    (rows,) = torch.autograd.grad(out, h, v, create_graph=True)
    # w^T J is linear in w, and its derivative by w along v is J v.
    w = torch.zeros_like(h, requires_grad=True)
    (linear,) = torch.autograd.grad(out, h, w, create_graph=True)
    (columns,) = torch.autograd.grad(linear, w, v, create_graph=True)
    return rows.square().sum(), columns.square().sum()


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()

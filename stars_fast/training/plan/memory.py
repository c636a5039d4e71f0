"""Bytes of a run on one GPU, by count: what a micro-batch keeps, and what is there anyway."""

from __future__ import annotations

from typing import Any

from stars_fast.models.shape import Shape
from stars_fast.training.plan.cards import Card
from stars_fast.training.plan.trained import trained_of
from stars_fast.training.scale.budget import USABLE
from stars_fast.training.scale.memory import GIB, Activations

CONTEXT = 0.6 * GIB
"""CUDA's context, its libraries and NCCL's buffers (taken, not measured)."""

LOGITS = 0.5 * GIB
"""A chunk of logits in the loss (`ops.linear_cross_entropy`)."""

MACHINE = 8
"""GPUs of a machine, among which hsdp shares out the weights."""


def activations(shape: Shape, tokens: float, positions: float, config: Any) -> Activations:
    """Bytes that a micro-batch of so many tokens, and so many targets, keeps for the backward."""
    trained = trained_of(config)
    low = config.precision != "float32"
    size = 2 if low else 4
    d, f = shape.width, shape.inner
    cast = casts(config)
    anew = cast and not has_copies(config)  # by autocast, in each micro-batch
    weights = round(trained.block * size * shape.block_weights)
    adapters = trained.rank * (7 if shape.gated else 6)
    inner = (3 if shape.gated else 2) * f
    layer = (size * (6 * d + 2 * shape.queries + 2 * shape.keys + inner + adapters)) * tokens
    layer += 4 * shape.heads * tokens
    again = size * (2 * d + f) * tokens if shape.native else 0
    state = size * d * tokens
    own = 2 * shape.layer_weights if anew else 0
    # A chained layer starts from the state and its norm (`models.ouro.layers`), which a plain turn
    # makes again; the closing norm is part of the last
    chained = config.model.family == "ouro" and _alone(config) and not config.train.compile
    starts = 2 * state if chained else state

    def turn(each: float) -> int:
        return round(shape.layers * each + state * (3 if shape.injection else 1))

    rest = positions * d * size + shape.outside * layer
    rest += trained.head * (2 * size if cast else size) * shape.head_weights
    return Activations(
        state=round(state),
        turn=turn(layer),
        layer=round(layer + own),
        turn_selective=turn(layer - again),
        turn_by_layer=turn(state) - round(state if chained else 0),
        dual=2 * turn(layer) + round(2 * state),
        dual_layer=round(2 * layer + own),
        dual_selective=2 * turn(layer - again) + round(2 * state),
        dual_by_layer=2 * turn(starts) + round(2 * state),
        rest=round(rest),
        shared=2 * shape.block_weights if anew else 0,
        copies=2 * shape.block_weights if anew else 0,
        weights=0 if cast or (_alone(config) and config.train.accumulation == 1) else weights,
    )


def casts(config: Any) -> bool:
    """Whether weights are in fp32 and the turns compute with bf16 copies of them that are not
    FSDP's."""
    return config.precision == "mixed" and not config.parallel.sharded and not config.lora.wanted


def has_copies(config: Any) -> bool:
    """Whether those copies stay, and gradients are added to the weights' own at once."""
    return casts(config) and not config.train.compile


def _alone(config: Any) -> bool:
    return not config.parallel.sharded


def held(shape: Shape, config: Any, gpus: int) -> int:
    """Bytes of weights, gradients, averages, copies of weights and what FSDP gathers, on one
    GPU."""
    parameters, parallel, trained = shape.parameters, config.parallel, trained_of(config)
    full = 2 if config.precision == "bfloat16" else 4
    low = 4 if config.precision == "float32" else 2
    moved = trained.parameters(shape)
    biggest = full * min(shape.head_weights, moved) if not trained.rank else 0
    # LoRA's base is in the dtype that it computes in; frozen parts are kept as the others are
    frozen = parameters * low if trained.rank else (parameters - moved) * full
    share = {"fsdp": gpus, "hsdp": parallel.shard or min(gpus, MACHINE)}.get(parallel.kind, 1)
    total = ((2 * full + 2 * average_bytes(config)) * moved + frozen) / share
    total += 2 * shape.block_weights if has_copies(config) else 0
    if parallel.sharded:
        unit = max(shape.layer_weights, parameters - shape.block_weights)
        gathered = (unit if parallel.reshard else parameters) + 2 * unit
        total = (0 if parallel.offload else total) + low * gathered
        total += 4 * moved if config.train.accumulation > 1 else 0
        biggest = biggest // share
    return round(total + biggest)


def average_bytes(config: Any) -> int:
    """Bytes of a number in AdamW's averages: weights' own, or fp32 where steps are rounded at
    random."""
    return 2 if config.precision == "bfloat16" and not config.optim.stochastic_rounding else 4


def budget(shape: Shape, config: Any, gpus: int, card: Card) -> int:
    """Bytes that activations may take; as `scale.budget` has it on a device."""
    if config.memory.budget is not None:
        return round(config.memory.budget * GIB)
    free = card.memory - CONTEXT - LOGITS - held(shape, config, gpus)
    return max(int(USABLE * free), 0)

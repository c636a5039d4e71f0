"""The turns of the shared block: all or only the last of them in the graph, kept or recomputed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stars_fast.base.capturing import capturing
from stars_fast.models.loop import Turn
from stars_fast.ops.selective import selective

RunLayer = Callable[..., Any]
"""How a layer is run: `run(layer, *args)` gives what `layer(*args)` gives."""

TurnByLayer = Callable[[RunLayer], Turn]
"""The turn whose layers are each run by a given `RunLayer`."""


def recomputed(layer: Any, *args: Any) -> Any:
    """`layer(*args)`, of which the backward keeps the inputs alone; random draws are repeated, but
    in a CUDA graph, which can't ask the generators for their state."""
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=not capturing())


class Recompute(NamedTuple):
    """The part of a step that the backward computes a second time rather than keeps.

    turns: how many of the turns in the graph, counted from the first.
    per: "turn" keeps the state before a turn and recomputes the turn at once; "layer" keeps the
        state before each of its layers and recomputes one layer at a time.
    dual: whether the dual turn is recomputed too, layer by layer.
    selective: whether of the turns that are kept the results of norms and gates are recomputed
        (`ops.selective`).
    """

    turns: int = 0
    per: Literal["turn", "layer"] = "turn"
    dual: bool = False
    selective: bool = False

    def describe(self) -> str:
        """The choice in words."""
        turns = "the first turn" if self.turns == 1 else f"the first {self.turns} turns"
        layers = "" if self.per == "turn" else " layer by layer"
        parts = [turns + layers] if self.turns else []
        parts += ["the dual turn layer by layer"] if self.dual else []
        parts += ["norms and gates"] if self.selective else []
        return f"recomputes {' and '.join(parts)}" if parts else "keeps all activations"


KEEP_ALL = Recompute()


def run_turns(
    block: Turn,
    h: Tensor,
    turns: int,
    backprop_turns: int | None = None,
    recompute: Recompute = KEEP_ALL,
    layered: TurnByLayer | None = None,
    before: Callable[[Tensor, int], Tensor] | None = None,
) -> list[Tensor]:
    """Apply `block` `turns` times to h^(0) = `h` [B, S, D]; the states that are in the graph.

    Returns [h^(0), ..., h^(turns)], or with `backprop_turns` = k < turns the last k + 1 of them:
    the turns before run without a graph and the gradient stops at h^(turns - k). States and
    gradients do not depend on `recompute`; `layered` comes from `by_layer` and is needed for
    layers alone. `before` gives what a turn starts from, of the state and the turn's number.

    Raises:
        ValueError: layers are to be recomputed and `layered` is None.
    """
    start = h
    skipped = 0 if backprop_turns is None else max(turns - backprop_turns, 0)
    if skipped:
        with torch.no_grad():
            for turn in range(skipped):
                h = block(h if before is None else before(h, turn))
        # Autocast keeps the weights it has cast, here without a graph, and would hand them on.
        torch.clear_autocast_cache()
        # The prelude then gets a gradient of zero rather than none, so that every parameter takes
        # part in every step, as data-parallel reduction expects.
        h = h + 0.0 * start
    again: Turn = partial(recomputed, block)
    if recompute.turns and recompute.per == "layer":
        # Of what a layer starts from a norm of the state need not be kept beside it
        again = selective(_layered(layered)(recomputed))
    kept: Turn = selective(block) if recompute.selective else block
    states = [h]
    for turn in range(turns - skipped):
        h = states[-1] if before is None else before(states[-1], skipped + turn)
        states.append((again if turn < recompute.turns else kept)(h))
    return states


def dual_turn(turn: Turn, recompute: Recompute, layered: TurnByLayer | None = None) -> Turn:
    """The turn to take the Jacobian of: `turn`, or the same with its layers, or its norms and
    gates, recomputed.

    Raises:
        ValueError: layers are to be recomputed and `layered` is None.
    """
    if recompute.dual:
        return _layered(layered)(recomputed)
    return selective(turn) if recompute.selective else turn


def by_layer(block: Turn, model: nn.Module | None = None) -> TurnByLayer | None:
    """How to run the layers of `block` one by one; None where they can't be told apart.

    `block` is a sequence of layers (`nn.Sequential`), or one turn of a `model` that runs its layers
    through `_gradient_checkpointing_func` where its `gradient_checkpointing` is set, as Ouro and
    the models of transformers do in training mode.
    """
    switches = _switches(model)
    if switches:
        return lambda run: _switched(block, switches, run)
    if isinstance(block, nn.Sequential):
        return lambda run: _sequence(block, run)
    return None


def _layered(layered: TurnByLayer | None) -> TurnByLayer:
    if layered is None:
        raise ValueError("layered: expected the layers of the block to recompute them, got None")
    return layered


def _switches(model: nn.Module | None) -> list[Any]:
    modules = () if model is None else model.modules()
    return [module for module in modules if hasattr(module, "gradient_checkpointing")]


def _switched(block: Turn, switches: list[Any], run: RunLayer) -> Turn:
    def turn(h: Tensor) -> Tensor:
        with _checkpointing(switches, run):
            return block(h)

    return turn


@contextmanager
def _checkpointing(switches: list[Any], run: RunLayer) -> Iterator[None]:
    """Inside, the layers go through `run`; then as before."""
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    before = [[getattr(module, name, None) for name in names] for module in switches]
    for module in switches:
        module.gradient_checkpointing, module._gradient_checkpointing_func = True, run
    try:
        yield
    finally:
        for module, values in zip(switches, before, strict=True):
            for name, value in zip(names, values, strict=True):
                setattr(module, name, value)


def _sequence(layers: nn.Sequential, run: RunLayer) -> Turn:
    def turn(h: Tensor) -> Tensor:
        for layer in layers:
            h = run(layer, h)
        return h

    return turn

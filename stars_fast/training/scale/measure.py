"""Bytes that each part of a step keeps for the backward, measured by running it forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from stars_fast.dual.tensor import Dual
from stars_fast.models.loop import Turn
from stars_fast.ops.selective import recipe_of, recording
from stars_fast.training.scale.budget import local_bytes
from stars_fast.training.scale.memory import Activations
from stars_fast.training.step.turns import TurnByLayer, recomputed


def measure_activations(
    model: nn.Module,
    prelude: Callable[[], Tensor],
    block: Turn,
    loss: Callable[[Tensor], Any],
    penalty: Callable[[Turn, Tensor], Any] | None = None,
    layered: TurnByLayer | None = None,
) -> Activations:
    """Bytes that each part of a step keeps for the backward, measured on one micro-batch.

    Runs the parts forward, without keeping anything and without moving the random generators: it
    needs no more memory than a forward without a graph. What autocast and mode the step has must
    hold around this call too. Under FSDP2 call it on every process, inside the forward of the root.

    Args:
        model: holds the parameters and buffers, which do not count.
        prelude: gives h^(0), [B, S, D].
        block: one turn.
        loss: coda, head and token loss of a state.
        penalty: of a block at a state, e.g. `fused_jsrr`; None for a run without one.
        layered: the layers of the block, from `turns.by_layer`; None if not known.
    """
    devices = [p.device for p in model.parameters() if p.is_cuda][:1]
    with torch.random.fork_rng(devices), torch.enable_grad(), KeptBytes(model) as kept:
        h = prelude()
        before = kept.new()
        kept.weights = 0
        h = block(h)
        first, weights = kept.new(), kept.weights
        h = block(h)
        turn = kept.new()  # what the first has kept for all is not new
        loss(h)
        head = kept.new()
        if penalty is not None:
            penalty(block, h)
        dual = kept.new()
        h = _recorded(block)(h)
        kept.new()
        _recorded(block)(h)  # which keeps the state that it starts from
        selective = kept.new()
        if penalty is not None:
            penalty(_recorded(block), h)
        dual_selective = kept.new()

        layer, by_layer, dual_layer, dual_by_layer = turn, None, dual, None
        if layered is not None:
            layer = _largest(model, layered, lambda each: each(h))
            by_layer = _recomputed(model, layered, lambda each: _recorded(each)(h))
            if penalty is not None:
                dual_layer = _largest(model, layered, lambda each: penalty(each, h))
                dual_by_layer = _recomputed(model, layered, lambda each: penalty(each, h))
    shared = max(first - turn, 0)
    return Activations(
        state=local_bytes(h),
        turn=turn,
        layer=layer,
        turn_selective=selective,
        turn_by_layer=by_layer,
        dual=dual,
        dual_layer=dual_layer,
        dual_selective=dual_selective,
        dual_by_layer=dual_by_layer,
        rest=before + head,
        shared=shared,
        copies=shared if torch.is_autocast_enabled(h.device.type) else 0,
        weights=weights,
    )


class KeptBytes:
    """Counts the bytes of the storages that are saved for a backward, once each, without keeping
    them: no backward can follow. Parameters and buffers do not count, nor what is made again where
    `ops.selective.recording` is on.

    Attributes:
        weights: bytes of the parameters among them that want a gradient, to be set to 0 by whoever
            asks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bytes = self.weights = 0
        self._seen = WeakIdKeyDictionary()
        hook: Any = self._count
        self._hooks = saved_tensors_hooks(hook, hook)

    def __enter__(self) -> "KeptBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def new(self) -> int:
        """Bytes since the last call."""
        found, self._bytes = self._bytes, 0
        return found

    def _count(self, tensor: Tensor) -> None:
        tensor = tensor.stack if isinstance(tensor, Dual) else tensor
        storage = tensor.untyped_storage()
        if storage in self._seen or recipe_of(tensor) is not None:
            return
        self._seen[storage] = True
        # Asked anew each time: FSDP2 swaps its parameters while a layer runs.
        for each in (*self._model.parameters(), *self._model.buffers()):
            if each.untyped_storage() is storage:
                self.weights += storage.nbytes() if each.requires_grad else 0
                return
        self._bytes += storage.nbytes()


def _recorded(block: Turn) -> Turn:
    """The block, of which what `ops.selective` makes again is not counted."""

    def run(h: Tensor) -> Tensor:
        with recording():
            return block(h)

    return run


def _largest(model: nn.Module, layered: TurnByLayer, use: Callable[[Turn], Any]) -> int:
    """Bytes kept by the largest layer of a block, which `use` runs."""
    largest = 0

    def run(layer: Any, *args: Any) -> Any:
        nonlocal largest
        with KeptBytes(model) as kept:
            out = layer(*args)
        largest = max(largest, kept.new())
        return out

    use(layered(run))
    return largest


def _recomputed(model: nn.Module, layered: TurnByLayer, use: Callable[[Turn], Any]) -> int:
    """Bytes kept by a block with its layers recomputed, which `use` runs."""
    with KeptBytes(model) as kept:
        use(layered(recomputed))
    return kept.new()

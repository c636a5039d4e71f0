"""Layers of a model on 16-bit copies of their fp32 weights (`ops.low_weights`), for a while: inside
of `LowLayers.used` their linear maps go through the copies where autocast would cast.

A module whose maps share an input names them in `joint`, as ("q_proj", "k_proj", "v_proj"): they
share one copy, and the module may ask for them as one (`low_forward.joint_low`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stars_fast.models.low_forward import LowForward
from stars_fast.models.plain_linear import is_plain, is_plain_linear
from stars_fast.ops.low_weights import LowWeights, refresh


class LowLayers:
    """Copies of the weights of the linear maps in some modules of a model.

    Maps that are more than their weight and bias (adapters, hooks, quantised or sharded weights) or
    not in fp32, or whose weight another module has too, are left as they are.

    Args:
        model: the whole, to find weights that are shared.
        modules: those whose maps get copies.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        owners = Counter(id(p) for each in model.modules() for p in each._parameters.values())
        self._forwards: dict[nn.Linear, LowForward] = {}
        self._copies: list[LowWeights] = []
        inside = list(dict.fromkeys(each for module in modules for each in module.modules()))
        for module in inside:
            for names in getattr(module, "joint", ()):
                self._add([getattr(module, name) for name in names], owners)
        for module in inside:
            self._add([module], owners)

    def _add(self, maps: Sequence[Any], owners: Counter[int]) -> None:
        """One copy of all of these maps, if they can share one."""
        if not all(_fits(each, owners) and each not in self._forwards for each in maps):
            return
        kinds = {(each.bias is None, each.weight.requires_grad, each.in_features) for each in maps}
        if len(kinds) > 1:
            return
        biases = [each.bias for each in maps if each.bias is not None]
        if any(bias.requires_grad != maps[0].weight.requires_grad for bias in biases):
            return
        whole = LowWeights([each.weight for each in maps], biases)
        self._copies.append(whole)
        for index, each in enumerate(maps):
            found = LowForward(each, whole if len(maps) == 1 else whole.part(index))
            found.joint, found.maps = whole, tuple(maps)
            self._forwards[each] = found

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(each.nbytes for each in self._copies)

    def refresh(self) -> None:
        """Copy the weights as they are now."""
        refresh(self._copies)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, also in a backward that recomputes, the maps go through the copies; but those
        whose parameters have been replaced, frozen or given hooks since, as any linear map."""
        forwards = self._forwards.items()
        changed = [each for each, forward in forwards if is_plain(each) and forward.is_current]
        for each in changed:
            vars(each)["forward"] = self._forwards[each]
        try:
            yield
        finally:
            for each in changed:
                vars(each).pop("forward", None)


def _fits(module: Any, owners: Counter[int]) -> bool:
    if not is_plain_linear(module):
        return False
    parameters = [p for p in module._parameters.values() if p is not None]
    return all(
        type(p) is nn.Parameter and p.dtype == torch.float32 and owners[id(p)] == 1
        for p in parameters
    )

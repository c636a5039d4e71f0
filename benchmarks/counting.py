"""Arithmetic and traffic of a pass, counted as it runs.

FLOPs are those of matrix products and attention, two for a multiplication and an addition; of
causal attention half the square counts, whatever a kernel does. Bytes are what every kernel reads
and writes, as if nothing stayed in a cache; views cost none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from stars_fast import ops  # noqa: F401  (defines torch.ops.stars_fast)


class Count(NamedTuple):
    """FLOPs and bytes of a pass."""

    flops: int
    bytes: int


def count(run: Callable[[], Any]) -> Count:
    """Run it once and count. Compiled code (torch.compile) is not seen."""
    counter = _Counter()
    with counter:
        run()
    return Count(counter.flops, counter.bytes)


class Dispatched(TorchDispatchMode):
    """Counts what PyTorch dispatches.

    Attributes:
        ops: all of it.
        launches: what computes or moves something: no views, no memory alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        self.launches += not func.is_view and func.overloadpacket not in _FREE
        return func(*args, **(kwargs or {}))


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = _IN_PLACE.get(func.overloadpacket, func.overloadpacket)
        if packet in _ATTENTION:
            self.flops += _ATTENTION[packet](func, args, kwargs)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        if not func.is_view and packet not in _FREE:
            touched = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
            self.bytes += sum(t.numel() * t.element_size() for t in touched.values())
        return out


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dual: bool) -> int:
    """FLOPs of one product of attention: every query with the keys that it sees."""
    names = [argument.name for argument in func._schema.arguments]
    found = dict(zip(names, args, strict=False)) | kwargs
    q, k = (found["q"], found["k"]) if dual else (found["query"], found["key"])
    heads = q.shape[-4:-2].numel()
    pairs = heads * q.shape[-2] * k.shape[-2]
    spans = found.get("spans")
    if spans is not None:  # [B or 1, Sq, 2]
        pairs = int((spans[..., 1] - spans[..., 0]).sum()) * heads // spans.shape[0]
    elif found.get("is_causal") or found.get("causal"):
        pairs //= 2
    return 2 * pairs * q.shape[-1]


def _attention(products: int, dual: bool = False) -> Callable[..., int]:
    return lambda func, args, kwargs: products * _product(func, args, kwargs, dual)


_aten = torch.ops.aten
_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(2),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5),
    _aten._scaled_dot_product_flash_attention: _attention(2),
    _aten._scaled_dot_product_flash_attention_backward: _attention(5),
    _aten._scaled_dot_product_efficient_attention: _attention(2),
    _aten._scaled_dot_product_efficient_attention_backward: _attention(5),
    _aten._scaled_dot_product_cudnn_attention: _attention(2),
    _aten._scaled_dot_product_cudnn_attention_backward: _attention(5),
    torch.ops.stars_fast.attention: _attention(6, dual=True),
    torch.ops.stars_fast.attention_backward: _attention(15, dual=True),
}
_IN_PLACE = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}
_FREE = {
    _aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.detach,
    _aten._unsafe_view,
}  # fmt: skip

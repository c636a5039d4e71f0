"""Rotary embeddings known by what they compute: one fused op for queries and one for keys.

Model code calls a function of its own module, `apply_rotary_pos_emb(q, k, cos, sin)`. Where that
computes the usual formula on a trial, the module's function is replaced, once, by one that looks
at its input first: a Dual takes the fused op, everything else runs the model's own function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stars_fast import ops
from stars_fast.dual.registry import report
from stars_fast.dual.tensor import Dual
from stars_fast.ops import reference

_NAME = "apply_rotary_pos_emb"
_seen: set[str] = set()


def adopt_rotary(cls: type) -> None:
    """Look at the rotary function of the Python module that defines `cls`."""
    if cls.__module__ in _seen:
        return
    _seen.add(cls.__module__)
    names = getattr(sys.modules.get(cls.__module__), "__dict__", {})
    function = names.get(_NAME)
    if callable(function) and _is_rotary(function):
        names[_NAME] = _fused(function)


def _is_rotary(function: Callable[..., Any]) -> bool:
    """Whether function(q, k, cos, sin) rotates q and k as `reference.rotary` does."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator)
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    )
    # Models give both halves of an angle the same cosine and sine.
    cos, sin = torch.cat((cos[..., :4],) * 2, -1), torch.cat((sin[..., :4],) * 2, -1)
    try:
        with torch.no_grad():
            found = function(q, k, cos, sin)
    except Exception:  # a stranger's function may raise anything; then it is simply not known
        return False
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    return all(
        isinstance(mine, Tensor)
        and mine.shape == x.shape
        and torch.allclose(mine, reference.rotary(x, cos, sin), rtol=1e-5, atol=1e-6)
        for mine, x in zip(found, (q, k), strict=True)
    )


def _fits(x: Any, cos: Tensor, sin: Tensor) -> bool:
    """Whether the fused op has the same result, dtype included."""
    return (
        type(x) is Dual
        and x.dim() == 4
        and cos.dim() == 3
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1:] == x.shape[2:]
        and cos.shape == sin.shape
        and x.shape[-1] % 2 == 0
        and torch.promote_types(x.dtype, cos.dtype) == x.dtype
        and cos.dtype == sin.dtype
        and not (cos.requires_grad or sin.requires_grad)
    )


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs:
            return original(*args, **kwargs)
        q, k, cos, sin = args
        plain = type(cos) is Tensor and type(sin) is Tensor
        if not plain or not _fits(q, cos, sin) or not _fits(k, cos, sin):
            return original(*args)
        turned = tuple(Dual(ops.rotary(x.stack, cos, sin)) for x in (q, k))
        report(_NAME, "fused")
        return turned[0], turned[1]

    return apply_rotary_pos_emb

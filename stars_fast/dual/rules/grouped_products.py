"""Grouped matrix products, by which mixture-of-experts layers apply their experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stars_fast.dual.registry import LIBRARY_RULES
from stars_fast.dual.rule import rule
from stars_fast.dual.rules.arithmetic import split_pair
from stars_fast.dual.tensor import Dual


def _by_groups(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """The grouped product one group at a time, for dtypes that torch's kernels leave out."""
    if offs is None:
        return a @ b
    stops = offs.tolist()
    spans = list(zip([0, *stops], stops, strict=False))
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    if a.dim() == 2:
        products = [a[i:j] @ b[n] for n, (i, j) in enumerate(spans)]
        return torch.cat([*products, a.new_zeros(len(a) - stops[-1], b.shape[-1])])
    products = [a[n] @ b[:, i:j] for n, (i, j) in enumerate(spans)]
    return torch.cat([*products, b.new_zeros(a.shape[1], b.shape[1] - stops[-1])], 1)


def _bilinear(product: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Dual:
    """y = product(a, b), y_dot = product(a_dot, b) + product(a, b_dot)."""
    (x, x_dot), (w, w_dot) = split_pair(a), split_pair(b)
    parts = [] if x_dot is None else [product(x_dot, w)]
    if w_dot is not None:
        parts.append(product(x, w_dot))
    return Dual.join(product(x, w), parts[0] if len(parts) == 1 else parts[0] + parts[1])


@rule("grouped_mm", "_grouped_mm", kind="stacked", owners=(F, torch))
def grouped_mm(
    mat_a: Any,
    mat_b: Any,
    *,
    offs: Tensor | None = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Linear in each matrix."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype == torch.float64:
            return _by_groups(a, b, offs)
        return F.grouped_mm(a, b, offs=offs, out_dtype=out_dtype)

    result = _bilinear(product, mat_a, mat_b)
    return result if bias is None else result + bias


def _grouped_mm_of_transformers(input: Any, weight: Any, offs: Tensor) -> Dual:
    """The op that transformers uses where torch has no kernel for the device."""
    product = torch.ops.transformers.grouped_mm_fallback
    return _bilinear(lambda a, b: product(a, b, offs), input, weight)


LIBRARY_RULES["transformers::grouped_mm_fallback"] = _grouped_mm_of_transformers

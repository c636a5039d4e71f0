"""Ops without a rule that torch can't differentiate twice: refused by name, before they run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from stars_fast.dual.registry import add_rule

REFUSED = {
    "embedding_bag": "use torch.nn.functional.embedding_bag, with a sum or mean",
    "segment_reduce": "use scatter_reduce or index_add with the number of each row's segment",
    "ctc_loss": "compute the loss outside the block",
    "multi_margin_loss": "write it from gather, clamp and mean",
    "multilabel_margin_loss": "write it from gather, clamp and mean",
    "lstsq": "use torch.linalg.pinv, or torch.linalg.solve of the normal equations",
    "ormqr": "use torch.linalg.householder_product and a matrix product",
    "native_layer_norm": "use torch.nn.functional.layer_norm",
}
"""torch function -> what to write instead."""

_EVERYWHERE = (F, torch, torch.Tensor, torch.linalg, torch._C._nn)
_OWNERS = {"embedding_bag": (torch,)}
"""Where a name is looked up, if not everywhere: that of F has a rule."""


def _refuse(name: str, instead: str) -> None:
    def handler(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"stars_fast: {name} of a tensor with a tangent: torch has no second derivative of it; "
            f"{instead}, or detach its input where a constant is meant"
        )

    add_rule(name, "primal", handler, owners=_OWNERS.get(name, _EVERYWHERE))


for _name, _instead in REFUSED.items():
    _refuse(_name, _instead)

"""Running sums whose derivative in torch is not stable."""

from __future__ import annotations

from stars_fast.dual.rule import rule
from stars_fast.dual.rules.shapes import shift
from stars_fast.dual.tensor import Dual
from stars_fast.ops.scan import logcumsumexp as dual_logcumsumexp


@rule("logcumsumexp", kind="product")
def logcumsumexp(input: Dual, dim: int) -> Dual:
    if input.stack.is_complex():
        raise RuntimeError(
            "stars_fast: logcumsumexp of a complex tensor with a tangent is not stable in torch; "
            "take the logarithm of a cumsum, or split it into modulus and angle"
        )
    if input.stack.dim() == 1:
        shift(dim, input.stack.unsqueeze(1))
        return Dual(dual_logcumsumexp(input.stack.unsqueeze(1)).squeeze(1))
    axis = shift(dim, input.stack)
    scanned = dual_logcumsumexp(input.stack.transpose(axis, -1))
    return Dual(scanned.transpose(axis, -1).contiguous())

"""Dual ops with their own backward: one file an op, formulas in its docstring.

Each public function takes and returns stacks [2, ...] (primal first, tangent second). The spec of
every op is its entry in `reference.py`: the dual is `torch.func.jvp` of it, the gradient autograd
of that, in fp64.
"""

from stars_fast.ops.attention import attention
from stars_fast.ops.bias import add_bias
from stars_fast.ops.gated import gated
from stars_fast.ops.layer_norm import layer_norm
from stars_fast.ops.pointwise import pointwise
from stars_fast.ops.rms_norm import rms_norm
from stars_fast.ops.softmax import softmax

__all__ = ["add_bias", "attention", "gated", "layer_norm", "pointwise", "rms_norm", "softmax"]

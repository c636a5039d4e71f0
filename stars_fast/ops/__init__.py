"""Dual ops with their own backward: one file an op, formulas in its docstring.

Each public function takes and returns stacks [2, ...] (primal first, tangent second). The spec of
every op is its entry in `reference.py`: the dual is `torch.func.jvp` of it, the gradient autograd
of that, in fp64. The ops differentiate once, and not under torch.func. `library.py` says which
backend computes an op and how to force one.
"""

from stars_fast.ops.attention import attention
from stars_fast.ops.bias import add_bias
from stars_fast.ops.gated import gated
from stars_fast.ops.library import BACKENDS, backend
from stars_fast.ops.low_weights import LowWeights, low_linear, low_linears
from stars_fast.ops.norm import layer_norm, rms_norm
from stars_fast.ops.pointwise import pointwise
from stars_fast.ops.rotary import rotary
from stars_fast.ops.sandwich import sandwich
from stars_fast.ops.softmax import softmax
from stars_fast.ops.spans import Spans
from stars_fast.ops.squares import row_squares

__all__ = [
    "BACKENDS",
    "LowWeights",
    "Spans",
    "add_bias",
    "attention",
    "backend",
    "gated",
    "layer_norm",
    "low_linear",
    "low_linears",
    "pointwise",
    "rms_norm",
    "rotary",
    "row_squares",
    "sandwich",
    "softmax",
]

"""How far a result may lie from the truth, in one place.

Relative errors in the L2 norm, as `oracle.relative_error` measures them, against fp64 on the same
rounded inputs; halves of a pair and each cotangent apart.
"""

import torch

# One op. fp64: some thousand roundings of 1e-16. fp32: a few of 6e-8 an entry, and sums over a row.
OPS = {torch.float64: 1e-12, torch.float32: 2e-6}
# A rotation: two products and a sum an entry.
ROTARY = {torch.float64: 1e-14, torch.float32: 1e-7}
# In 16 bits eager PyTorch in the same dtype says what can be had: at most twice its error.
TIMES_EAGER = 2
# What is computed in fp32 and rounded once to 16 bits: half a unit in the last place.
ONE_ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Two results of which each is within its bound of one truth.
TWO_ROUTES = {dtype: 2 * error for dtype, error in {**OPS, **ONE_ROUNDING}.items()}
# Attention in 16 bits where weights are rounded once more than in eager: a unit in the last place.
ATTENTION = {**OPS, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
# A whole block in fp64: some hundred ops, each with the condition of its inputs.
BLOCK = 1e-11
# Central differences in fp64, of values of about 1. A step of 1e-6 leaves 1e-12 of truncation and
# 1e-10 of cancellation, each times the curvature.
TANGENT_BY_DIFFERENCES = 1e-8
GRADIENT_BY_DIFFERENCES = 1e-7

"""The dual pass: `Dual`, the rules that answer torch functions, and what a pass needs around it.

tensor.py         the pair, and how a torch function that meets one is answered
registry.py       which rule answers which function; `rules/` holds them
forward_ad.py     an op without a rule, exact through torch's forward derivative
recognition/      formulas known by the ops that a block calls, run as one fused op
dual_pass.py      one pass of any block: its mode, its patches, its end
"""

from stars_fast.dual import fallback, recognition, rules
from stars_fast.dual.tensor import Dual

__all__ = ["Dual", "fallback", "recognition", "rules"]

"""Formulas known by the ops that a block calls, run as one fused op; the user's code is untouched.

Importing a module of formulas registers them.
"""

from stars_fast.dual.recognition import last_map, norms_and_gates, rotary

__all__ = ["last_map", "norms_and_gates", "rotary"]

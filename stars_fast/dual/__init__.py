"""The dual pass: `Dual`, the rules that answer torch functions, and what a pass needs around it."""

# Importing a module of rules registers them.
from stars_fast.dual import (
    arithmetic,
    complex,
    experts,
    functional,
    indexing,
    modules,
    recurrent,
    reductions,
    refused,
    rotary,
    scans,
    scatter,
    stable,
    structural,
    values,
)
from stars_fast.dual.tensor import Dual

__all__ = [
    "Dual",
    "arithmetic",
    "complex",
    "experts",
    "functional",
    "indexing",
    "modules",
    "recurrent",
    "reductions",
    "refused",
    "rotary",
    "scans",
    "scatter",
    "stable",
    "structural",
    "values",
]

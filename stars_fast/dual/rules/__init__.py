"""The rules: functions with the signature of the torch function that they answer for a `Dual`.

Importing a module of rules registers them.
"""

from stars_fast.dual.rules import (
    arithmetic,
    bags,
    complex_numbers,
    functional,
    grouped_products,
    indexing,
    queries,
    recurrent,
    reductions,
    refused,
    scatter,
    shapes,
    stable,
)

__all__ = [
    "arithmetic",
    "bags",
    "complex_numbers",
    "functional",
    "grouped_products",
    "indexing",
    "queries",
    "recurrent",
    "reductions",
    "refused",
    "scatter",
    "shapes",
    "stable",
]

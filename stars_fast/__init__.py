"""stars_fast: Jacobian regularisation of looped language models, exact and fast.

The public names load on first use, so that `import stars_fast` (and the help of the command
line) costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stars_fast.analysis.singular import singular_moments
    from stars_fast.analysis.spectrum import spectral_radius
    from stars_fast.dual.explain import explain
    from stars_fast.dual.graphed_block import GraphedBlock
    from stars_fast.dual.recognition.switch import recognition
    from stars_fast.dual.tensor import Dual
    from stars_fast.jsrr import fused_jsrr, fused_jvp
    from stars_fast.models.looped_block import looped_block

__version__ = "0.2.0"

_HOMES = {
    "Dual": "stars_fast.dual.tensor",
    "GraphedBlock": "stars_fast.dual.graphed_block",
    "explain": "stars_fast.dual.explain",
    "fused_jsrr": "stars_fast.jsrr",
    "fused_jvp": "stars_fast.jsrr",
    "looped_block": "stars_fast.models.looped_block",
    "recognition": "stars_fast.dual.recognition.switch",
    "singular_moments": "stars_fast.analysis.singular",
    "spectral_radius": "stars_fast.analysis.spectrum",
}

__all__ = [
    "Dual",
    "GraphedBlock",
    "__version__",
    "explain",
    "fused_jsrr",
    "fused_jvp",
    "looped_block",
    "recognition",
    "singular_moments",
    "spectral_radius",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

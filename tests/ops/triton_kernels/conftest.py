"""Triton 3.6 (that of torch 2.11) interprets no kernel with numpy >= 2.4: it makes numbers of
arrays of one entry, which numpy then refuses. A GPU and the compiled tests do not need it."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def interprets():
    """Whether Triton's interpreter runs beside this numpy."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton >= (3, 7) or numpy < (2, 4)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    reason = "Triton 3.6 interprets no kernel with numpy >= 2.4: pip install 'numpy<2.4'"
    for item in items:
        if item.path.parent == HERE and item.path.stem.endswith("_triton") and not interprets():
            item.add_marker(pytest.mark.skip(reason=reason))

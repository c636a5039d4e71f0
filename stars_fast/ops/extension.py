"""The compiled extension of `csrc/`: found, checked and loaded once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1]
# Ends in .torch2.11.so where torch 2.11 or later is needed.
_PREFIX, _SUFFIX = "_native.torch", ".so"


@cache
def load() -> bool:
    """Whether the extension is there and loaded.

    Raises:
        ImportError: it is there and does not load.
    """
    files = sorted(FOLDER.glob(f"{_PREFIX}*{_SUFFIX}"), key=lambda file: file.stat().st_mtime)
    if not files:
        return False
    newest = files[-1]
    try:
        torch.ops.load_library(newest)
    except OSError as error:
        version = newest.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        raise ImportError(
            f"stars_fast: {newest} does not load with torch {torch.__version__}; it was built for "
            f"torch >= {version}. Build it again (pip install --no-build-isolation -e .), or "
            f"delete it to run in plain PyTorch. {error}"
        ) from error
    return True

"""Hooks that pack what autograd saves, as those of a checkpointed region."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

packing_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@contextmanager
def nothing_packed() -> Iterator[None]:
    """A region in which autograd saves tensors as they are: what a checkpoint packs it would
    compute again when it is read here."""
    around = []
    while hooks := packing_hooks(False):
        around.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(around):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

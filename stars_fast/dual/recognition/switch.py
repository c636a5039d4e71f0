"""The switch of recognition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stars_fast.dual.patches import noted_checkpoints
from stars_fast.dual.running import recognising, settle_all


@contextmanager
def recognition(enabled: bool) -> Iterator[None]:
    """A region in which formulas are looked for in a block's ops, or every op runs as written.

    Dual passes look for formulas by default. What a region decides holds for the passes that begin
    in it, in this thread, and for the recomputation of their checkpointed parts and of checkpointed
    parts that hold such a pass, wherever their backward runs.

    Args:
        enabled: False runs every op when and as it is called.

    Raises:
        TypeError: `enabled` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected True or False, got {enabled!r}")
    settle_all()
    with noted_checkpoints, recognising(enabled):
        yield

"""Adaptive depth: what rests takes no further turn.

A turn maps h to Phi(h); where h is a fixed point, further turns change nothing. A token rests after
a turn that changed its state by at most `tol`, relative to the new state, in the L2 norm over D.

    per="sequence"   a sequence stops when all its tokens rest; until then all of them go on
    per="token"      a token that rests keeps its state while others of its sequence go on, and
                     they attend to it as it is

Per token, a pass over several tokens of a sequence runs until the last of them rests: fewer turns
are what each token needed, and save time where a pass holds one token of a sequence, as in
generation with a cache. There the keys and values of its last turn stand in for those of the turns
left out.

Shapes: B sequences, S tokens, D width, b sequences that still take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from stars_fast.base.checks import check_integer, check_number

Per = Literal["sequence", "token"]


def rested(before: Tensor, after: Tensor, tol: float) -> Tensor:
    """[b, S] boolean: which tokens a turn from `before` to `after` [b, S, D] changed by at most
    `tol`. Norms in fp32 at least."""
    wide = torch.promote_types(after.dtype, torch.float32)
    change = (after.to(wide) - before.to(wide)).norm(dim=-1)
    return change <= tol * after.to(wide).norm(dim=-1)


class AdaptiveDepth:
    """Which sequences of h [B, S, D] still take turns, of `limit` at most.

        depth = AdaptiveDepth(h, limit, tol)
        while depth.goes_on:
            h = depth.step(h, block(depth.of(h)))

    Attributes:
        turns: [B, S] int64, taken by each token, when the loop is done.
        taken: turns so far.
        rows: [b] int64, the sequences that take the next one; None for all.

    Args:
        tol: at which a token rests, 0 or more; None or 0 for never.
        per: "sequence" or "token".

    Raises:
        ValueError: an argument out of range, named.
    """

    def __init__(self, h: Tensor, limit: int, tol: float | None, per: Per = "sequence") -> None:
        check_integer("turns", limit, 1)
        if tol is not None:
            check_number("tol", tol, 0.0)
        if per not in get_args(Per):
            raise ValueError(f"tol_per: expected one of {get_args(Per)}, got {per!r}")
        self.limit, self.tol, self.per = limit, tol, per
        self.turns = torch.full(h.shape[:2], limit, dtype=torch.int64, device=h.device)
        self.taken = 0
        self.rows: Tensor | None = None
        self._rests: Tensor | None = None  # [b, S], of tokens that rest by themselves

    @property
    def goes_on(self) -> bool:
        """True while a sequence takes turns."""
        return self.taken < self.limit and (self.rows is None or len(self.rows) > 0)

    def of(self, x: Tensor) -> Tensor:
        """The sequences of x [B, ...] that take the next turn, [b, ...]."""
        return x if self.rows is None else x[self.rows.to(x.device)]

    def step(self, h: Tensor, after: Tensor, real: Tensor | None = None) -> Tensor:
        """h [B, S, D] after a turn that gave `after` [b, S, D] for `of(h)`.

        real: [B, S] boolean, False on pads, which hold nobody up.

        The state goes to the device of `after`, the last of a model over several; turns and rows
        stay on the first.
        """
        h = h.to(after.device)
        before = self.of(h)
        if self._rests is not None:
            after = torch.where(self._rests.to(after.device).unsqueeze(-1), before, after)
        h = after if self.rows is None else h.index_copy(0, self.rows.to(h.device), after)
        self.taken += 1
        if self.tol and self.taken < self.limit:
            still = rested(before, after, self.tol).to(self.turns.device)
            self._stop(still if real is None else still | ~self.of(real).to(still.device))
        return h

    def _stop(self, still: Tensor) -> None:
        """Note those that rest now, `still` [b, S]: a token that rests does not change again."""
        done = still.all(-1)
        if self.per == "token":
            fresh = still if self._rests is None else still & ~self._rests
            self._rests = still
        else:
            fresh = done.unsqueeze(-1).expand_as(still)
        everyone = torch.arange(len(self.turns), device=still.device)
        rows = everyone if self.rows is None else self.rows
        self.turns[rows] = torch.where(fresh, self.taken, self.turns[rows])
        going = torch.nonzero(~done).squeeze(1)
        if len(going) < len(done):
            self.rows = rows[going]
            self._rests = None if self._rests is None else self._rests[going]


def turns_until_rest(
    turn_of: Callable[[Tensor | None], Callable[[Tensor], Tensor]],
    h: Tensor,
    limit: int,
    tol: float | None,
    per: Per = "sequence",
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take turns from h until all rests, at most `limit`.

    Args:
        turn_of: gives one turn, [b, S, D] -> [b, S, D], of the sequences [b] int64; None for all.
        h: [B, S, D].
        limit, tol, per: as `AdaptiveDepth`.
        real: [B, S] boolean, False on pads; None without.

    Returns:
        The state [B, S, D], and the turns of each token [B, S] int64.

    Raises:
        ValueError: as `AdaptiveDepth`.
    """
    depth = AdaptiveDepth(h, limit, tol, per)
    rows, turn = depth.rows, turn_of(None)
    while depth.goes_on:
        if depth.rows is not rows:
            rows, turn = depth.rows, turn_of(depth.rows)
        h = depth.step(h, turn(depth.of(h)), real)
    return h, depth.turns

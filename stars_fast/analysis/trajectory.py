"""How the state of a looped block moves from turn to turn: whether it comes to rest, and how fast.

    h^(t + 1) = block(h^(t))
    residual     ||block(h^(t)) - h^(t)|| / ||h^(t)||, which is the size of the step that turn
                 t + 1 takes: one number that says both how far the state moves and how far it is
                 from a fixed point
    contraction  a step over the step before it; below 1 the steps shrink

Norms are taken over the real entries of a sample (or of a token), in fp64.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from stars_fast.base.checks import check_integer, check_number
from stars_fast.dual.dual_pass import first_output
from stars_fast.ops.sample_norms import sample_norms

Block = Callable[[Tensor], Tensor]
"""One turn, h [B, ..., D] -> the same shape, that treats the rows of the batch independently."""

ROUNDING = 32
"""Steps smaller than so many units in the last place of the state are taken for rounding."""


@dataclass(frozen=True)
class Trajectory:
    """T turns of B samples, fp64 on the CPU. NaN where a number has no meaning: of states that are
    not finite, of samples without a real token, and as said below.

    norm: [T + 1, B], root mean square of h^(0), ..., h^(T).
    residual: [T, B], of h^(0), ..., h^(T - 1).
    contraction: [T - 1, B], of h^(1), ..., h^(T - 1): the step away from it over the step to it.
        NaN where one of them is rounding.
    cosine: [T - 1, B], between the same two steps: -1 where the state jumps back and forth, 1 where
        it goes straight on. NaN as contraction.
    to_last: [T + 1, B], ||h^(t) - h^(T)|| / ||h^(T)||. A cycle shows as dips, one period apart.
    finite: [T + 1, B] bool, whether all real entries are.

    Measured token by token, all are [..., B, S].
    """

    norm: Tensor
    residual: Tensor
    contraction: Tensor
    cosine: Tensor
    to_last: Tensor
    finite: Tensor

    @property
    def turns(self) -> int:
        """T."""
        return len(self.norm) - 1

    @classmethod
    def join(cls, parts: list[Trajectory]) -> Trajectory:
        """The samples of several, measured over as many turns, in their order."""
        return cls(
            **{f.name: torch.cat([getattr(p, f.name) for p in parts], 1) for f in fields(cls)}
        )


def states(block: Block, h0: Tensor, turns: int) -> Iterator[Tensor]:
    """h^(0), ..., h^(turns), one at a time, without gradient."""
    h = h0.detach()
    yield h
    for _ in range(turns):
        with torch.no_grad():
            h = first_output(block(h))
        yield h


def trajectory(
    block: Block,
    h0: Tensor,
    turns: int,
    *,
    mask: Tensor | None = None,
    per_token: bool = False,
    visit: Callable[[int, Tensor], None] | None = None,
) -> Trajectory:
    """Measure the states of `turns` turns, of which only the last two are kept.

    The turns run twice, as the distance to the last state needs it first; so `block` must give the
    same for the same (no dropout).

    Args:
        block: one turn.
        h0: [B, ..., D] floating point.
        turns: how many, 2 or more.
        mask: [B, S] for h [B, S, D], True for real tokens; others count for nothing.
        per_token: measure each token of h [B, S, D] by itself.
        visit: called with t and h^(t) for t = 0, ..., turns.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named.
    """
    if not isinstance(h0, Tensor) or not h0.is_floating_point():
        raise TypeError("h0: expected a floating-point tensor")
    check_integer("turns", turns, 2)
    if per_token and h0.dim() != 3:
        raise ValueError(f"per_token: expected h0 [B, S, D], got {list(h0.shape)}")
    measure = _Measure(h0, mask, per_token)
    last = deque(states(block, h0, turns), maxlen=1).pop()
    norms, steps, inner, to_last = [], [], [], []
    before: Tensor | None = None
    step_before: Tensor | None = None
    for t, h in enumerate(states(block, h0, turns)):
        if visit is not None:
            visit(t, h)
        norms.append(measure.norm(h))
        to_last.append(measure.norm(_difference(h, last)))
        if before is not None:
            step = _difference(h, before)
            steps.append(measure.norm(step))
            if step_before is not None:
                inner.append(measure.dot(step, step_before))
            step_before = step
        before = h
    eps = torch.finfo(h0.dtype).eps
    stacked = [torch.stack(each) for each in (norms, steps, inner, to_last)]
    return measure.result(stacked, ROUNDING * eps)


class _Measure:
    """Norms over the real entries of a sample, or of a token."""

    def __init__(self, h: Tensor, mask: Tensor | None, per_token: bool) -> None:
        rows = sample_norms(h, mask)
        self.real = None if rows.valid is None else rows.valid != 0  # [B, S, 1]
        self.per_token = per_token
        self.sizes = rows.sizes.double()
        if per_token:
            real = torch.ones_like(h[..., 0]) if self.real is None else self.real[..., 0]
            self.sizes = real.double() * h.shape[-1]

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """[B] or [B, S]: mean product of the real entries; NaN where there are none."""
        product = a.double() * b.double()
        if self.real is not None:  # what stands on a pad may be NaN, so it is not multiplied away
            product = torch.where(self.real, product, 0.0)
        return product.flatten(2 if self.per_token else 1).sum(-1) / self.sizes

    def norm(self, x: Tensor) -> Tensor:
        """Root mean square."""
        return self.dot(x, x).sqrt()

    def result(self, stacked: list[Tensor], rounding: float) -> Trajectory:
        norms, steps, inner, to_last = stacked
        finite = norms.isfinite() | (self.sizes == 0)
        moved = steps > rounding * norms[:-1]
        real_steps = moved[1:] & moved[:-1]
        products = steps[1:] * steps[:-1]
        found = {
            "norm": norms,
            "residual": _over(steps, norms[:-1]),
            "contraction": torch.where(real_steps, steps[1:] / steps[:-1], torch.nan),
            "cosine": torch.where(real_steps, inner / products, torch.nan).clamp(-1, 1),
            "to_last": _over(to_last, norms[-1]),
        }
        found = {name: torch.where(x.isfinite(), x, torch.nan) for name, x in found.items()}
        return Trajectory(**{name: x.cpu() for name, x in (found | {"finite": finite}).items()})


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """In fp64: neighbouring states differ by little."""
    return a.double() - b.double()


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where both vanish: a state at 0 that stays there is at rest."""
    return torch.where((a == 0) & (b == 0), 0.0, a / b)


def convergence_turns(residual: Tensor, tol: float) -> list[int | None]:
    """For each sample of `residual` [T, B] the first turn from which on it stays below `tol`; None
    where it never does.

    Raises:
        ValueError: `tol` is not positive.
    """
    check_number("tol", tol, 0.0, open_low=True)
    below = (residual < tol).flip(0).long().cumprod(0).sum(0)  # turns at the end that are
    turns = len(residual)
    return [turns - n if n else None for n in below.tolist()]


def overflow_turns(finite: Tensor) -> list[int | None]:
    """For each sample of `finite` [T + 1, B] the first turn whose state is not; None if all are."""
    return [
        None if good else int(sample.int().argmin())
        for sample, good in zip(finite.T, finite.all(0).tolist(), strict=True)
    ]

"""Norms over the samples of a state: random directions of unit RMS, and mean squares.

A sample is a row of the batch, less its pads, or a document of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stars_fast.ops.seed import draw_seed, normal_squares, seed_stack
from stars_fast.ops.squares import row_squares
from stars_fast.tokens import Tokens, check_bounds


@dataclass(frozen=True)
class SampleNorms:
    """The samples of a state [B, ..., D]; made by `sample_norms`.

    Attributes:
        valid: broadcastable to the state, in its computing dtype: 1 on real entries, 0 on pads;
            None where all are real.
        sizes: [n], real entries of each sample.
        owner: [total], the document of each token of a packed row; None for a plain batch.
        lengths: [n], tokens of each document of a packed row; None for a plain batch.
        weight: [n], 0 for samples that do not count (empty, or not drawn), else 1.
    """

    valid: Tensor | None
    sizes: Tensor
    owner: Tensor | None
    lengths: Tensor | None
    weight: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 states: in it norms are computed."""
        return self.sizes.dtype

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.sizes.shape[0]

    def cut_out(self, chosen: Tensor) -> SampleNorms:
        """The samples `chosen` of a plain batch alone: [k] int64."""
        valid = None if self.valid is None else self.valid[chosen]
        return SampleNorms(valid, self.sizes[chosen], None, None, self.weight[chosen])

    def count_only(self, chosen: Tensor) -> SampleNorms:
        """All samples in place, of which only `chosen` count: [k] int64."""
        drawn = torch.zeros_like(self.weight).index_fill_(0, chosen, 1.0)
        return replace(self, weight=self.weight * drawn)

    def _sample_sums(self, squares: Tensor) -> Tensor:
        """[n]: sums over the real entries of each sample, from those over the last dimension."""
        if self.valid is not None:
            squares = squares * self.valid.squeeze(-1)
        if self.lengths is None:
            return squares.reshape(self.count, -1).sum(1)
        return torch.segment_reduce(
            squares[0], "sum", lengths=self.lengths, unsafe=True, initial=0.0
        )

    def _spread(self, per_sample: Tensor, x: Tensor) -> Tensor:
        """[n] -> broadcastable to x."""
        if self.owner is None:
            return per_sample.view(-1, *[1] * (x.dim() - 1))
        return per_sample[self.owner].view(1, -1, 1)

    def _factors(self, squares: Tensor, x: Tensor, normalize: str) -> Tensor:
        """Factors that give x unit RMS over the real entries of each sample (or of the batch),
        and 0 elsewhere; broadcastable to x. `squares`: sums of x^2 over the last dimension."""
        sums, sizes = self._sample_sums(squares) * self.weight, self.sizes * self.weight
        if normalize == "batch":
            sums, sizes = sums.sum().expand(self.count), sizes.sum().expand(self.count)
        # Where x vanishes any factor will do; 1 keeps the gradient of the root finite.
        factor = torch.where(sums > 0, sizes / torch.where(sums > 0, sums, 1.0), 1.0).sqrt()
        factors = self._spread(factor * self.weight, x)
        return factors if self.valid is None else factors * self.valid

    def unit_rms(self, v: Tensor, normalize: str) -> Tensor:
        """v with unit RMS over the real entries of each sample (or of the batch), 0 elsewhere."""
        return v * self._factors(row_squares(v), v, normalize)

    def seeded(self, h: Tensor, generator: torch.Generator | None, normalize: str) -> Tensor:
        """[2, ...]: h and a random direction of unit RMS that is never stored by itself."""
        seed = draw_seed(generator, h.device)
        factors = self._factors(normal_squares(seed, h), h, normalize)
        return seed_stack(h, seed, factors.squeeze(-1).expand(h.shape[:-1]).contiguous())

    def mean_square(self, jv: Tensor, normalize: str, margin: float = 0.0) -> Tensor:
        """The loss from J u: mean over samples of the mean square over their real entries; with a
        margin m of max(0, r - m)^2, r the root of that."""
        sums = self._sample_sums(row_squares(jv)) * self.weight
        sizes = self.sizes * self.weight
        if normalize == "batch":
            return _beyond(sums.sum() / sizes.sum().clamp_min(1.0), margin)
        means = _beyond(sums / torch.where(sizes > 0, sizes, 1.0), margin)
        return means.sum() / self.weight.sum().clamp_min(1.0)

    def relative_square(self, x: Tensor, over: Tensor) -> Tensor:
        """Mean over samples of ||x||^2 / ||over||^2 over their real entries; a sample whose `over`
        is 0 counts as 0."""
        above, below = (self._sample_sums(row_squares(each)) for each in (x, over))
        ratios = torch.where(below > 0, above / torch.where(below > 0, below, 1.0), 0.0)
        return (ratios * self.weight).sum() / self.weight.sum().clamp_min(1.0)


def _beyond(squares: Tensor, margin: float) -> Tensor:
    """max(0, r - margin)^2 for r^2 = squares, without the infinite slope of a root at 0."""
    if margin == 0.0:
        return squares
    return (squares.clamp_min(margin**2).sqrt() - margin).square()


def sample_norms(
    h: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> SampleNorms:
    """The samples of a state.

    Args:
        h: [B, ..., D]; [B, S, D] with a mask, [1, total, D] with `cu_seqlens`.
        mask: [B, S], not 0 on real tokens.
        cu_seqlens: [n + 1] integers, 0 = c_0 <= ... <= c_n = total. With a mask too, documents
            without a real token do not count.

    Raises:
        TypeError, ValueError: an argument of the wrong type or shape, named.
    """
    dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
    if h.dim() < 2:
        raise ValueError(f"h: expected at least 2 dimensions [B, ..., D], got {list(h.shape)}")
    valid = None if mask is None else _valid(h, mask, dtype)
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, h.shape)
        given = Tokens(1, h.shape[1], cu_seqlens=cu_seqlens, device=cu_seqlens.device)
        tokens = given.to(h.device)
        assert tokens.cu_seqlens is not None
        lengths = tokens.cu_seqlens.long().diff()
        owner = tokens.owner
        real = lengths.to(dtype)
        if valid is not None:
            real = torch.segment_reduce(
                valid[0, :, 0], "sum", lengths=lengths, unsafe=True, initial=0.0
            )
        sizes = real * h.shape[-1]
        return SampleNorms(valid, sizes, owner, lengths, (sizes > 0).to(dtype))
    width = h.shape[1:].numel()
    if valid is None:
        sizes = torch.full((h.shape[0],), width, dtype=dtype, device=h.device)
        return SampleNorms(None, sizes, None, None, torch.ones_like(sizes))
    sizes = valid.sum((1, 2)) * h.shape[-1]
    return SampleNorms(valid, sizes, None, None, (sizes > 0).to(dtype))


def _valid(h: Tensor, mask: Any, dtype: torch.dtype) -> Tensor:
    """[B, S, 1]: 1 on real tokens."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a tensor, got {type(mask).__name__}")
    if h.dim() != 3 or mask.shape != h.shape[:2]:
        raise ValueError(
            f"mask: expected shape [B, S] for h [B, S, D] = {list(h.shape)}, got {list(mask.shape)}"
        )
    return (mask != 0).to(h.device, dtype).unsqueeze(-1)

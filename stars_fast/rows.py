"""Samples of a state: which entries belong to which sample, and norms over them.

A sample is a row of the batch, less its pads, or a document of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from stars_fast.ops.seed import draw_seed, normal_squares, seed_stack
from stars_fast.ops.squares import row_squares


@dataclass(frozen=True)
class Rows:
    """The samples of a state [B, ..., D].

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
        """fp32, or fp64 for fp64 states: what norms are computed in."""
        return self.sizes.dtype

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.sizes.shape[0]

    @classmethod
    def of(cls, h: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Rows:
        """The samples of `h` under a mask [B, S] or document bounds [n + 1].

        Raises:
            TypeError, ValueError: an argument of the wrong type or shape, named.
        """
        dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
        if h.dim() < 2:
            raise ValueError(f"h: expected at least 2 dimensions [B, ..., D], got {list(h.shape)}")
        if mask is not None and cu_seqlens is not None:
            raise ValueError("mask: expected None when cu_seqlens is given, got a tensor")
        if cu_seqlens is not None:
            return cls._packed(h, cu_seqlens, dtype)
        width = h.shape[1:].numel()
        if mask is None:
            sizes = torch.full((h.shape[0],), width, dtype=dtype, device=h.device)
            return cls(None, sizes, None, None, torch.ones_like(sizes))
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask: expected a tensor, got {type(mask).__name__}")
        if h.dim() != 3 or mask.shape != h.shape[:2]:
            raise ValueError(
                f"mask: expected shape [B, S] for h [B, S, D] = {list(h.shape)}, "
                f"got {list(mask.shape)}"
            )
        valid = (mask != 0).to(h.device, dtype)
        sizes = valid.sum(1) * h.shape[-1]
        return cls(valid.unsqueeze(-1), sizes, None, None, (sizes > 0).to(dtype))

    @classmethod
    def _packed(cls, h: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> Rows:
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.is_floating_point():
            raise TypeError("cu_seqlens: expected a tensor of integers")
        if h.dim() != 3 or h.shape[0] != 1:
            raise ValueError(
                f"h: expected shape [1, total, D] with cu_seqlens, got {list(h.shape)}"
            )
        total = h.shape[1]
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise ValueError(f"cu_seqlens: expected shape [n + 1], got {list(cu_seqlens.shape)}")
        fits = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total) & (cu_seqlens.diff() >= 0).all()
        expected = f"cu_seqlens: expected bounds that rise from 0 to total = {total}"
        if cu_seqlens.device.type != "cpu":
            torch._assert_async(fits, expected)  # asking the device would make the host wait
        elif not fits:
            raise ValueError(f"{expected}, got {cu_seqlens.tolist()}")
        lengths = cu_seqlens.to(h.device, non_blocking=True).diff()
        documents = torch.arange(len(lengths), device=h.device)
        owner = torch.repeat_interleave(documents, lengths, output_size=total)
        sizes = lengths.to(dtype) * h.shape[-1]
        return cls(None, sizes, owner, lengths, (sizes > 0).to(dtype))

    def take(self, chosen: Tensor) -> Rows:
        """The samples `chosen` of a plain batch, cut out."""
        valid = None if self.valid is None else self.valid[chosen]
        return Rows(valid, self.sizes[chosen], None, None, self.weight[chosen])

    def keep(self, chosen: Tensor) -> Rows:
        """All samples in place, only `chosen` of them counting."""
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
        """What gives x unit RMS over the real entries of each sample (or of the batch), and 0
        elsewhere; broadcastable to x. `squares`: the sums of x^2 over the last dimension."""
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

    def mean_square(self, jv: Tensor, normalize: str) -> Tensor:
        """The loss from J u: mean over samples of the mean square over their real entries."""
        sums = self._sample_sums(row_squares(jv)) * self.weight
        sizes = self.sizes * self.weight
        if normalize == "batch":
            return sums.sum() / sizes.sum().clamp_min(1.0)
        means = sums / torch.where(sizes > 0, sizes, 1.0)
        return means.sum() / self.weight.sum().clamp_min(1.0)


def choose_rows(
    count: int, fraction: float, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Sorted indices of round(fraction * count) samples, at least one, without replacement."""
    number = max(1, round(fraction * count))
    where = generator.device if generator is not None else device
    order = torch.randperm(count, generator=generator, device=where)
    return order[:number].sort().values.to(device)


def take_rows(tree: Any, chosen: Tensor, size: int, length: int) -> Any:
    """Cut every tensor in a tree whose first dimension is the batch's along with it.

    Raises:
        ValueError: B = S = `length`, and a tensor of one or two dimensions: whose is the first?
    """

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != size or size == 1:
            return leaf
        if leaf.dim() <= 2 and size == length:
            raise ValueError(
                f"fraction: can't tell whether an argument of shape {list(leaf.shape)} is per "
                "sample or per token, as B = S; give it a leading dimension of 1 or B"
            )
        return leaf[chosen.to(leaf.device)]

    return tree_map(cut, tree)


def sample_of(h: Tensor, tree: Any, index: int) -> tuple[Tensor, Any]:
    """Sample `index` of a state and of the arguments that go with it, as a batch of one."""
    chosen = torch.tensor([index], device=h.device)
    return h[index : index + 1], take_rows(tree, chosen, h.shape[0], h.shape[1])

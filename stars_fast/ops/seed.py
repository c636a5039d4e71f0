"""Random directions that are never stored: drawn again from a counter wherever they are needed.

The direction of a pass is a standard normal field z[row, column] of a counter-based generator
(Philox, Salmon et al. 2011) keyed by one random seed. One kernel sums its squares by row; a second
draws it anew and writes it, scaled, beside the state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stars_fast.ops.library import compiled, shapes


@shapes("normal_squares")
def _normal_squares(seed: Tensor, rows: int, width: int) -> Tensor:
    return seed.new_empty(rows, dtype=torch.float32)


@shapes("seed_stack")
def _seed_stack(h: Tensor, seed: Tensor, factor: Tensor) -> Tensor:
    return h.new_empty((2, *h.shape))


def can_seed(h: Tensor) -> bool:
    """Whether the kernels are there for states like h."""
    return compiled("seed_stack", h) is not None


def draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One seed, int64 [1] on `device`, from `generator` or the device's own."""
    where = generator.device if generator is not None else device
    seed = torch.randint(2**63 - 1, (1,), generator=generator, device=where)
    return seed.to(device, non_blocking=True)


def normal_squares(seed: Tensor, h: Tensor) -> Tensor:
    """Sums of squares of the field over the last dimension of h [..., D]: [...] in fp32."""
    op = compiled("normal_squares", h)
    assert op is not None
    rows = h.shape[:-1].numel()
    return op(seed, rows, h.shape[-1]).view(h.shape[:-1])


def seed_stack(h: Tensor, seed: Tensor, factor: Tensor) -> Tensor:
    """h [..., D] stacked with `factor` [...] times the field: [2, ..., D], no gradient."""
    op = compiled("seed_stack", h)
    assert op is not None
    return op(h, seed, factor)

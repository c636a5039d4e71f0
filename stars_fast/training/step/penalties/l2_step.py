"""The L2 step between adjacent states as a penalty."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stars_fast.ops.sample_norms import sample_norms
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.penalties.base import Method, Penalty


class L2Step(Penalty):
    """The mean squared step between adjacent states."""

    def compute(self, micro: MicroStep, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        samples = micro.batch.samples
        return states[-1], adjacent_l2(states, samples.real, samples.cu_seqlens)


def adjacent_l2(
    states: Sequence[Tensor], mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Mean of (h^(t+1) - h^(t))^2 over adjacent states, samples, real tokens and width, a scalar.

    `states` are two or more tensors [B, S, D]; `mask` [B, S] is True at real tokens, or
    `cu_seqlens` [n + 1] bounds the documents of one row. Each sample counts alike, whatever its
    length.
    """
    samples = sample_norms(states[0], mask, cu_seqlens)
    steps = [samples.mean_square(after - before, "sample") for before, after in pairwise(states)]
    return torch.stack(steps).mean()


METHODS = {
    "l2": Method(None, L2Step, "the mean squared step between adjacent states as penalty"),
}

"""Which samples of a micro-batch are drawn, and the noise of each, as functions of the step."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stars_fast.base.seeds import derive
from stars_fast.tokens import Tokens


def sample_noise(
    h: Tensor, samples: Tokens, seed: int, step: int, numbers: Iterable[int]
) -> Tensor:
    """Standard normal noise of the shape, dtype and device of `h` [B, S, ...], 0 on pads.

    That of a sample is a function of (seed, step, its number, its length) alone. `numbers` are the
    places of the samples in the batch of the whole step: the same sample meets the same noise
    however the batch is split over ranks and micro-batches, packed or padded, and whenever the run
    is resumed.
    """
    return seeded_noise(h, samples, [derive(seed, "noise", step, number) for number in numbers])


def seeded_noise(h: Tensor, samples: Tokens, seeds: Sequence[int]) -> Tensor:
    """Standard normal noise of the shape, dtype and device of `h` [B, S, ...], 0 on pads; that of a
    sample is a function of its seed and its length."""
    noise = torch.zeros_like(h, requires_grad=False, memory_format=torch.contiguous_format)
    generator = torch.Generator(device=h.device)
    for seed, part in zip(seeds, samples.per_sample(noise), strict=True):
        part.normal_(generator=generator.manual_seed(seed))
    return noise


def draw_samples(count: int, number: int, seed: int, step: int, micro: int) -> list[int]:
    """`number` of the `count` samples of micro-batch `micro`, without replacement, in rising order;
    a pure function of its arguments."""
    generator = torch.Generator().manual_seed(derive(seed, "samples", step, micro))
    return sorted(torch.randperm(count, generator=generator)[:number].tolist())


def drawn_number(fraction: float, samples: float) -> int:
    """How many samples are drawn where micro-batches have so many on average."""
    return max(1, round(fraction * samples))


def drawn_part(fraction: float, samples: float) -> float:
    """The part of the samples that this is: of few, another than `fraction`."""
    return 1.0 if fraction == 1.0 else min(1.0, drawn_number(fraction, samples) / samples)

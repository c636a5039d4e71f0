"""The samples of a micro-batch: rows of a padded batch, or documents packed one after the other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from stars_fast.base.seeds import derive


@dataclass(frozen=True)
class Samples:
    """Which tokens of a micro-batch [B, S] belong to which sample.

    Kept on the host, as who asks a device has to wait for it.

    count: number of samples.
    mask: [B, S] bool, True at real tokens, which stand together in a row; None if all are real.
    cu_seqlens: [n + 1] int64, bounds of the documents of a batch of one row; None if each row is a
        sample.
    """

    count: int
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether samples are documents of one row."""
        return self.cu_seqlens is not None

    @cached_property
    def spans(self) -> list[tuple[int, int]] | None:
        """Start and stop of each sample in its row; None where it is the whole row."""
        if self.cu_seqlens is not None:
            bounds = self.cu_seqlens.tolist()
            return list(pairwise(bounds))
        if self.mask is None:
            return None
        first = self.mask.to(torch.uint8).argmax(1)
        return list(zip(first.tolist(), (first + self.mask.sum(1)).tolist(), strict=True))

    def parts(self, x: Tensor) -> list[Tensor]:
        """Views [tokens, ...] of the real tokens of each sample in x [B, S, ...]."""
        if self.spans is None:
            return list(x)
        rows = [0] * self.count if self.packed else range(self.count)
        return [x[row, a:b] for row, (a, b) in zip(rows, self.spans, strict=True)]

    def lengths(self, row_length: int) -> list[int]:
        """Real tokens of each sample; `row_length` is S."""
        if self.spans is None:
            return [row_length] * self.count
        return [b - a for a, b in self.spans]

    def take(self, chosen: Sequence[int]) -> "Part":
        """Some of the samples, in rising order, as a micro-batch of their own."""
        chosen = list(chosen)
        if not self.packed:
            mask = None if self.mask is None else _like(self.mask, self.mask[chosen])
            return Part(Samples(len(chosen), mask), chosen, 0, torch.tensor(chosen))
        assert self.spans is not None
        spans = [self.spans[i] for i in chosen]
        bounds = torch.tensor([0] + [b - a for a, b in spans]).cumsum(0)
        assert self.cu_seqlens is not None
        bounds = _like(self.cu_seqlens, bounds)
        index = torch.cat([torch.arange(a, b) for a, b in spans])
        return Part(Samples(len(chosen), None, bounds), chosen, 1, index)


@dataclass(frozen=True)
class Part:
    """Some samples of a micro-batch: `chosen` of it, at places `index` along dimension `dim`."""

    samples: Samples
    chosen: list[int]
    dim: int
    index: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The part of x [B, S, ...]."""
        return x.index_select(self.dim, _to(self.index, x))


def join(parts: Sequence[tuple[Part, Tensor]], shape: torch.Size) -> Tensor:
    """[B, S, ...] = `shape` from the values of parts that make up the whole."""
    whole = parts[0][1].new_empty(shape)
    for part, values in parts:
        whole = whole.index_copy(part.dim, _to(part.index, values), values)
    return whole


def _like(whole: Tensor, part: Tensor) -> Tensor:
    """`part` in pinned memory if `whole` is: from other memory a copy to the GPU would wait."""
    return part.pin_memory() if whole.is_pinned() else part


def _to(index: Tensor, x: Tensor) -> Tensor:
    if x.is_cuda:  # from pageable memory the copy would wait for all work before it
        index = index.pin_memory()
    return index.to(x.device, non_blocking=True)


def sample_noise(
    h: Tensor, samples: Samples, seed: int, step: int, numbers: Iterable[int]
) -> Tensor:
    """Standard normal noise of the shape, dtype and device of `h` [B, S, ...], 0 on pads.

    That of a sample is a function of (seed, step, its number, its length) alone. `numbers` are the
    places of the samples in the batch of the whole step: the same sample meets the same noise
    however the batch is split over ranks and micro-batches, packed or padded, and whenever the run
    is resumed.
    """
    noise = torch.zeros_like(h, requires_grad=False, memory_format=torch.contiguous_format)
    generator = torch.Generator(device=h.device)
    for number, part in zip(numbers, samples.parts(noise), strict=True):
        part.normal_(generator=generator.manual_seed(derive(seed, "noise", step, number)))
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

"""Which tokens belong to which sample, packed or padded, and the noise of each."""

import pytest
import torch

from stars_fast.data.samples import draw_samples, sample_noise
from stars_fast.tokens import Tokens, packed_tokens, padded_tokens, put_together

LENGTHS = [3, 1, 4, 2]
PACKED = packed_tokens(LENGTHS)
PADDED = padded_tokens(torch.arange(4) < torch.tensor(LENGTHS)[:, None])


def values(samples, width=2):
    """A state whose sample i holds i + 1 at its real tokens and -1 at pads."""
    shape = (1, 10, width) if samples.packed else (4, 4, width)
    x = torch.full(shape, -1.0)
    for i, part in enumerate(samples.per_sample(x)):
        part.fill_(i + 1)
    return x


@pytest.mark.parametrize("samples", [PACKED, PADDED], ids=["packed", "padded"])
def test_parts_are_the_real_tokens_of_each_sample(samples):
    x = values(samples)
    assert [len(part) for part in samples.per_sample(x)] == samples.lengths == LENGTHS
    assert int((x[..., 0] > 0).sum()) == sum(LENGTHS)


def test_without_pads_a_sample_is_a_row():
    samples = Tokens(3, 5)
    assert [len(part) for part in samples.per_sample(torch.zeros(3, 5))] == [5, 5, 5]
    assert samples.lengths == [5, 5, 5]


def test_left_pads():
    samples = padded_tokens(torch.tensor([[False, True, True], [True, True, True]]))
    x = torch.arange(6).view(2, 3)
    assert [part.tolist() for part in samples.per_sample(x)] == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "samples", [PACKED, PADDED, Tokens(4, 4)], ids=["packed", "padded", "full"]
)
@pytest.mark.parametrize("chosen", [[0], [1, 3], [0, 1, 2, 3]])
def test_samples_are_cut_out_and_put_back(samples, chosen):
    x = values(samples)
    part = samples.subset(chosen)
    cut = part.cut(x)
    assert part.tokens.count == len(chosen)
    for own, i in zip(part.tokens.per_sample(cut), chosen, strict=True):
        assert torch.equal(own, samples.per_sample(x)[i])
    others = sorted(set(range(4)) - set(chosen))
    if others:
        rest = samples.subset(others)
        assert torch.equal(put_together([(part, cut), (rest, rest.cut(x))], x.shape), x)


def test_putting_back_carries_gradients():
    x = values(PACKED).requires_grad_()
    part, rest = PACKED.subset([0, 2]), PACKED.subset([1, 3])
    (put_together([(part, 2 * part.cut(x)), (rest, 3 * rest.cut(x))], x.shape)).sum().backward()
    assert [int(part[0, 0]) for part in PACKED.per_sample(x.grad)] == [2, 3, 2, 3]


def test_noise_belongs_to_the_sample_not_to_the_split():
    whole = sample_noise(torch.empty(6, 5, 4), Tokens(6, 5), 1, 2, range(6))
    parts = [sample_noise(torch.empty(2, 5, 4), Tokens(2, 5), 1, 2, [i, i + 1]) for i in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    other = sample_noise(torch.empty(6, 5, 4), Tokens(6, 5), 1, 3, range(6))
    assert not torch.isclose(whole, other).any()
    assert not torch.isclose(whole[0], whole[1]).any()


def test_noise_is_the_same_packed_padded_and_alone():
    width = 16
    packed = sample_noise(torch.empty(1, 10, width), PACKED, 1, 2, range(5, 9))
    padded = sample_noise(torch.empty(4, 4, width), PADDED, 1, 2, range(5, 9))
    assert torch.equal(torch.cat(PACKED.per_sample(packed)), torch.cat(PADDED.per_sample(padded)))
    assert not padded[~PADDED.real].any()
    alone = sample_noise(torch.empty(1, 4, width), Tokens(1, 4), 1, 2, [7])
    assert torch.equal(alone[0], PACKED.per_sample(packed)[2])
    part = PACKED.subset([1, 2])
    some = sample_noise(part.cut(packed), part.tokens, 1, 2, [6, 7])
    assert torch.equal(some, part.cut(packed))


def test_noise_is_standard_normal():
    noise = sample_noise(torch.empty(400, 10, 10), Tokens(400, 10), 0, 0, range(400))
    n = noise.numel()
    assert abs(float(noise.mean())) < 4 / n**0.5
    assert abs(float(noise.square().mean()) - 1) < 4 * (2 / n) ** 0.5


def test_every_sample_is_drawn_alike():
    draws = [draw_samples(5, 2, 0, step, 3) for step in range(2000)]
    assert draws[7] == draw_samples(5, 2, 0, 7, 3)
    assert all(len(draw) == 2 and draw == sorted(set(draw)) for draw in draws)
    counts = torch.tensor([i for draw in draws for i in draw]).bincount()
    assert (counts - 800).abs().max() < 5 * (2000 * 0.4 * 0.6) ** 0.5

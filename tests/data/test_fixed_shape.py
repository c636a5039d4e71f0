"""Micro-batches filled up to one shape."""

import numpy as np
import pytest
import torch

from stars_fast.data import IGNORE
from stars_fast.data.documents import PackedChats, PaddedChats, TokenDocuments
from stars_fast.data.fixed_shape import fixed_shape
from stars_fast.ops.spans import Spans

LENGTHS = [5, 3, 7, 1, 4, 2, 8, 2]
ROW = 9


def documents():
    rng = np.random.default_rng(0)
    return TokenDocuments([(rng.integers(1, 50, n), np.arange(n) > 0) for n in LENGTHS])


@pytest.mark.parametrize("rows", [1, 3])
def test_packed_rows_end_in_pads_and_empty_documents(rows):
    source = PackedChats(documents(), ROW, 0)
    shape = fixed_shape(source, rows, True)
    for unit in range(len(source)):
        plain = source.batch(np.array([unit] * rows))  # the same row several times, as of few data
        host = shape.fill(plain)
        length = plain.tokens.shape[1]
        assert host.tokens.shape == host.targets.shape == (1, rows * ROW)
        assert torch.equal(host.tokens[:, :length], plain.tokens)
        assert torch.equal(host.targets[:, :length], plain.targets)
        assert (host.targets[:, length:] == IGNORE).all()
        samples = host.samples
        assert samples.cu_seqlens.shape == (shape.documents + 1,)
        lengths = samples.cu_seqlens.diff()
        assert samples.cu_seqlens[-1] == rows * ROW
        assert lengths.min() >= 0
        assert lengths.max() <= samples.longest == ROW
        assert samples.real.sum() == length
        assert samples.real[0, :length].all()
        # What the samples are is as it was
        assert (samples.count, samples.lengths) == (plain.samples.count, plain.samples.lengths)
        assert torch.equal(samples.positions[:, :length], plain.samples.positions)
        spans, expected = (Spans.of_tokens(each) for each in (samples, plain.samples))
        assert torch.equal(spans.queries[:, :length], expected.queries)
        assert torch.equal(spans.keys[:, :length], expected.keys)
        for mine, given in zip(
            samples.per_sample(host.tokens), plain.samples.per_sample(plain.tokens), strict=True
        ):
            assert torch.equal(mine, given)


def test_rows_are_filled_to_the_longest_of_all():
    source = PaddedChats(documents(), 0)
    shape = fixed_shape(source, 2, False)
    plain = source.batch(np.array([0, 4]))
    host = shape.fill(plain)
    assert host.tokens.shape == (2, 8)
    assert host.samples.lengths == [5, 4]
    assert host.samples.real.sum() == 9
    assert host.samples.cu_seqlens is None
    full = shape.fill(source.batch(np.array([6, 6])))
    assert full.samples.real.all()  # there also where nothing is a pad


def test_tensors_that_are_still_to_be_written_have_the_shapes_of_a_batch():
    source = PackedChats(documents(), ROW, 0)
    shape = fixed_shape(source, 2, True)
    host = shape.fill(source.batch(np.array([0, 1]))).samples
    made = shape.tokens(torch.device("cpu"))
    for name in ("real", "cu_seqlens"):
        one, other = getattr(made, name), getattr(host, name)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert (made.rows, made.length, made.longest) == (host.rows, host.length, host.longest)


def test_what_does_not_fit_is_an_error():
    source = PackedChats(documents(), ROW, 0)
    shape = fixed_shape(source, 1, True)
    batch = source.batch(np.arange(2))
    with pytest.raises(ValueError, match=r"tokens: expected \[1, 9\] at most, got \[1, "):
        shape.fill(batch)
    with pytest.raises(ValueError, match="cu_seqlens: expected at most 1 documents"):
        shape._replace(documents=1).fill(source.batch(np.array([len(source) - 1])))

"""Pads, documents and positions, against loops over what they mean."""

import itertools

import pytest
import torch

from stars_fast.ops.spans import Spans
from stars_fast.tokens import (
    Tokens,
    describe_tokens,
    packed_tokens,
    padded_tokens,
    put_together,
    take_rows,
)

WINDOWS = [None, 1, 2, 3, 20]
PADDED = ["111111 111111", "000111 111111", "110000 000000", "000001 011100", "110101 101110"]
PACKED = [[6], [1], [2, 4], [1, 1, 1, 3], [0, 3, 0, 3, 0]]
POSITIONS = ["012345", "012012", "000123", "345012", "111111"]


def state(rows, length):
    return torch.empty(rows, length, 3)


def mask_of(text):
    return torch.tensor([[int(x) for x in row] for row in text.split()])


def sees(query, key, real, document, window):
    """Whether one place of a row sees another: places, flags and documents as lists."""
    if query == key:
        return True
    near = window is None or query - key < window
    return key < query and near and real[query] and real[key] and document[query] == document[key]


def expected(real, documents, past, window):
    """[B, S, past + S], from lists [B][past + S]."""
    length = len(real[0])
    return torch.tensor(
        [
            [[sees(i, j, r, d, window) for j in range(length)] for i in range(past, length)]
            for r, d in zip(real, documents, strict=True)
        ]
    )


def check_visible(tokens, real, documents, past=0):
    """The mask, the intervals of kernels and the causal case say what the loop says."""
    length = past + tokens.length
    for window in WINDOWS:
        wanted = expected(real, documents, past, window)
        assert torch.equal(tokens.visible(window)[:, 0].expand_as(wanted), wanted)
        if tokens.is_causal(window):
            plain = torch.ones(length, length).tril()[past:].bool()
            assert torch.equal(wanted, plain.expand_as(wanted))
        if tokens.real is None or not tokens.holes:
            spans, key = Spans.of_tokens(tokens, window), torch.arange(length)
            start, stop = spans.queries.unsqueeze(2).unbind(-1)
            assert torch.equal(((key >= start) & (key < stop)).expand_as(wanted), wanted)
            query = torch.arange(tokens.length)
            start, stop = spans.keys.unsqueeze(2).unbind(-1)
            assert torch.equal(((query >= start) & (query < stop)).expand_as(wanted.mT), wanted.mT)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long], ids=str)
@pytest.mark.parametrize("past", [0, 1, 5])
@pytest.mark.parametrize("text", PADDED)
def test_rows_with_pads_behind_a_cache(text, past, dtype):
    mask = mask_of(text)
    h = state(2, 6 - past)
    for look in (False, True):
        tokens = describe_tokens(h, mask.to(dtype), past=past, look=look)
        check_visible(tokens, mask.tolist(), [[0] * 6] * 2, past)
        assert (tokens.real is None) == bool(mask.all())
        wanted = torch.tensor([list(itertools.accumulate(row)) for row in mask.tolist()]) - 1
        real = mask[:, past:].bool()
        assert torch.equal(tokens.positions.expand_as(real)[real], wanted[:, past:][real])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", PACKED, ids=str)
def test_packed_documents(lengths, dtype):
    total = sum(lengths)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)]).to(dtype)
    tokens = describe_tokens(state(1, total), cu_seqlens=bounds)
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    assert tokens.owner.tolist() == owner
    assert tokens.positions.tolist() == [[i for length in lengths for i in range(length)]]
    assert tokens.starts.tolist() == [[owner.index(document) for document in owner]]
    assert (tokens.count, tokens.lengths, tokens.bounds) == (len(lengths), lengths, bounds.tolist())
    check_visible(tokens, [[1] * total], [owner])


@pytest.mark.parametrize("rows", [POSITIONS[i : i + 1] for i in range(5)] + [POSITIONS], ids=str)
def test_documents_told_by_positions(rows):
    given = torch.tensor([[int(x) for x in row] for row in rows])
    documents = []
    for row in given.tolist():
        begins = [b <= a for a, b in itertools.pairwise(row)]
        documents.append([0, *itertools.accumulate(begins)])
    tokens = describe_tokens(state(len(rows), 6), position_ids=given)
    assert torch.equal(tokens.positions, given)
    assert (tokens.starts is None) == (not any(map(any, documents)))
    check_visible(tokens, [[1] * 6] * len(rows), documents)


def test_no_pads_behind_a_cache():
    for past, length in [(0, 1), (0, 4), (3, 1), (3, 4)]:
        tokens = describe_tokens(state(2, length), past=past)
        total = past + length
        check_visible(tokens, [[1] * total] * 2, [[0] * total] * 2, past)
        assert tokens.positions.tolist() == [list(range(past, total))]


def test_random_rows_with_pads():
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        mask = torch.rand(3, 7, generator=generator) < 0.7
        check_visible(describe_tokens(state(3, 7), mask), mask.tolist(), [[0] * 7] * 3)


def test_what_the_host_does_not_look_at_is_taken_for_pads_and_documents(monkeypatch):
    monkeypatch.setattr("stars_fast.tokens._host_knows", lambda tensor: False)
    h = state(1, 4)
    assert not describe_tokens(h, torch.ones(1, 4)).is_causal()
    assert not describe_tokens(h, position_ids=torch.arange(4)).is_causal()
    assert describe_tokens(h, torch.ones(1, 4), look=True).is_causal()
    assert describe_tokens(h, position_ids=torch.arange(4), look=True).is_causal()
    with pytest.raises(RuntimeError, match="cu_seqlens: expected bounds that rise"):
        describe_tokens(h, cu_seqlens=torch.tensor([0, 3]))


def test_what_has_moved_still_knows_its_bounds():
    there = torch.device("meta")
    tokens = describe_tokens(state(1, 5).to(there), cu_seqlens=torch.tensor([0, 2, 5]))
    assert tokens.cu_seqlens.device == tokens.owner.device == tokens.visible().device == there
    assert (tokens.bounds, tokens.lengths) == ([0, 2, 5], [2, 3])
    padded = padded_tokens(mask_of("0111 1111").bool())
    assert padded.to(torch.device("cpu")) is padded
    assert padded.to(there).real.device == padded.to(there).positions.device == there


def test_some_rows():
    mask, chosen = mask_of("0011 1111 1000"), torch.tensor([2, 0])
    some = describe_tokens(state(3, 4), mask).take_rows(chosen)
    assert torch.equal(some.visible(), describe_tokens(state(2, 4), mask[chosen]).visible())
    packed = packed_tokens([2, 3])
    assert packed.take_rows(torch.tensor([0])) is packed
    assert take_rows({"x": mask, "y": 1}, chosen, 3, 4)["x"].tolist() == mask[[2, 0]].tolist()
    with pytest.raises(ValueError, match="fraction: can't tell whether"):
        take_rows(torch.ones(3), chosen, 3, 3)


@pytest.mark.parametrize(
    "tokens",
    [packed_tokens([1, 0, 4]), padded_tokens(mask_of("1000 0111 1111").bool()), Tokens(3, 4)],
    ids=["packed", "padded", "full"],
)
def test_subsets_make_up_the_whole(tokens):
    x = torch.arange(tokens.rows * tokens.length).view(tokens.rows, tokens.length, 1).double()
    parts = [tokens.subset([1]), tokens.subset([0, 2])]
    for part in parts:
        cut = part.tokens.per_sample(part.cut(x))
        wanted = [tokens.per_sample(x)[i] for i in part.chosen]
        torch.testing.assert_close(cut, wanted, rtol=0, atol=0)
    assert torch.equal(put_together([(part, part.cut(x)) for part in parts], x.shape), x)


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ([0, 3, 2, 5], ValueError, r"from 0 to total = 5, got \[0, 3, 2, 5\]"),
        ([0, 3], ValueError, r"from 0 to total = 5, got \[0, 3\]"),
        ([1, 5], ValueError, r"from 0 to total = 5, got \[1, 5\]"),
        ([5], ValueError, r"cu_seqlens: expected shape \[n \+ 1\], got \[1\]"),
        ([[0, 5]], ValueError, r"cu_seqlens: expected shape \[n \+ 1\], got \[1, 2\]"),
        ([0.0, 5.0], TypeError, r"cu_seqlens: expected integers, got torch\.float32"),
        ([False, True], TypeError, r"cu_seqlens: expected integers, got torch\.bool"),
    ],
    ids=str,
)
def test_bad_bounds(bounds, error, message):
    with pytest.raises(error, match=message):
        describe_tokens(state(1, 5), cu_seqlens=torch.tensor(bounds))


def test_unsigned_bounds_that_fall():
    falling = torch.tensor([0, 3, 2, 5], dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected bounds that rise from 0 to total = 5"):
        describe_tokens(state(1, 5), cu_seqlens=falling)

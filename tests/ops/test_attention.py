"""Attention against its reference in fp64, in blocks smaller than the sequences."""

import pytest
import torch
from oracle import attention_inputs, check, randn

from stars_fast import ops
from stars_fast.ops import attention_blocked, reference
from stars_fast.ops.spans import Spans, masks_of_one_pass


@pytest.fixture(autouse=True, params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(attention_blocked, "_QUERIES", 3)
        monkeypatch.setattr(attention_blocked, "_TILE", 30)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "keys", "width"),
    [(2, 4, 4, 7, 7, 8), (1, 1, 1, 1, 1, 4), (2, 4, 2, 5, 9, 8), (1, 6, 1, 9, 5, 16)],
    ids=["B2-H4-S7", "one-token", "gqa-S5-K9", "mqa-S9-K5"],
)
@pytest.mark.parametrize("masking", ["none", "causal", "boolean", "additive"])
def test_attention(batch, heads, kv_heads, length, keys, width, masking):
    mask = None
    if masking == "boolean":
        mask = randn(batch, 1, length, keys, seed=5) > -0.5
        mask[..., 0] = True
    elif masking == "additive":
        mask = randn(heads, length, keys, seed=5)
    causal = masking == "causal"
    check(
        lambda q, k, v: ops.attention(q, k, v, mask, causal),
        lambda q, k, v: reference.attention(q, k, v, mask, causal),
        attention_inputs(batch, heads, kv_heads, length, keys, width),
    )


def test_attention_with_a_scale_and_wider_values():
    check(
        lambda q, k, v: ops.attention(q, k, v, scale=0.3),
        lambda q, k, v: reference.attention(q, k, v, scale=0.3),
        attention_inputs(1, 2, 2, 4, 4, 8, 12),
    )


def test_attention_on_strided_slices_of_one_projection():
    packed = randn(2, 2, 5, 3, 4, 8)
    stacks = [packed[:, :, :, i].transpose(2, 3) for i in range(3)]
    assert not stacks[0].is_contiguous()
    check(
        lambda q, k, v: ops.attention(q, k, v, causal=True),
        lambda q, k, v: reference.attention(q, k, v, causal=True),
        stacks,
    )


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_fully_masked_rows_give_zero_and_no_gradient(form):
    q, k, v = (x.requires_grad_() for x in attention_inputs(1, 2, 2, 4, 4, 8))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    if form == "additive":
        mask = torch.zeros(4, 4, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    out = ops.attention(q, k, v, mask)
    assert torch.equal(out[:, :, :, 2], torch.zeros_like(out[:, :, :, 2]))
    grads = torch.autograd.grad(out, (q, k, v), randn(*out.shape))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert torch.equal(grads[0][:, :, :, 2], torch.zeros_like(grads[0][:, :, :, 2]))


def test_attention_survives_large_logits():
    q, k, v = attention_inputs(1, 1, 1, 6, 6, 8)
    out = ops.attention((100 * q).float(), (100 * k).float(), v.float(), causal=True)
    assert torch.isfinite(out).all()


def document_mask(q_lengths, k_lengths, causal):
    mask = torch.zeros(sum(q_lengths), sum(k_lengths), dtype=torch.bool)
    i = j = 0
    for n, m in zip(q_lengths, k_lengths, strict=True):
        block = torch.ones(n, m, dtype=torch.bool)
        mask[i : i + n, j : j + m] = block.tril() if causal else block
        i, j = i + n, j + m
    return mask


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [([4, 0, 1, 5], [4, 0, 1, 5]), ([3, 2, 2], [1, 5, 0]), ([7], [7])],
    ids=["ragged", "other-keys", "one"],
)
def test_packed_documents(q_lengths, k_lengths, causal):
    mask = document_mask(q_lengths, k_lengths, causal)
    total_q, total_k = mask.shape
    spans = Spans.of_documents(bounds(q_lengths), bounds(k_lengths), total_q, total_k, causal)
    seen = Spans.of_mask(mask[None, None])
    assert spans.exact
    assert seen.exact
    for mine, theirs in ((spans.queries, seen.queries), (spans.keys, seen.keys)):
        size = mine[..., 1] - mine[..., 0]
        assert torch.equal(size, theirs[..., 1] - theirs[..., 0])
        assert torch.equal(mine[size > 0], theirs[size > 0])
    check(
        lambda q, k, v: ops.attention(q, k, v, spans=spans),
        lambda q, k, v: reference.attention(q, k, v, mask),
        attention_inputs(1, 4, 2, total_q, total_k, 8),
    )


def padded(left, right):
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., : left[0]] = mask[1, ..., : left[1]] = False
    mask[0, ..., 9 - right[0] :] = mask[1, ..., 9 - right[1] :] = False
    return mask


FULL = torch.ones(9, 9, dtype=torch.bool)
WINDOW = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)[None, None]


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (padded((0, 4), (0, 0)), True),
        (padded((0, 0), (3, 0)), True),
        (padded((2, 0), (0, 9)), False),
        (WINDOW, False),
        (WINDOW[0, 0], False),
        (FULL.triu(2), True),
    ],
    ids=["left", "right", "both-and-an-empty-row", "window", "2-d", "nothing-left"],
)
def test_padding_and_windows_become_spans(mask, causal):
    full = mask.expand(len(mask) if mask.dim() == 4 else 1, 1, 9, 9)
    full = full & (FULL.tril() if causal else True)
    spans, query = Spans.of_mask(full), torch.arange(9)
    start, stop = spans.keys.unsqueeze(2).unbind(-1)
    assert spans.exact == torch.equal(((query >= start) & (query < stop)), full[:, 0].mT)
    check(
        lambda q, k, v: ops.attention(q, k, v, mask, causal),
        lambda q, k, v: reference.attention(q, k, v, mask, causal),
        attention_inputs(2, 2, 1, 9, 9, 8),
    )


def test_a_mask_with_gaps_is_no_span_and_is_asked_once():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with masks_of_one_pass():
        assert Spans.of_mask(mask) is Spans.of_mask(mask[:, :, :, :4])
        mask[..., 1, 1] = False
        assert Spans.of_mask(mask) is None
    mask.data[..., 1, 1] = True  # a change that no version counts
    assert Spans.of_mask(mask) is not None
    mask[..., 1, :] = False  # the other queries see keys 0 to 3, so all keys have a gap
    assert not Spans.of_mask(mask).exact
    assert not Spans.of_mask(mask).causal().exact


def test_masks_of_inference_mode_and_of_no_keys():
    q, k, v = attention_inputs(1, 2, 2, 3, 4, 8)
    with torch.inference_mode():
        mask = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    with masks_of_one_pass():
        torch.testing.assert_close(ops.attention(q, k, v, mask), ops.attention(q, k, v))
    none = ops.attention(q, k[:, :, :, :0], v[:, :, :, :0], mask[..., :0])
    assert torch.equal(none, torch.zeros_like(none))
    assert ops.attention(q[:, :, :, :0], k, v, mask[:, :, :0]).shape == (2, 1, 2, 0, 8)


def test_attention_names_what_does_not_fit():
    q, k = randn(2, 1, 3, 4, 8), randn(2, 1, 2, 4, 8)
    with pytest.raises(ValueError, match="multiple of those of k"):
        ops.attention(q, k, k)
    with pytest.raises(ValueError, match="expected q"):
        ops.attention(q, k[..., :4], k)
    with pytest.raises(ValueError, match="q: expected a stack"):
        ops.attention(q[[0, 0, 0]], k, k)
    with pytest.raises(ValueError, match=r"mask must broadcast to \[B, H, Sq, Sk\]"):
        ops.attention(q, q, q, torch.ones(3, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="expected one dtype"):
        ops.attention(q, q.float(), q)
    spans = Spans.of_documents(bounds([4]), bounds([4]), 4, 4, True)
    with pytest.raises(ValueError, match="spans: expected None"):
        ops.attention(q, q, q, causal=True, spans=spans)
    with pytest.raises(ValueError, match=r"expected spans int32 \[B or 1, 5, 2\]"):
        ops.attention(randn(2, 1, 3, 5, 8), q, q, spans=spans)

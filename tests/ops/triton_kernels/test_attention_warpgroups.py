"""The backward for sm_90 in Gluon, run in an emulator, against the reference in fp64."""

import pytest
import torch
from oracle import cotangents
from test_attention_triton import (
    error,
    expected_results,
    inputs,
    key_spans_of,
    mask_of,
    packed,
    results,
    window,
)

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from gluon_emulator import Race, Stuck, Tiles, emulate

from stars_fast.ops.triton import attention_warpgroups as kernels

BLOCK = kernels.BLOCK.value


def statistics(q, k, mask, scale):
    """What the forward hands over: the largest product of a row, log2 of the sum of exp of the
    logits over that, the mean of S_dot before the scale; and S, S_dot without the scale."""
    groups = q.shape[2] // k.shape[2]
    (q, q_dot), (k, k_dot) = q.double(), k.double().repeat_interleave(groups, 2)
    s, s_dot = q @ k.mT, q_dot @ k.mT + q @ k_dot.mT
    s = s.masked_fill(~mask, -torch.inf)
    top = s.amax(-1)
    weights = torch.exp(scale * (s - torch.where(top.isinf(), 0.0, top)[..., None]))
    total = weights.sum(-1)
    mu = (weights * s_dot).sum(-1) / total.clamp(min=1.0)
    return torch.stack((top, total.log2())), mu


def backward(bar, q, k, v, out, spans, causal, seed=0, broken=None):
    """The gradients of q, k and v, and the products of each program."""
    _, batch, heads, length, width = q.shape
    kv_heads, keys = k.shape[2:4]
    wide = torch.float32 if q.dtype.itemsize == 2 else q.dtype
    scale = width**-0.5
    if spans is not None:
        mode, mask = kernels.SPANS, mask_of(spans, keys)
    else:
        mode = kernels.CAUSAL if causal else kernels.FULL
        mask = torch.ones(length, keys, dtype=torch.bool)
        mask = (mask.tril() if causal else mask)[None, None]
    lse, mu = (x.to(wide) for x in statistics(q, k, mask, scale))
    (g, b), (o, o_dot) = bar.double(), out.double()
    sums = torch.stack(((b * o).sum(-1), (g * o + b * o_dot).sum(-1))).to(wide)
    q_sum = torch.zeros(2, batch, length, heads, width, dtype=wide)
    grads = [torch.full((2, batch, keys, kv_heads, width), float("nan")) for _ in range(2)]
    k_grad, v_grad = (x.to(q.dtype) for x in grads)
    block = [1, 1, 1, BLOCK, 64 if width <= 64 else 128]
    descriptors = [Tiles(x, block) for x in (q, k, v, bar)]
    results = [Tiles(x.transpose(2, 3), block) for x in (k_grad, v_grad)]
    of_spans = [None, 0, None, 0]
    if spans is not None:
        key_spans = key_spans_of(spans, keys)
        steps = [2 * x.shape[1] if x.shape[0] > 1 else 0 for x in (spans, key_spans)]
        of_spans = [spans.contiguous(), steps[0], key_spans.contiguous(), steps[1]]
    products = emulate(
        kernels._backward,
        -(-keys // BLOCK) * batch * kv_heads,
        [*descriptors, lse.contiguous(), mu.contiguous(), sums, q_sum, *results, *of_spans]
        + [batch, kv_heads, length, keys, scale],
        {"D": width, "GROUP": heads // kv_heads, "MODE": mode.value, "num_warps": 4},
        wide,
        seed,
        broken,
    )
    q_grad = (q_sum * scale).to(q.dtype)
    return [x.transpose(2, 3) for x in (q_grad, k_grad, v_grad)], products


def both(shape, spans=None, causal=False, dtype=torch.float64, **how):
    """For each of the cotangents: the kernel's gradients, the reference's; and the products."""
    q, k, v = inputs(*shape, dtype)
    mask = None if spans is None else mask_of(spans, k.shape[3])
    bars = cotangents(q.shape, 9, dtype, "cpu")
    pair, expected = expected_results(q, k, v, mask, causal, q.shape[-1] ** -0.5, bars)
    for bar, theirs in zip(bars, expected, strict=True):
        mine, products = backward(bar, q, k, v, pair.to(dtype), spans, causal, **how)
        yield mine, theirs, products


CASES = {
    # (batch, heads, kv heads, queries, keys, width), causal, spans
    "full-S1": ((1, 1, 1, 1, 1, 16), False, None),
    "full-Sq70-Sk130": ((1, 1, 1, 70, 130, 72), False, None),
    "causal-S150-H4/2": ((1, 4, 2, 150, 150, 24), True, None),
    "causal-B2-S64": ((2, 1, 1, 64, 64, 64), True, None),
    "causal-Sq130-Sk70": ((1, 1, 1, 130, 70, 16), True, None),
    "documents-H2/1": ((1, 2, 1, 150, 150, 16), False, packed(1, 63, -40, 3, 43)),
    "nothing-seen": ((1, 1, 1, 70, 70, 16), False, packed(-70)),
    "window-B2": ((2, 1, 1, 140, 140, 16), False, window(140, 9)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_reference_s(case):
    shape, causal, spans = CASES[case]
    for mine, theirs, _ in both(shape, spans, causal):
        for x, y in zip(mine, theirs, strict=True):
            for half in range(2):
                # fp64 throughout, sums of at most 150 terms of order 1.
                assert error(x[half], y[half]) <= 1e-13


def test_15_products_a_tile_and_none_where_nothing_is_seen():
    shape, causal, _ = CASES["causal-S150-H4/2"]
    *_, (_, _, products) = both(shape, None, causal)
    # Of two heads a program: 3, 2 and 1 blocks of queries.
    assert products == [15 * 2 * n for n in (3, 3, 2, 2, 1, 1)]
    shape, causal, spans = CASES["nothing-seen"]
    *_, (_, _, products) = both(shape, spans, causal)
    assert products == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_err_as_pytorch_does(dtype):
    shape = (1, 2, 1, 100, 100, 64)
    q, k, v = inputs(*shape, dtype)
    bars = cotangents(q.shape, 9, dtype, "cpu")
    _, eager = results(q, k, v, None, True, 0.125, bars)
    for (mine, theirs, _), plain in zip(both(shape, None, True, dtype), eager, strict=True):
        for x, y, z in zip(mine, theirs, plain, strict=True):
            for half in range(2):
                assert error(x[half], y[half]) <= 2 * max(error(z[half], y[half]), 1e-4)


def test_any_order_of_the_partitions_gives_the_same():
    shape, causal, spans = CASES["documents-H2/1"]
    for seed in range(1, 4):
        mine, theirs, _ = next(both(shape, spans, causal, seed=seed))
        for x, y in zip(mine, theirs, strict=True):
            assert error(x, y) <= 1e-13


@pytest.mark.parametrize(
    "left_out",
    ["fence", "HELD_READY", "P_READY", "DS_READY", "Q_READY", "G_READY", "Q_FREE", "G_FREE"],
)
def test_every_barrier_and_fence_is_needed(left_out):
    shape, causal, _ = CASES["causal-S150-H4/2"]
    broken = left_out if left_out == "fence" else getattr(kernels, left_out).value
    with pytest.raises((Race, Stuck)):
        next(both(shape, None, causal, broken=broken))

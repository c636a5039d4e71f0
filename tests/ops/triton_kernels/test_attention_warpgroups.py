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
from tolerances import ATTENTION

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from gluon_emulator import Emulated, Race, Stuck

from stars_fast.ops.triton import attention_backward
from stars_fast.ops.triton import attention_warpgroups as kernels
from stars_fast.ops.triton.attention import attention
from stars_fast.ops.triton.attention_parts import Backward


def statistics(q, k, mask, scale):
    """The rows that the forward hands over: the largest product of a row with log2 of the sum of
    exp of the logits over that, [2, B, H, S]; the mean of S_dot before the scale."""
    groups = q.shape[2] // k.shape[2]
    (q, q_dot), (k, k_dot) = q.double(), k.double().repeat_interleave(groups, 2)
    s, s_dot = q @ k.mT, q_dot @ k.mT + q @ k_dot.mT
    s = s.masked_fill(~mask, -torch.inf)
    top = s.amax(-1)
    weights = torch.exp(scale * (s - torch.where(top.isinf(), 0.0, top)[..., None]))
    total = weights.sum(-1)
    mu = (weights * s_dot).sum(-1) / total.clamp(min=1.0)
    return torch.stack((top, total.log2())), mu


def both(shape, spans=None, causal=False, dtype=torch.float32, seed=0, broken=None, far=False):
    """For each of the cotangents: the kernel's gradients, the reference's; and the kernel. With
    `far` all logits are below -1,000."""
    q, k, v = (x.cpu() for x in inputs(*shape, dtype))
    if far:
        q, k = 20 + q, -20 - k
    keys, scale = k.shape[3], q.shape[-1] ** -0.5
    key_spans = None
    mask = torch.ones(q.shape[3], keys, dtype=torch.bool)[None, None]
    if causal:
        mask = mask.tril()
    if spans is not None:
        mask, key_spans = mask_of(spans, keys), key_spans_of(spans, keys)
    bars = cotangents(q.shape, 9, dtype, "cpu")
    pair, expected = expected_results(q, k, v, mask, False, scale, bars)
    lse, mu = statistics(q, k, mask, scale)
    (o, o_dot), wide = pair, torch.float32 if dtype.itemsize == 2 else torch.float64
    kernel = Emulated(kernels._backward, wide, seed, broken)
    for bar, theirs in zip(bars, expected, strict=True):
        g, b = bar.double()
        sums = torch.stack(((b * o).sum(-1), (g * o + b * o_dot).sum(-1)))
        rows = (x.float().contiguous() for x in (lse, mu, sums))
        given = Backward(bar, q, k, v, *rows, spans, key_spans, causal, scale)
        mine = [torch.full_like(x, torch.nan).transpose(2, 3).contiguous() for x in (q, k, v)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_backward", kernel)
            kernels.warpgroups(given, *mine)
        yield [x.transpose(2, 3) for x in mine], theirs, kernel


CASES = {
    # (batch, heads, kv heads, queries, keys, width), causal, spans, tiles of each program
    "full-S1": ((1, 1, 1, 1, 1, 16), False, None, [1]),
    "full-Sq70-Sk130": ((1, 1, 1, 70, 130, 72), False, None, [2, 2, 2]),
    "causal-S150-H4/2": ((1, 4, 2, 150, 150, 24), True, None, [6, 6, 4, 4, 2, 2]),
    "causal-B2-S64": ((2, 1, 1, 64, 64, 64), True, None, [1, 1]),
    "causal-Sq130-Sk70": ((1, 1, 1, 130, 70, 16), True, None, [3, 2]),
    "documents-H2/1": ((1, 2, 1, 150, 150, 16), False, packed(1, 63, -40, 3, 43), [2, 2, 2]),
    "nothing-seen": ((1, 1, 1, 70, 70, 16), False, packed(-70), [0, 0]),
    "window-B2": ((2, 1, 1, 140, 140, 16), False, window(140, 9), [2, 2, 2, 2, 1, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_reference_s_by_15_products_a_tile(case):
    shape, causal, spans, tiles = CASES[case]
    for mine, theirs, kernel in both(shape, spans, causal):
        assert kernel.products == [15 * n for n in tiles]
        for x, y in zip(mine, theirs, strict=True):
            for half in range(2):
                assert error(x[half], y[half]) <= ATTENTION[torch.float32]


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_not_there_have_no_weight(causal):
    """Copies make them 0, so their logits are 0 and not far below, as those of the others."""
    for mine, theirs, _ in both((1, 1, 1, 70, 1, 16), None, causal, far=True):
        for x, y in zip(mine, theirs, strict=True):
            for half in range(2):
                # The largest product, 7,000, is rounded to fp32: by up to 2^-12 beside S in fp64.
                assert error(x[half], y[half]) <= 2**-11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_err_as_pytorch_does(dtype):
    shape = (1, 2, 1, 100, 100, 64)
    q, k, v = (x.cpu() for x in inputs(*shape, dtype))
    bars = cotangents(q.shape, 9, dtype, "cpu")
    _, eager = results(q, k, v, None, True, 0.125, bars)
    for (mine, theirs, _), plain in zip(both(shape, None, True, dtype), eager, strict=True):
        for x, y, z in zip(mine, theirs, plain, strict=True):
            for half in range(2):
                # Halves that vanish for one of the cotangents are 0 in both.
                assert error(x[half], y[half]) <= 2 * error(z[half], y[half])


def test_only_who_asks_for_it_gets_it_for_16_bit_heads_on_sm_90(monkeypatch):
    q = torch.zeros(2, 1, 1, 3, 128, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(attention_backward, "architecture", lambda device: "sm_90")
    assert attention_backward.design(q) != "warpgroups"
    monkeypatch.setenv(attention_backward.OVERRIDE, "warpgroups")
    assert attention_backward.design(q) == "warpgroups"
    for other in (q.float(), q[..., :20], torch.cat((q, q), -1)):
        assert attention_backward.design(other) == "split"
    torch.use_deterministic_algorithms(True)
    assert attention_backward.design(q) == "split"
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(attention_backward, "architecture", lambda device: "sm_80")
    assert attention_backward.design(q) == "split"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_sm_90_the_kernel_agrees_with_the_split_ones(case):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for sm_90")
    shape, causal, spans, _ = CASES[case]
    q, k, v = inputs(*shape, torch.bfloat16)
    grad = torch.randn_like(q)
    of_spans = None, None
    if spans is not None:
        of_spans = spans.cuda(), key_spans_of(spans, k.shape[3]).cuda()
    setting = *of_spans, causal, q.shape[-1] ** -0.5
    arguments = grad, q, k, v, *attention(q, k, v, *setting), *setting
    split = attention_backward.backward_by("split", *arguments)
    for mine, theirs in zip(
        attention_backward.backward_by("warpgroups", *arguments), split, strict=True
    ):
        # Each within its bound of one truth.
        assert error(mine, theirs.double()) <= 2 * ATTENTION[torch.bfloat16]


def test_a_projection_split_into_heads_is_not_copied_and_what_hardware_refuses_is():
    fused = torch.zeros(2, 3, 5, 4, 16, dtype=torch.bfloat16).transpose(2, 3)
    q, k = fused.split([3, 1], 2)
    for x in (q, k):
        tiles = kernels._tiles(x)
        assert tiles.base.data_ptr() == x.data_ptr()
        assert all(step > 0 for step in tiles.strides)
    odd = torch.zeros(2, 3, 4, 5, 20, dtype=torch.bfloat16)[..., 4:]  # rows of 40 bytes
    shared = torch.zeros(2, 3, 1, 5, 16, dtype=torch.bfloat16).expand(2, 3, 4, 5, 16)
    for x in (odd, shared):
        assert kernels._tiles(x).strides == [960, 320, 80, 16, 1]


def test_any_order_of_the_partitions_gives_the_same():
    shape, causal, spans, _ = CASES["documents-H2/1"]
    for seed in range(1, 4):
        mine, theirs, _ = next(both(shape, spans, causal, seed=seed))
        for x, y in zip(mine, theirs, strict=True):
            assert error(x, y) <= ATTENTION[torch.float32]


@pytest.mark.parametrize(
    "left_out",
    ["fence", "HELD_READY", "READY", "FREE", "P_READY", "DS_READY"],
)
def test_every_barrier_and_fence_is_needed(left_out):
    shape, causal, *_ = CASES["causal-S150-H4/2"]
    broken = left_out if left_out == "fence" else getattr(kernels, left_out).value
    with pytest.raises((Race, Stuck)):
        next(both(shape, None, causal, broken=broken))

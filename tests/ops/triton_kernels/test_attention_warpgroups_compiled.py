"""The backward for sm_90 in Gluon as the compiler makes it, without a GPU."""

import pytest
import torch
from compiled import SHARED_LIMIT, compiled, variants

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow  # compiles


def launches(dtype, width, mode, group, lengths=(1000,)):
    def launch():
        for length in lengths:
            launch_one(length)

    def launch_one(length):
        from stars_fast.ops.triton.attention_parts import Backward
        from stars_fast.ops.triton.attention_warpgroups import warpgroups

        def empty(*shape, dtype=dtype):
            return torch.empty(shape, dtype=dtype, device="meta")

        heads, kv_heads = 4, 4 // group
        fused = empty(2, 1, length, heads + 2 * kv_heads, width).transpose(2, 3)
        q, k, v = fused.split([heads, kv_heads, kv_heads], 2)
        rows = empty(2, 1, heads, length, dtype=torch.float32)
        spans = empty(1, length, 2, dtype=torch.int32) if mode == "spans" else None
        setting = spans, spans, mode == "causal", width**-0.5
        given = Backward(torch.empty_like(q), q, k, v, rows, rows[0], rows, *setting)
        warpgroups(given, *(empty(2, 1, length, x.shape[2], width) for x in (q, k, v)))

    return launch


CASES = {
    # What takes most registers.
    "D128-spans-group4-bf16": launches(torch.bfloat16, 128, "spans", 4),
    # For the table alone.
    "D128-causal-bf16": launches(torch.bfloat16, 128, "causal", 1),
    "D128-full-fp16": launches(torch.float16, 128, "full", 1),
    "D64-spans-bf16": launches(torch.bfloat16, 64, "spans", 1),
    # Only counted.
    "lengths": launches(
        torch.bfloat16, 128, "spans", 4, (1, 2, 3, 16, 17, 1000, 1001, 4096, 2**20)
    ),
}
# Bytes a thread: addresses and counts, read again once a tile, and no part of a sum. The most is
# that of Triton 3.9, 248 stores and 332 loads; that of 3.6 is 72 and 76.
SPILL_LIMIT = 384


def test_15_products_4_full_waits_nothing_serialised():
    module = "test_attention_warpgroups_compiled"
    (row,) = compiled(module, ("sm_90",), "^D128-spans-group4-bf16$")
    assert row["products"] == 15
    assert row["waits"] <= 4  # 14 of the split kernels, which take three loops
    # A product is as many instructions as it has 16 columns of its left side: 6 of 128, 9 of 64.
    assert row["hgmma"] == 6 * 8 + 9 * 4
    assert not row["serialised"]
    # What the emulator takes for granted: one thread arrives for a side whose warps have met.
    assert row["alone"] == 0
    assert row["shared"] <= SHARED_LIMIT["sm_90"]
    assert row["spill_stores"] <= SPILL_LIMIT
    assert row["spill_loads"] <= SPILL_LIMIT
    # Of 12 warps, when they start.
    assert row["registers"] == 168


def test_lengths_do_not_multiply_the_kernels():
    assert variants("test_attention_warpgroups_compiled", "^lengths$") == {"_backward": 1}

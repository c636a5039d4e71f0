"""The attention kernels as the compiler makes them, without a GPU."""

import re

import pytest
import torch
from compiled import SHARED_LIMIT, compiled, variants


def launches(dtype, width, mode, group=1, lengths=(1000,), tf32=False, design="split"):
    def launch():
        for length in lengths:
            launch_one(dtype, width, mode, group, length, tf32, design)

    return launch


def launch_one(dtype, width, mode, group, length, tf32, design):
    from stars_fast.ops.triton.attention import attention
    from stars_fast.ops.triton.attention_backward import backward_by

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    heads, kv_heads = 4, 4 // group
    fused = empty(2, 1, length, heads + 2 * kv_heads, width).transpose(2, 3)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 2)
    spans = empty(1, length, 2, dtype=torch.int32) if mode == "spans" else None
    setting = (spans, spans, mode == "causal", width**-0.5)
    out, lse, mu = attention(q, k, v, *setting)
    exact = mode == "spans"  # as those of packed documents are
    backward_by(design, torch.empty_like(out), q, k, v, out, lse, mu, *setting, exact)


def two_programs():
    """The tiles that leave room for two programs a processor."""
    from stars_fast.ops.triton import tiles

    table = tiles.table(torch.empty(0, dtype=torch.bfloat16, device="meta"))
    before = dict(table)
    table.update(tiles.TWO_PROGRAMS)
    launch_one(torch.bfloat16, 128, "spans", 1, 1000, False, "split")
    table.update(before)


pytestmark = pytest.mark.slow  # compiles
LENGTHS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 100, 128, 1000, 1024, 4097, 65536, 2**20, 2**24)
CASES = {
    "D64-causal-bf16": launches(torch.bfloat16, 64, "causal"),
    "D64-spans-bf16": launches(torch.bfloat16, 64, "spans"),
    "D64-full-tf32": launches(torch.float32, 64, "full", tf32=True),
    "D128-causal-bf16": launches(torch.bfloat16, 128, "causal"),
    "D128-spans-bf16": launches(torch.bfloat16, 128, "spans"),
    "D256-spans-fp16": launches(torch.float16, 256, "spans"),
    "fused-D64-spans-bf16": launches(torch.bfloat16, 64, "spans", design="fused"),
    "fused-D128-spans-bf16": launches(torch.bfloat16, 128, "spans", design="fused"),
    "two-programs": two_programs,
    # For the table alone.
    "D64-causal-fp32": launches(torch.float32, 64, "causal"),
    "D80-spans-fp16": launches(torch.float16, 80, "spans"),
    "D128-causal-fp32": launches(torch.float32, 128, "causal"),
    "D128-full-group4-bf16": launches(torch.bfloat16, 128, "full", 4),
    "fused-D128-causal-bf16": launches(torch.bfloat16, 128, "causal", design="fused"),
    "fused-D128-full-group4-bf16": launches(torch.bfloat16, 128, "full", 4, design="fused"),
    "D256-causal-bf16": launches(torch.bfloat16, 256, "causal"),
    # Only counted.
    "lengths-aligned": launches(torch.bfloat16, 40, "spans", lengths=LENGTHS),
    "lengths-unaligned": launches(torch.bfloat16, 20, "spans", lengths=LENGTHS),
}
# Spans take most registers, so causal kernels are compiled once.
TESTED = {
    "sm_80": ("D64-spans-bf16", "D128-spans-bf16", "D64-full-tf32", "fused-D128-spans-bf16"),
    "sm_86": ("D128-spans-bf16",),
    "sm_90": (
        "D64-spans-bf16",
        "D128-spans-bf16",
        "D128-causal-bf16",
        "D256-spans-fp16",
        "two-programs",
    ),
}
# Times that a kernel waits for all its products on sm_90, in all its loops.
WAITS = {"_forward": 12, "_backward_keys": 9, "_backward_queries": 16, "_row_sums": 0}
# Times that all warps of a program of a fused kernel wait for each other: 8 in the loop on sm_80.
BARRIERS = 16
# Registers of a processor, and bytes of shared memory that a program takes besides its own.
REGISTERS, RESERVED = 65536, 1024
SPILL_LIMIT = 256  # bytes a thread; what does not fit spills many hundreds


@pytest.mark.parametrize("arch", TESTED)
def test_kernels_fit_and_are_pipelined(arch):
    cases = "|".join(map(re.escape, TESTED[arch]))
    figures = compiled("test_attention_compiled", (arch,), f"^({cases})$")
    assert {row["case"] for row in figures} == set(TESTED[arch])
    for row in figures:
        name = "{case} {kernel}".format(**row)
        assert row["shared"] <= SHARED_LIMIT[arch], name
        assert row["spill_stores"] <= SPILL_LIMIT, name
        assert row["spill_loads"] <= SPILL_LIMIT, name
        assert not row["serialised"], name
        if arch == "sm_90":
            assert row["waits"] <= WAITS[row["kernel"]], name
        if "fused" in row["case"] and row["kernel"] == "_backward_keys":
            assert row["bar.sync"] <= BARRIERS, name
        if row["case"] == "two-programs" and row["warps"] == 4:
            assert 2 * (row["shared"] + RESERVED) <= SHARED_LIMIT[arch] + RESERVED, name
            assert 2 * 32 * row["warps"] * -(-row["registers"] // 8) * 8 <= REGISTERS, name
        if row["kernel"] != "_row_sums":
            assert row["registers"] > 32, f"{name}: the register allocator gave up"
            assert row["ldgsts"] > 0, name
            # The widest heads leave room for 32 rows, which are too few for wgmma.
            hopper = arch == "sm_90" and "D256" not in row["case"]
            assert row["hgmma" if hopper else "hmma"] > 0, name


def test_lengths_do_not_multiply_the_kernels():
    counts = variants("test_attention_compiled", "lengths-aligned")
    assert set(counts.values()) == {1}
    assert max(variants("test_attention_compiled", "lengths-unaligned").values()) <= 2

"""Tiles that the tuner tries, on any GPU."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.tune_attention import candidates, tuned_kernels
from stars_fast.ops.triton import tiles
from stars_fast.ops.triton.attention_fused import takes


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_every_gpu_has_a_tile_of_every_kernel(arch, width, monkeypatch):
    monkeypatch.setattr(tiles, "architecture", lambda device: arch)
    q = torch.empty(2, 1, 1, 1, width, dtype=torch.bfloat16, device="meta")
    for design in ("split", "fused") if takes(q) else ("split",):
        for kernel in tuned_kernels(width, design):
            present = tiles.table(q)[kernel, width]
            assert candidates(kernel, width, present, False)[0] == present
    assert takes(q) == (arch == "sm_80" and width <= 128)


def test_two_programs_a_processor_are_tried_first():
    present = tiles.Tile(128, 32, 8, 2)
    assert candidates("keys_v", 128, present, False)[:2] == [present, tiles.Tile(64, 32, 4, 2)]
    assert len(set(candidates("keys_v", 64, present, False))) == 24

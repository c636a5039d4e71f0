"""The ways to the penalty: right against fp64, and found out where they are not."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import block as level
from benchmarks import growth, ways
from benchmarks.blocks import SHAPES, Shape, attending, build_block, plain_norms
from benchmarks.timing import in_its_own_process
from stars_fast import explain
from stars_fast.cli import main

TINY = {"pre-norm": SHAPES["study"].small(), "sandwich": SHAPES["ouro"].small()}
HERE = [name for name in ways.WAYS if name != "jvp_flash_attention"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("kind", TINY)
def test_ways_agree_with_fp64(kind, dtype):
    block, h, u = build_block(TINY[kind], "cpu", dtype)
    # A difference of two 16-bit numbers over a step of 1e-2 has few digits left.
    names = [name for name in HERE if dtype.itemsize > 2 or name != "finite_difference"]
    exact = ways.Exact(block, h, u)
    errors = {name: exact.error(name, ways.bind(name, block)) for name in names}
    assert {name: e for name, e in errors.items() if not e <= ways.tolerance(name, dtype)} == {}


def test_the_ways_to_one_number_agree_in_it():
    block, h, u = build_block(TINY["pre-norm"], "cpu", torch.float64)
    values = {name: way(block, h, u).item() for name, way in ways.WAYS.items() if name in HERE}
    for name in ("autograd_jvp", "func_jvp"):
        assert values[name] == pytest.approx(values["dual"], rel=1e-12)
    assert values["last"] == pytest.approx(values["dual"] + values["plain"], rel=1e-12)
    assert values["finite_difference"] == pytest.approx(values["dual"], rel=0.1)
    assert values["double_backward"] != pytest.approx(values["dual"], rel=1e-6)  # u^T J, not J u


def test_the_check_takes_the_first_tokens_of_a_long_sample():
    block, h, u = build_block(replace(TINY["pre-norm"], length=48), "cpu", torch.float32)
    exact = ways.Exact(block, h, u, length=16)
    seen = []

    def spy(h, u):
        seen.append(h.shape[1])
        return ways.dual(block, h, u)

    assert exact.error("dual", spy) < 5e-6
    assert seen == [16]
    assert {p.dtype for p in block.parameters()} == {torch.float32}  # left as it was


def test_attention_that_drops_the_cotangent_of_its_tangent_is_an_error():
    """What a kernel with a derivative of its own may do, and what the check must show."""
    block, h, u = build_block(TINY["pre-norm"], "cpu", torch.float32)

    class Cut(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, x_dot):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(inputs[1])

        @staticmethod
        def jvp(ctx, *_):
            return ctx.saved_tensors[0].clone()

        @staticmethod
        def backward(ctx, bar):
            return bar, None

    def cut(q, k, v):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        primal, tangent = torch.autograd.forward_ad.unpack_dual(out)
        return Cut.apply(primal, tangent.detach()) if tangent is not None else out

    def peer(h, u):
        with attending(block, cut):
            return ways.func_jvp(block, h, u)

    error = ways.Exact(block, h, u).error("jvp_flash_attention", peer)
    assert error > 1e-2 > ways.tolerance("jvp_flash_attention", torch.float32)


def test_attending_is_undone():
    block, h, _ = build_block(TINY["sandwich"], "cpu", torch.float32)
    before = block(h)
    with attending(block, lambda q, k, v: torch.zeros_like(v)):
        assert not torch.equal(block(h), before)
    assert torch.equal(block(h), before)


@pytest.mark.parametrize("kind", TINY)
def test_blocks_take_the_fast_path(kind):
    block, h, _ = build_block(TINY[kind], "cpu", torch.float32)
    found = explain(block, h)
    assert found.fallbacks == []
    fused = {name for name, path in found.ops if path == "fused"}
    assert {"rms_norm", "scaled_dot_product_attention", "gated:silu"} <= fused
    assert ("apply_rotary_pos_emb" in fused) == (kind == "sandwich")


def test_compiled_ways_tell_when_they_run_in_eager_mode(monkeypatch):
    monkeypatch.setattr(ways, "_inductor", lambda: lambda graph, inputs: graph.forward)
    block, h, u = build_block(TINY["pre-norm"], "cpu", torch.float32)
    compiled = ways.bind("plain, compiled", block)
    assert compiled(h, u).item() == pytest.approx(ways.plain(block, h, u).item(), rel=1e-6)
    skipped = ways.Compiled(torch.compiler.disable(partial(ways.plain, block), recursive=True))
    with pytest.raises(RuntimeError, match="fell back to eager mode"):
        skipped(h, u)


def test_a_compiled_way_that_kills_its_process_takes_no_other_with_it(monkeypatch):
    def crash(function, timeout, **arguments):
        raise RuntimeError("killed by SIGSEGV")

    monkeypatch.setattr(level, "in_its_own_process", crash)

    shape = TINY["pre-norm"]
    rows = level.way_rows(
        ["func_jvp, compiled"], shape, *build_block(shape, "cpu", torch.float32), 1
    )
    assert rows["func_jvp, compiled"] == {"failed": "killed by SIGSEGV"}
    assert rows["plain"]["ratio"] == 1


def test_a_process_that_crashes_is_an_error():
    with pytest.raises(RuntimeError, match="killed by SIGABRT"):
        in_its_own_process("os:abort")


def test_a_broken_way_is_marked_and_fails_the_command(monkeypatch, tmp_path, capsys):
    whole = ways.WAYS["dual"]
    monkeypatch.setitem(ways.WAYS, "dual", lambda block, h, u: 0.99 * whole(block, h, u))
    monkeypatch.setattr(growth, "in_its_own_process", in_this_one)
    words = ["bench", "block", "--small", "--shape", "study", "--ways", "dual", "last"]
    assert main([*words, "--repeats", "1", "--device", "cpu", "--json", str(tmp_path / "a")]) == 1
    out = capsys.readouterr().out
    assert "dual (WRONG)" in out
    assert "FAILED study: dual" in out
    assert "last (WRONG)" not in out
    rows = json.loads((tmp_path / "a").read_text())["rows"]["study"]
    assert rows["dual"]["wrong"]
    assert rows["dual"]["error"] == pytest.approx(0.01, rel=1e-3)
    assert "wrong" not in rows["last"]


def test_a_way_of_ours_that_raises_fails_the_command(monkeypatch, capsys):
    def broken(block, h, u):
        raise ValueError("no such thing")

    monkeypatch.setitem(ways.WAYS, "last", broken)
    words = ["bench", "block", "--small", "--shape", "study", "--ways", "last", "--repeats", "1"]
    monkeypatch.setattr(growth, "in_its_own_process", in_this_one)
    assert main([*words, "--device", "cpu"]) == 1
    assert "ValueError: no such thing" in capsys.readouterr().out


def in_this_one(function, **arguments):
    return growth.in_this_process(**arguments)


@pytest.mark.slow
def test_memory_says_where_a_way_runs_out():
    shape = Shape(64, 2, 128, layers=1, batch=1)
    rows = growth.against_length(
        ["func_jvp"], [2048, 64, 4096], shape, "cpu", torch.float32, 30.0, None
    )
    assert list(rows) == ["64", "2048", "4096"]
    assert rows["64"]["func_jvp"] < 30
    assert rows["2048"]["func_jvp"] == "out of memory"
    assert rows["4096"]["func_jvp"] is None  # not tried


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"width: expected a multiple .* \(8\), got 40"):
        Shape(width=40, heads=8)


def test_a_peer_that_is_not_here_says_why(monkeypatch):
    monkeypatch.setattr(ways, "find_spec", lambda name: None)
    assert ways.missing("jvp_flash_attention", "cpu") == "needs CUDA"
    assert ways.missing("jvp_flash_attention", "cuda") == "not installed"
    assert ways.missing("func_jvp", "cuda") is None


def test_norms_of_plain_operations_are_the_same_norms():
    block, h, _ = build_block(TINY["sandwich"], "cpu", torch.float64)
    before = block(h)
    seen = []
    with plain_norms(block), Ops(seen):
        inside = block(h)
    # Sums of some ten terms in fp64, in another order.
    torch.testing.assert_close(inside, before, rtol=1e-12, atol=1e-12)
    assert torch.ops.aten.rsqrt.default in seen
    assert not any("rms_norm" in str(op) for op in seen)
    assert all("forward" not in vars(module) for module in block.modules())


class Ops(TorchDispatchMode):
    """Every operator that is called."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))

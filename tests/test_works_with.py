"""The dual pass in company: autocast, checkpointing, accumulation, compile, DDP and FSDP2."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from stars_fast import Dual, fused_jsrr, fused_jvp
from stars_fast.models.gpt import GPTBlock
from stars_fast.models.looped import LoopedConfig


def state(*shape, seed=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Layer(nn.Module):
    """Llama-like, with the norm given from outside."""

    def __init__(self, norm, width=32):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 48, bias=False), nn.Linear(width, 48, bias=False)
        self.down = nn.Linear(48, width, bias=False)

    def forward(self, h):
        batch, length, width = h.shape
        q, k, v = (
            self.qkv(self.norm1(h)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).flatten(2))
        x = self.norm2(h)
        return h + self.down(F.silu(self.gate(x)) * self.up(x))


def make(norm=nn.RMSNorm, layers=1):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(norm) for _ in range(layers)))


def gradients(loss, module):
    return torch.autograd.grad(loss, list(module.parameters()))


# -- autocast


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm], ids=["rmsnorm", "layernorm"])
def test_autocast_follows_eager_and_is_as_accurate(norm):
    block, h, v = make(norm), state(2, 16, 32), state(2, 16, 32, seed=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = block(h)
        out, jv = fused_jvp(block, h, v)
        loss = fused_jsrr(block, h, v=v)
        # what eager can do in bf16: a finite difference has no business here, double backward does
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            x = h.clone().requires_grad_()
            u = torch.zeros_like(h, requires_grad=True)
            (g,) = torch.autograd.grad(block(x), x, u, create_graph=True)
            (eager_jv,) = torch.autograd.grad(g, u, v)
    assert out.dtype == plain.dtype
    assert loss.dtype == torch.float32
    exact_out, exact_jv = fused_jvp(block.double(), h.double(), v.double())
    exact = fused_jsrr(block, h.double(), v=v.double())
    assert relative_error(out, exact_out) <= 2 * relative_error(plain, exact_out)
    assert relative_error(jv, exact_jv) <= 2 * relative_error(eager_jv, exact_jv)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)


def test_autocast_gradients_reach_fp32_weights():
    block, h, v = make(), state(2, 16, 32), state(2, 16, 32, seed=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_jsrr(block, h, v=v)
    got = gradients(loss, block)
    assert all(grad.dtype == torch.float32 for grad in got)
    expected = gradients(fused_jsrr(block, h, v=v), block)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 0.05


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_autocast_through_a_hugging_face_layer(name):
    transformers = pytest.importorskip("transformers")
    from test_blocks import hf_layer

    layer, kwargs = hf_layer(name, "sdpa")
    assert transformers.__version__
    layer = layer.float()
    kwargs = {"position_embeddings": tuple(t.float() for t in kwargs["position_embeddings"])}
    kwargs["attention_mask"] = None
    h = state(2, 6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = layer(h, **kwargs)
        out, _ = fused_jvp(layer, h, state(2, 6, 16, seed=4), kwargs=kwargs)
    assert out.dtype == plain.dtype
    torch.testing.assert_close(out, plain, rtol=0.05, atol=0.05)


# -- checkpointing


def test_checkpointing_outside_and_inside_gives_the_same_gradient():
    block = make(layers=3)
    h, v = state(2, 16, 32).requires_grad_(), state(2, 16, 32, seed=4)
    leaves = [h, *block.parameters()]

    def inside(x):
        for layer in block:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def outside(x):
        return checkpoint(lambda y: fused_jsrr(block, y, v=v, detach=False), x, use_reentrant=False)

    expected = torch.autograd.grad(fused_jsrr(block, h, v=v, detach=False), leaves)
    for loss in (fused_jsrr(inside, h, v=v, detach=False), outside(h)):
        for a, b in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
            assert relative_error(a, b) <= 1e-6


def test_checkpointing_around_the_call_repeats_the_global_draw():
    block, h = make(), state(2, 16, 32).requires_grad_()
    torch.manual_seed(5)
    plain = fused_jsrr(block, h)
    torch.manual_seed(5)
    kept = checkpoint(lambda x: fused_jsrr(block, x), h, use_reentrant=False)
    assert torch.equal(plain, kept)
    for a, b in zip(gradients(kept, block), gradients(plain, block), strict=True):
        assert torch.equal(a, b)


def test_a_recognised_module_is_recomputed_the_way_it_ran():
    """The recomputation runs in backward, outside the pass: it must take the same path."""
    pytest.importorskip("transformers")
    from test_blocks import hf_layer

    layer, kwargs = hf_layer("llama", "sdpa")
    kwargs["attention_mask"] = None
    h, v = state(2, 6, 16, dtype=torch.float64), state(2, 6, 16, seed=4, dtype=torch.float64)
    kept = fused_jsrr(lambda x: checkpoint(layer, x, use_reentrant=False, **kwargs), h, v=v)
    plain = fused_jsrr(layer, h, v=v, kwargs=kwargs, return_output=True)[1]  # as in a region
    for a, b in zip(gradients(kept, layer), gradients(plain, layer), strict=True):
        assert relative_error(a, b) <= 1e-12


MEMORY = r"""
import re, sys, torch
sys.path.insert(0, {tests!r})
from torch.utils.checkpoint import checkpoint
from stars_fast import fused_jsrr
from test_works_with import make
block = make(layers=12)
h = torch.randn(32, 128, 32)
where = sys.argv[1]
def inside(x):
    for layer in block:
        x = checkpoint(layer, x, use_reentrant=False)
    return x
torch.set_num_threads(1)
fused_jsrr(block, h[:1]).backward()
def peak():  # ru_maxrss would begin at that of the process that started this one
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
before = peak()
fused_jsrr(inside if where == "inside" else block, h).backward()
print(peak() - before)
"""


@pytest.mark.slow
def test_checkpointing_inside_the_block_saves_memory():
    def peak(where):
        code = MEMORY.format(tests=os.path.dirname(__file__))
        # glibc keeps freed memory unless blocks are mapped one by one.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        run = [sys.executable, "-c", code, where]
        return int(subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout)

    assert peak("inside") < 0.3 * peak("nowhere")


# -- accumulation


def test_accumulated_gradients_are_those_of_the_whole_batch():
    block, h, v = make(), state(8, 16, 32), state(8, 16, 32, seed=4)
    fused_jsrr(block, h, v=v).backward()
    whole = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        (fused_jsrr(block, h[rows], v=v[rows]) / 4).backward()
    for p, expected in zip(block.parameters(), whole, strict=True):
        assert relative_error(p.grad, expected) <= 1e-5


# -- torch.compile


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("how", ["block", "submodule", "step"])
def test_compiled_code_gives_what_eager_gives(how):
    block, h, v = make(), state(2, 16, 32), state(2, 16, 32, seed=4)
    expected = fused_jsrr(block, h, v=v)
    wanted = gradients(expected, block)
    if how == "block":
        compiled = torch.compile(block, backend="aot_eager")
        compiled(h)  # compiled for tensors first
        loss = fused_jsrr(compiled, h, v=v)
    elif how == "submodule":
        block[0].gate.compile(backend="aot_eager")
        loss = fused_jsrr(block, h, v=v)
    else:

        @torch.compile(backend="aot_eager")
        def step(x):
            return fused_jsrr(block, x * 1.0, v=v) * 1.0

        loss = step(h)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(gradients(loss, block), wanted, strict=True):
        assert relative_error(a, b) <= 1e-6
        assert b.norm() > 0


# -- several processes


class Model(nn.Module):
    """Two turns, a penalty, a loss: what a training step does to its modules."""

    def __init__(self):
        super().__init__()
        sizes = {"vocab_size": 12, "max_length": 8, "d_model": 16, "n_heads": 2, "d_ff": 24}
        self.embed = nn.Embedding(12, 16)
        self.block = GPTBlock(LoopedConfig(**sizes, placement="pre", norm="rmsnorm"))

    def forward(self, tokens, v):
        h = self.embed(tokens)
        h = self.block(self.block(h))
        return h.square().mean() + fused_jsrr(self.block, h, v=v)


def build():
    torch.manual_seed(0)
    tokens = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(1))
    return Model(), tokens, state(4, 6, 16, seed=4)


def worker(rank, path, kind):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from stars_fast.training.scale.distributed import settle

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/init-{kind}", rank=rank, world_size=2
    )
    model, tokens, v = build()
    names = [name for name, _ in model.named_parameters()]
    if kind == "ddp":
        run = DistributedDataParallel(model)
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model.block, mesh=mesh, reshard_after_forward=True)
        run = fully_shard(model, mesh=mesh)
    rows = slice(2 * rank, 2 * rank + 2)
    loss = run(tokens[rows], v[rows])
    loss.backward()
    grads = {}
    for name, p in zip(names, model.parameters(), strict=True):
        grads[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    if rank == 0:
        torch.save(grads, f"{path}/{kind}.pt")
    dist.barrier()
    settle()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_gradient_of_one(kind, tmp_path):
    torch.multiprocessing.spawn(worker, (str(tmp_path), kind), nprocs=2)
    model, tokens, v = build()
    model(tokens, v).backward()
    found = torch.load(tmp_path / f"{kind}.pt")
    for name, p in model.named_parameters():
        assert p.grad.norm() > 0
        assert relative_error(found[name], p.grad) <= 1e-5, name


def test_a_dual_looks_like_a_tensor_to_wrappers():
    """What FSDP's hooks do to the inputs and outputs of a module."""
    calls = []
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda _, args: (args[0].to(torch.float32),))
    layer.register_forward_hook(lambda _, __, out: out.register_hook(calls.append) and None)
    loss = fused_jsrr(layer, state(2, 3, 4))
    loss.backward()
    assert [grad.shape for grad in calls] == [(2, 2, 3, 4)]
    assert isinstance(Dual(torch.zeros(2, 3)), torch.Tensor)

"""After a pass, and while its backward is still to come, the user's code and torch are what they
were: classes, module globals, torch's functions; pickle, deepcopy, compile and a plain forward."""

import contextlib
import copy
import pickle
import sys
import threading

import pytest
import torch
import torch._dynamo  # which the first pass of a process does
import torch.nn.functional as F
import torch.utils.checkpoint
from oracle import relative_error
from test_guards import state
from torch import nn
from torch.utils.checkpoint import checkpoint

from stars_fast import explain, fused_jsrr, recognition


class OwnNorm(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class OwnMLP(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, width, dtype=torch.float64) for _ in range(3)
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Cube(torch.autograd.Function):
    """A custom function, whose `apply` a pass looks into."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    def backward(ctx, bar):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * bar

    @staticmethod
    def jvp(ctx, x_dot):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * x_dot


def apply_rotary(q, cos, sin):
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat((-b, a), -1) * sin


class OwnLayer(nn.Module):
    def __init__(self, kept=False):
        super().__init__()
        self.norm, self.mlp, self.kept = OwnNorm(), OwnMLP(), kept

    def layer(self, h):
        q = self.norm(h).unflatten(-1, (2, 8)).transpose(1, 2)
        angles = torch.arange(q.shape[2] * 8, dtype=h.dtype).view(1, 1, -1, 8)
        q = apply_rotary(q, angles.cos(), angles.sin())
        return h + self.mlp(q.transpose(1, 2).flatten(2))

    def forward(self, h):
        return checkpoint(self.layer, h, use_reentrant=False) if self.kept else self.layer(h)


class OwnBlock(nn.Module):
    def __init__(self, kept=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(OwnLayer(kept) for _ in range(2))

    def forward(self, h):
        for layer in self.layers:
            h = layer(h)
        return h


class Custom(OwnBlock):
    def forward(self, h):
        return super().forward(h) + Cube.apply(h)


class Raises(OwnBlock):
    def forward(self, h):
        F.silu(super().forward(h))  # an op that waits when the error comes
        raise ZeroDivisionError


PLACES = [
    torch, torch.Tensor, F, torch.nn.Module, torch.autograd.Function, torch.utils.checkpoint,
    torch.nn.modules.module, torch.compiler, torch.special, torch.overrides,
]  # fmt: skip


def snapshot(block):
    """Every name of the user's code and of torch with the object that it stands for."""
    owners = list(PLACES)
    for module in block.modules():
        for kind in type(module).__mro__:
            owners += [kind, sys.modules[kind.__module__]]
    owners += [Cube, sys.modules[__name__]]
    seen = {
        (id(owner), name): value
        for owner in owners
        for name, value in vars(owner).items()
        if name not in ("__warningregistry__", "__test__")
    }
    own = {(id(m), name): m.__dict__[name] for m in block.modules() for name in m.__dict__}
    return seen, own, torch._C._len_torch_function_stack(), sys.getprofile()


def assert_as_it_was(before, block):
    now = snapshot(block)
    for then, found in zip(before[:2], now[:2], strict=True):
        assert then.keys() == found.keys()
        assert [key for key in then if then[key] is not found[key]] == []
    assert before[2:] == now[2:]
    everywhere = vars(torch.nn.modules.module).items()  # one is a flag, which torch never resets
    hooks = [each for name, each in everywhere if name.startswith("_global_") and each is not True]
    assert not any(hooks)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.modules())


def assert_plain_use_is_the_users(block, expected):
    """Every way to use the block runs the user's own code."""
    h = state(2, 3, 16)
    assert torch.equal(block(h), expected)
    assert torch.equal(copy.deepcopy(block)(h), expected)
    assert torch.equal(pickle.loads(pickle.dumps(block))(h), expected)
    assert type(block).forward is vars(type(block))["forward"]


def runs():
    """name -> (block, what is done with it)."""

    def backward(block):
        fused_jsrr(block, state(2, 3, 16)).backward()

    def failing(block):
        with pytest.raises(ZeroDivisionError):
            fused_jsrr(block, state(2, 3, 16))

    def failing_inside(block):
        with recognition(False):
            failing(block)

    def without_gradients(block):
        with torch.no_grad():
            fused_jsrr(block, state(2, 3, 16))

    def to_come(block):
        return fused_jsrr(block, state(2, 3, 16)).backward

    def written(block):
        with recognition(False):
            return to_come(block)

    def in_threads(block):
        threads = [threading.Thread(target=without_gradients, args=(block,)) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    return {
        "pass": (OwnBlock, without_gradients),
        "backward": (OwnBlock, backward),
        "explained": (OwnBlock, lambda block: explain(block, state(2, 3, 16)) and None),
        "raised": (Raises, failing),
        "raised as written": (Raises, failing_inside),
        "custom function": (Custom, backward),
        "checkpointed": (lambda: OwnBlock(kept=True), backward),
        "to come": (OwnBlock, to_come),
        "to come, checkpointed": (lambda: OwnBlock(kept=True), to_come),
        "to come, as written": (lambda: OwnBlock(kept=True), written),
        "threads": (OwnBlock, in_threads),
    }


RUNS = runs()


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_changed(name):
    make, run = RUNS[name]
    block = make()
    before = snapshot(block)
    expected = None if isinstance(block, Raises) else block(state(2, 3, 16)).detach()
    to_come = run(block)
    assert_as_it_was(before, block)
    if expected is not None:
        assert_plain_use_is_the_users(block, expected)
    if to_come is not None:
        to_come()
        assert all(layer.mlp.gate.weight.grad.any() for layer in block.layers)
        assert_as_it_was(before, block)
        assert_plain_use_is_the_users(block, expected)


@pytest.mark.parametrize("kept", [False, True], ids=["", "checkpointed"])
def test_compile_sees_the_users_code(kept):
    """Traced in one graph: the ops are those of the user's forward."""
    block, h, traced = OwnBlock(), state(2, 3, 16), []

    def backend(graph, inputs):
        traced.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    def trace():
        torch._dynamo.reset()
        with torch.no_grad():
            torch.testing.assert_close(
                torch.compile(block, backend=backend, fullgraph=True)(h), out
            )

    out = block(h).detach()
    trace()
    for layer in block.layers:
        layer.kept = kept
    loss = fused_jsrr(block, h)
    for layer in block.layers:
        layer.kept = False
    trace()  # its backward is still to come
    for layer in block.layers:
        layer.kept = kept
    loss.backward()
    for layer in block.layers:
        layer.kept = False
    trace()
    assert len(traced) == 3
    assert traced[0] == traced[1] == traced[2]


def test_a_patch_of_the_users_own_stays():
    """What was there when the pass began is there when it ends, even if another put it there."""
    plain, seen = torch.autograd.Function.__dict__["apply"], []

    def noted(cls, *args):
        seen.append(cls)
        return plain.__get__(None, cls)(*args)

    mine = classmethod(noted)
    torch.autograd.Function.apply = mine
    try:
        fused_jsrr(Custom(), state(2, 3, 16)).backward()
        assert torch.autograd.Function.__dict__["apply"] is mine
    finally:
        torch.autograd.Function.apply = plain
    assert Cube in seen


# -- the switch


def losses_and_gradients(block, around=contextlib.nullcontext, backward=contextlib.nullcontext):
    h, v = state(2, 3, 16), state(2, 3, 16, seed=4)
    with around():
        loss = fused_jsrr(block, h, v=v)
    with backward():
        return loss, torch.autograd.grad(loss, list(block.parameters()))


def off():
    return recognition(False)


@pytest.mark.parametrize("kept", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("around", [contextlib.nullcontext, off], ids=["on", "off"])
@pytest.mark.parametrize("backward", [contextlib.nullcontext, off], ids=["on", "off"])
def test_both_settings_agree_and_recomputation_follows_the_pass(kept, around, backward):
    """Checkpointing itself raises where a recomputation saves other tensors than the pass did."""
    expected, theirs = losses_and_gradients(OwnBlock())
    loss, mine = losses_and_gradients(OwnBlock(kept), around, backward)
    assert relative_error(loss, expected) <= 1e-12
    for a, b in zip(mine, theirs, strict=True):
        assert relative_error(a, b) <= 1e-10


def test_a_recomputation_that_did_not_follow_would_be_noticed(monkeypatch):
    from stars_fast.dual import patches

    monkeypatch.setattr(patches, "recognising", lambda _: contextlib.nullcontext())
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        losses_and_gradients(OwnBlock(kept=True), off)


@pytest.mark.parametrize("around", [contextlib.nullcontext, off], ids=["on", "off"])
def test_a_checkpoint_around_a_pass_follows_it_too(around):
    block, h, v = OwnBlock(), state(2, 3, 16), state(2, 3, 16, seed=4)
    with around():
        loss = checkpoint(lambda h: fused_jsrr(block, h, v=v), h, use_reentrant=False)
    grads = torch.autograd.grad(loss, list(block.parameters()))
    for a, b in zip(grads, losses_and_gradients(block)[1], strict=True):
        assert relative_error(a, b) <= 1e-10


def test_explain_names_what_was_recognised():
    block = OwnBlock()
    found = explain(block, state(2, 3, 16))
    assert found.recognised == {
        ("OwnNorm", "RMSNorm"): 2,
        ("rotary", "rotary embedding"): 2,
        ("OwnMLP:silu*up", "silu(g) * u"): 2,
    }
    assert "OwnNorm: recognised as RMSNorm, 2 of 2 calls" in str(found)
    with recognition(False):
        written = explain(block, state(2, 3, 16))
    assert written.recognised == {}
    assert "recognised" not in str(written)
    assert ("silu", "fused") in written.ops
    assert explain(block, state(2, 3, 16)).recognised == found.recognised


def test_the_switch_is_of_this_thread_and_nests():
    h, found = state(2, 3, 16), {}

    def look(name):
        found[name] = bool(explain(OwnBlock(), h).recognised)

    with recognition(False):
        with recognition(True):
            look("inner")
        look("outer")
        other = threading.Thread(target=look, args=("thread",))
        other.start()
        other.join()
    assert found == {"inner": True, "outer": False, "thread": True}
    with pytest.raises(TypeError, match="enabled: expected True or False, got 0"):
        recognition(0).__enter__()

"""Blocks with parts of TorchScript: scripted functions run as Python, the rest is named."""

import pytest
import torch
from torch import Tensor, nn

from stars_fast import fused_jsrr, fused_jvp

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


calls = []


@torch.jit.ignore
def note() -> None:
    calls.append("python")


def clamp(x: Tensor, bound: float = 2.0) -> Tensor:
    if not torch.jit.is_scripting():
        note()
    return (x / bound).tanh() * bound


def mix(parts: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    return clamp(parts[0] * weight), parts[0] @ parts[1].mT


class Block(nn.Module):
    def __init__(self, clamp, mix):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.clamp, self.mix = clamp, mix

    def forward(self, h):
        x = self.clamp(self.linear(h), bound=3.0)
        x, scores = self.mix([x, h], self.weight)
        return x + scores @ self.clamp(h)


def derivatives(block, h, v):
    out, jv = fused_jvp(block, h, v)
    return out, jv, *torch.autograd.grad((jv.square() + out).sum(), [h, *block.parameters()])


@pytest.fixture
def h():
    calls.clear()
    torch.manual_seed(0)
    return torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)


def test_a_scripted_function_carries_the_tangent_of_its_code(h):
    torch.manual_seed(1)
    block = Block(torch.jit.script(clamp), torch.jit.script(mix))
    v = torch.randn_like(h)
    found = derivatives(block, h, v)
    assert len(calls) == 3
    block.clamp, block.mix = clamp, mix
    for a, b in zip(found, derivatives(block, h, v), strict=True):
        assert torch.equal(a, b)
    tangent = torch.func.jvp(block, (h.detach(),), (v,))[1]
    torch.testing.assert_close(found[1], tangent, rtol=1e-12, atol=1e-12)


def test_it_is_a_block_by_itself(h):
    loss = fused_jsrr(torch.jit.script(clamp), h, detach=False, v=torch.ones_like(h))
    slope = 1 - (h.detach() / 2).tanh().square()
    torch.testing.assert_close(loss, slope.square().mean(), rtol=1e-12, atol=1e-12)


def test_without_a_tangent_and_after_a_pass_it_is_torchscript(h):
    script = torch.jit.script(clamp)
    before = torch.jit.ScriptFunction.__call__
    constant = torch.ones(4, dtype=torch.float64)
    fused_jsrr(lambda x: x * script(constant), h)
    assert not calls
    with pytest.raises(ZeroDivisionError):
        fused_jsrr(lambda x: script(x) / (1 // 0), h)
    assert torch.jit.ScriptFunction.__call__ is before
    assert len(calls) == 1
    out = script(h)
    assert len(calls) == 1
    torch.testing.assert_close(out, clamp(h))


def test_traced_and_loaded_functions_are_refused(h):
    loaded = torch.jit.CompilationUnit("def double(x):\n    return 2 * x\n").double
    for function in (torch.jit.trace(clamp, h.detach()), loaded):
        assert isinstance(function, torch.jit.ScriptFunction)
        with pytest.raises(RuntimeError, match=r"stars_fast: .* traced or loaded function of"):
            fused_jsrr(lambda x, function=function: function(x), h)


def test_modules_are_refused(h):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    for block in (torch.jit.script(model), torch.jit.trace(model, h.detach())):
        for call in (block, lambda x, block=block: block(2 * x)):
            with pytest.raises(RuntimeError, match=r"stars_fast: .* is a module of TorchScript"):
                fused_jsrr(call, h)

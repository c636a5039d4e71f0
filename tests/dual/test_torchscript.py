"""Blocks with parts of TorchScript: scripted functions run as Python, the rest is named."""

import functools
from dataclasses import dataclass

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
    derivatives(block, h, v)  # the first call of each function is held against its code
    calls.clear()
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


def grown(parts: list[Tensor], named: dict[str, Tensor], x: Tensor) -> Tensor:
    parts.append(x)
    named["x"] = x * named["x"]
    return torch.stack(parts).sum(0) * named["x"]


def scaled(x: Tensor, by: float, times: int = 2, more: float | None = None) -> Tensor:
    table = torch.tensor([by, by])
    table[0] = 0.5
    y = x * table.mean() * times
    return y if more is None else y / (more / 2)


def unequal(x: Tensor) -> Tensor:
    if torch.jit.is_scripting():
        return x.sin()
    return x.cos()


def other(x: Tensor) -> Tensor:
    return x.sin()


def calls_other(x: Tensor) -> Tensor:
    return other(x)


def held_against_the_interpreter(block, h):
    """The value is that of the interpreter, and the tangent that of the value by differences."""
    v = torch.randn_like(h)
    out, jv = fused_jvp(block, h, v)
    eps = 1e-6
    with torch.no_grad():
        torch.testing.assert_close(out, block(h), rtol=1e-12, atol=1e-12)
        difference = (block(h + eps * v) - block(h - eps * v)) / (2 * eps)
    torch.testing.assert_close(jv, difference, rtol=1e-7, atol=1e-7)


def test_containers_are_copies_as_for_the_interpreter(h):
    script = torch.jit.script(grown)

    def block(x):
        parts, named = [x], {"x": x}
        return script(parts, named, x) + script(parts, named, x)

    held_against_the_interpreter(block, h)


def test_a_tuple_may_stand_for_a_list(h):
    script = torch.jit.script(mix)
    weight = torch.ones(4, dtype=torch.float64)
    held_against_the_interpreter(lambda x: script((x, x), weight)[0], h)


@pytest.mark.parametrize("by", [1, True, 1.5, torch.tensor(3)])
def test_numbers_are_of_the_declared_type(h, by):
    script = torch.jit.script(scaled)
    held_against_the_interpreter(lambda x: script(x, by) + script(x, by=by, times=3, more=1), h)


def test_a_number_that_carries_a_tangent_is_refused(h):
    script = torch.jit.script(scaled)
    with pytest.raises(RuntimeError, match="scaled of TorchScript takes a number where it was"):
        fused_jvp(lambda x: script(x, x.sum()), h, h)


def test_code_that_does_something_else_is_refused(h, monkeypatch):
    with pytest.raises(RuntimeError, match="unequal of TorchScript gives another result than"):
        fused_jsrr(torch.jit.script(unequal), h)
    script = torch.jit.script(calls_other)
    monkeypatch.setitem(globals(), "other", torch.cos)
    with pytest.raises(RuntimeError, match="calls_other of TorchScript gives another result"):
        fused_jsrr(script, h)


def test_dropout_of_a_script_draws_once(h):
    def dropped(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, True).sin()

    def drawn(block):
        torch.manual_seed(2)
        return fused_jvp(block, h, torch.ones_like(h)), torch.rand(3)

    script = torch.jit.script(dropped)
    for (out, jv), after in (drawn(script), drawn(script)):  # the first one is checked
        (plain, tangent), then = drawn(dropped)
        assert torch.equal(out, plain)
        assert torch.equal(jv, tangent)
        assert torch.equal(after, then)


def test_a_decorator_that_the_interpreter_leaves_out_is_refused(h):
    def doubled(function):
        @functools.wraps(function)
        def twice(x):
            return 2 * function(x)

        return twice

    for wrap in (doubled, torch.no_grad()):

        def sine(x: Tensor) -> Tensor:
            return x.sin()

        script = torch.jit.script(wrap(sine))
        torch.testing.assert_close(script(h), h.sin())
        with pytest.raises(RuntimeError, match="sine is a function of TorchScript with a decorato"):
            fused_jsrr(script, h)


@torch.jit.script
@dataclass
class Holder:
    x: Tensor
    by: float


def of_a_holder(held: Holder) -> Tensor:
    return held.x * held.by


def test_a_tangent_in_an_object_is_named(h):
    script = torch.jit.script(of_a_holder)
    with pytest.raises(RuntimeError, match="stars_fast: of_a_holder of TorchScript failed"):
        fused_jsrr(lambda x: script(Holder(x, 2.0)), h)


def test_an_error_of_a_script_is_its_own(h):
    script = torch.jit.script(mix)
    with pytest.raises(RuntimeError, match="size of tensor") as error:
        fused_jsrr(lambda x: x * script([torch.ones(2)], torch.ones(3))[0], h)
    assert "stars_fast" not in str(error.value)


def test_without_a_tangent_and_after_a_pass_it_is_torchscript(h):
    script = torch.jit.script(clamp)
    before = torch.jit.ScriptFunction.__call__
    constant = torch.ones(4, dtype=torch.float64)
    fused_jsrr(lambda x: x * script(constant), h)
    assert not calls
    fused_jsrr(script, h)
    calls.clear()
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

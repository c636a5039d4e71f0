"""Blocks with functions of TorchScript: their compiled graphs are run op by op."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_matches_differences
from tolerances import BLOCK, OPS
from torch import Tensor, nn

from stars_fast import fused_jsrr, fused_jvp

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CLOSE = dict.fromkeys(("rtol", "atol"), OPS[torch.float64])


def clamp(x: Tensor, bound: float = 2) -> Tensor:
    return (x / bound).tanh() * bound


def mix(parts: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    return clamp(parts[0] * weight), parts[0] @ parts[1].mT


def composed(x: Tensor, weight: Tensor, more: Tensor | None = None, dim: int = -1) -> Tensor:
    y = F.gelu(F.softmax(x @ weight, dim=dim)) + F.layer_norm(x, [x.size(-1)])
    if more is not None:
        y = y * more
    if x.size(0) > 1 and len(x.shape) == 3:
        y = torch.cat([y[..., :2], F.silu(x)[..., 2:]], -1)
    else:
        y = y.cos()
    first, second = y.chunk(2, -1)
    return torch.stack([first, second]).sum(0).repeat(1, 1, 2).to(torch.float64)


def scaled(x: Tensor, by: float, times: int = 2, more: float | None = None) -> Tensor:
    y = x * by * times if isinstance(by, float) else x
    return y if more is None else y / (more / 2)


def unlike_its_code(x: Tensor) -> Tensor:
    if torch.jit.is_scripting():
        return clamp(x)
    return x.cos()


def in_dtype(x: Tensor, dtype: torch.dtype, other: torch.dtype | None = None) -> Tensor:
    return x.to(dtype) if other is None else x.to(other).sin()


def dropped(x: Tensor, training: bool) -> Tensor:
    return F.dropout(x, 0.5, training).sin()


def in_loops(x: Tensor, turns: int) -> Tensor:
    for i in range(turns):
        x = x.sin() + float(i)
    while turns < 5 and x.dim() == 3:
        x, turns = x.cos(), turns + 2
    return x * turns


def of_shapes(x: Tensor) -> Tensor:
    sizes = x.shape[:-1]
    y = x.reshape(sizes + [2, 2]).flatten(-2) * max(x.size(0), 3)  # noqa: RUF005
    return y.view([x.size(0)] + sizes[1:] + [4]) + x.view([1] * 2 + list(x.shape))[0, 0]  # noqa: RUF005


def with_literals(x: Tensor) -> Tensor:
    y = x * torch.tensor([0.1, 2.0, 3.0, 4.0], dtype=torch.float64)
    return y * torch.tensor(3) + torch.tensor([True, False, True, False])


def changing_lists(x: Tensor, given: list[Tensor]) -> Tensor:
    given.append(x.sin())
    parts = [x]
    same = parts
    for i in range(3):
        parts.append(parts[-1].cos() * float(i))
    parts.extend([x * x, x * 2.0])
    parts += given
    parts[1] = x.tanh()
    parts[-1] = parts[-1] * x
    parts.insert(0, x.exp())
    last = parts.pop()
    first = parts.pop(0)
    del parts[1]
    parts.reverse()
    places = [2, 0, 1]
    places.sort()
    places.remove(2)
    parts.append(parts[places[0]])
    sizes = [0]
    sizes.clear()
    sizes.append(x.size(-1))
    return torch.stack(same).prod(0).view([-1] + sizes) * (last + first).flatten(0, 1)  # noqa: RUF005


def in_likeness(x: Tensor) -> Tensor:
    y = torch.full_like(x, 2.0) + x.new_ones([4]) + torch.zeros_like(x, dtype=torch.float64)
    return x * y + F.group_norm(x, 5) + F.scaled_dot_product_attention(x, x, x)


def of_constants(x: Tensor) -> Tensor:
    return x * x.detach()


def checked(x: Tensor, width: int) -> Tensor:
    if x.size(-1) != width:
        raise ValueError("another width")
    return x.sin()


def decorated(function):
    @functools.wraps(function)
    def twice(x):
        return 2 * function(x)

    return twice


@decorated
def sine(x: Tensor) -> Tensor:
    return x.sin()


WEIGHT = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
BLOCKS = {
    "a number by default": (clamp, lambda f, h: f(h) * f(h, bound=3.0)),
    "lists and tuples": (mix, lambda f, h: f([h, h.sin()], WEIGHT[0])[1] @ f((h, h), WEIGHT[1])[0]),
    "functions of torch": (composed, lambda f, h: f(h, WEIGHT) + f(h, WEIGHT, h.cos(), dim=1)),
    "another branch": (composed, lambda f, h: f(h[:1], WEIGHT)),
    "an integer for a number": (scaled, lambda f, h: f(h, 3) + f(h, by=1.5, times=3, more=1)),
    "other code in Python": (unlike_its_code, lambda f, h: f(h)),
    "a decorator left out": (sine, lambda f, h: f(h)),
    "types": (in_dtype, lambda f, h: f(h, torch.float64) + f(h.sin(), 7, torch.float64)),
    "a tangent in one keyword": (clamp, lambda f, h: f(x=h)),
    "no dropout": (dropped, lambda f, h: f(h, False)),
    "loops": (in_loops, lambda f, h: f(h, 2) + f(h, 6)),
    "lists of sizes": (of_shapes, lambda f, h: f(h)),
    "literals": (with_literals, lambda f, h: f(h)),
    "lists that change": (changing_lists, lambda f, h: f(h, [h.cos(), h])),
    "new tensors": (in_likeness, lambda f, h: f(h)),
}


@pytest.fixture
def h():
    torch.manual_seed(0)
    return torch.randn(2, 5, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_value_is_the_interpreter_s_and_the_rest_follows(h, name, monkeypatch):
    function, block = BLOCKS[name]
    script = torch.jit.script(function)
    monkeypatch.setitem(globals(), "clamp", torch.cos)  # it was compiled with another
    out, _ = fused_jvp(lambda x: block(script, x), h, torch.ones_like(h))
    torch.testing.assert_close(out, block(script, h), **CLOSE)
    assert_matches_differences(lambda x: block(script, x), h)


def test_a_list_that_a_caller_hands_over_stays_his(h):
    script, given = torch.jit.script(changing_lists), [h.cos()]
    fused_jvp(lambda x: script(x, given), h, torch.ones_like(h))
    assert len(given) == 1


def test_weights_get_their_gradients(h):
    weight = WEIGHT.clone().requires_grad_()
    script = torch.jit.script(composed)
    v = torch.randn_like(h)
    found, expected = (
        torch.autograd.grad(fused_jsrr(lambda x, f=f: f(x, weight), h, v=v), weight)[0]
        for f in (script, composed)
    )
    torch.testing.assert_close(found, expected, rtol=BLOCK, atol=BLOCK)


def test_traced_and_loaded_functions_do_what_they_do(h):
    traced = torch.jit.trace(composed, (h, WEIGHT))
    source = "def twice(x, y):\n    return (x * y).sin() + x\n"
    loaded = torch.jit.CompilationUnit(source).twice
    for block in (lambda x: traced(x, WEIGHT), lambda x: loaded(x, x)):
        out, _ = fused_jvp(block, h, torch.ones_like(h))
        torch.testing.assert_close(out, block(h), **CLOSE)
        assert_matches_differences(block, h)


def test_what_is_detached_is_a_constant(h):
    out, tangent = fused_jvp(torch.jit.script(of_constants), h, torch.ones_like(h))
    torch.testing.assert_close(out, h * h, **CLOSE)
    torch.testing.assert_close(tangent, h, **CLOSE)


@pytest.mark.parametrize("steps", [1, 3])
def test_dropout_is_that_of_the_function(h, steps):
    def drawn(function):
        torch.manual_seed(2)
        return fused_jsrr(lambda x: function(x, True), h, power_steps=steps), torch.rand(3)

    (loss, after), (expected, then) = drawn(torch.jit.script(dropped)), drawn(dropped)
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert torch.equal(after, then)


def test_without_a_tangent_it_is_interpreted(h, monkeypatch):
    script, before = torch.jit.script(clamp), torch.jit.ScriptFunction.__call__
    monkeypatch.setattr("stars_fast.dual.scripts._run", None)
    constant = torch.ones(4, dtype=torch.float64)
    fused_jsrr(lambda x: x * script(constant), h)
    with pytest.raises(TypeError, match="not callable"):
        fused_jsrr(script, h)
    assert torch.jit.ScriptFunction.__call__ is before
    torch.testing.assert_close(script(h), clamp(h))


# -- what is refused


def in_place(x: Tensor) -> Tensor:
    y = x.sin()
    y.mul_(2.0)
    return y


def removing(parts: list[Tensor], x: Tensor) -> Tensor:
    parts.remove(x)
    return x


def drawing(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


@torch.jit.ignore
def note(x: Tensor) -> Tensor:
    return x


def reading(x: Tensor) -> Tensor:
    return x * float(x.mean())


def calling_python(x: Tensor) -> Tensor:
    return note(x).sin()


class Named(NamedTuple):
    x: Tensor
    by: float


def of_a_tuple(held: Named) -> Tensor:
    return held.x * held.by


@torch.jit.script
@dataclass
class Holder:
    x: Tensor
    by: float


def of_a_holder(held: Holder) -> Tensor:
    return held.x * held.by


@pytest.mark.parametrize(
    ("function", "block", "message"),
    [
        (in_place, lambda f, h: f(h), "writes into a tensor or a list by aten::mul_"),
        (removing, lambda f, h: f([h], h), "writes into a tensor or a list by aten::remove"),
        (drawing, lambda f, h: f(h), "draws random numbers by aten::rand_like"),
        (reading, lambda f, h: f(h), "makes a number of a tensor with a tangent by aten::Float"),
        (calling_python, lambda f, h: f(h), "has a "),
        (scaled, lambda f, h: f(h, h.sum()), "takes float as by and was given a tensor with a"),
        (scaled, lambda f, h: f(h, "1.5"), "takes float as by and was given str"),
        (scaled, lambda f, h: f(h, 1.5, 2.5), "takes int as times and was given float"),
        (mix, lambda f, h: f(h, WEIGHT[0]), r"takes List\[Tensor\] as parts and was given a tens"),
        (of_a_tuple, lambda f, h: f(Named(h, 2.0)), "as held and was given Named"),
        (of_a_holder, lambda f, h: f(Holder(h, 2.0)), "failed on a tensor with a tangent inside"),
    ],
)
def test_what_is_not_followed_is_named(h, function, block, message):
    script = torch.jit.script(function)
    with pytest.raises(RuntimeError, match=f"stars_fast: {function.__name__} of .*{message}"):
        fused_jsrr(lambda x: block(script, x), h)


def test_mistakes_and_errors_are_the_call_s_own(h):
    script = torch.jit.script(checked)
    fused_jsrr(lambda x: script(x, 4), h)
    with pytest.raises(RuntimeError, match="another width"):
        fused_jsrr(lambda x: script(x, 5), h)
    for given in ((), (4, 4)):
        with pytest.raises(
            TypeError, match=r"checked: (argument width is missing|expected argume)"
        ):
            fused_jsrr(lambda x, given=given: script(x, *given), h)
    with pytest.raises(RuntimeError, match="size of tensor") as error:
        fused_jsrr(lambda x: x * torch.jit.script(clamp)(torch.ones(2)) * torch.ones(3), h)
    assert "stars_fast" not in str(error.value)


def test_modules_are_refused(h):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    for block in (torch.jit.script(model), torch.jit.trace(model, h)):
        for call in (block, lambda x, block=block: block(2 * x)):
            with pytest.raises(RuntimeError, match=r"stars_fast: .* is a module of TorchScript"):
                fused_jsrr(call, h)

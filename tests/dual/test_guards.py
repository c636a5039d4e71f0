"""A tangent never goes missing in silence: in-place writes, constants, foreign functions."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_dual_matches
from torch import nn
from torch.utils.checkpoint import checkpoint

from stars_fast import Dual, explain, fused_jsrr, fused_jvp, recognition, spectral_radius
from stars_fast.dual.dual_pass import dual_pass
from stars_fast.dual.registry import RULES
from stars_fast.dual.rules.refused import REFUSED


def state(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(*shape):
    return Dual(state(2, *shape))


def check(f, *shape):
    h = state(*shape).requires_grad_()
    run = lambda stack: dual_pass(f, stack, (), {})  # noqa: E731
    assert_dual_matches(run, f, h, state(*shape, seed=4), [h])


# -- in place


def written(f):
    """Each in-place form works on a copy, as a block would."""

    def block(h):
        x = h * 1.0
        f(x)
        return x.sin()

    return block


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(x.clone().sin()),
        lambda x: x.add_(2.0, alpha=3),
        lambda x: x.sub_(x.clone().cos()),
        lambda x: x.mul_(x.clone().sin()),
        lambda x: x.mul_(3.0),
        lambda x: x.div_(x.clone().square() + 1),
        lambda x: x.exp_(),
        lambda x: x.neg_(),
        lambda x: x.clamp_(-0.5, 0.5),
        lambda x: x.copy_(x.flip(0)),
        lambda x: x.masked_fill_(x > 0, 0.5),
        lambda x: x.zero_(),
        lambda x: F.silu(x, inplace=True),
        lambda x: F.relu(x, inplace=True),
        lambda x: x[0].add_(x[1]),
        lambda x: x[:, 1:].mul_(2.0),
        lambda x: x.view(-1)[3:].add_(x.view(-1)[:-3].clone()),
        lambda x: x.transpose(0, 1)[2].tanh_(),
        lambda x: x.__setitem__((0, slice(None)), x[1] * 2),
        lambda x: x.__setitem__(torch.tensor([2, 0]), x[:2].clone().cos()),
        lambda x: x.__setitem__(x > 0, 1.0),
    ],
)
def test_in_place_ops_are_right_through_views(write):
    check(written(write), 3, 4)


def test_augmented_assignment():
    def block(h):
        x = h.clone()
        x += h.sin()
        x *= h.cos()
        x -= 1
        x /= 2
        return x

    check(block, 3, 4)


def test_a_plain_tensor_can_not_receive_a_tangent():
    buffer = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="in-place copy_ would write"):
        buffer.copy_(pair(3, 4))
    with pytest.raises(RuntimeError, match="__setitem__"):
        buffer[0] = pair(4)
    with pytest.raises(RuntimeError, match="add_ would write"):
        buffer.add_(pair(3, 4))
    with pytest.raises(RuntimeError, match="index_add_ would write"):
        buffer.index_add_(0, torch.tensor([0, 1]), pair(2, 4))
    with pytest.raises(RuntimeError, match=r"out=\.\.\."):
        torch.logcumsumexp(pair(3, 4), 0, out=buffer)


def test_a_write_through_a_view_without_a_rule_is_refused(monkeypatch):
    monkeypatch.delitem(RULES, torch.view_as_complex)
    x = pair(2, 4, 2)
    view = torch.view_as_complex(x)
    with pytest.raises(RuntimeError, match="shares memory through 'view_as_complex'"):
        view.add_(1)
    with pytest.raises(RuntimeError, match="shares memory through 'view_as_complex'"):
        x.mul_(2)


# -- values


def test_control_flow_sees_the_primal():
    x = pair(3, 4)
    assert torch.equal(x > 0, x.primal > 0)
    assert bool(x[0, 0] > 0) == bool(x.primal[0, 0] > 0)
    assert x[0, 0].item() == x.primal[0, 0].item()
    assert x.shape == (3, 4)
    assert x.size(-1) == 4
    assert x.dim() == x.ndim == 2
    assert x.numel() == 12
    assert len(x) == 3
    assert x.dtype == torch.float64
    assert isinstance(x, torch.Tensor)
    assert torch.equal(x.argmax(-1), x.primal.argmax(-1))


def test_detach_gives_a_constant_as_under_torch_func():
    check(lambda h: h * h.detach().sin(), 3, 4)


def under(mode, function, write=False):
    """`x * function(x)`, the second factor computed in a region of a mode."""

    def block(x):
        y = x.square()
        with mode():
            if write:
                function(y)
            else:
                y = function(y)
        return x * y.clone()

    return block


@pytest.mark.parametrize("write", [False, True], ids=["", "write"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_regions_without_gradients_have_the_tangents_of_forward_mode(mode, write):
    """It goes through `no_grad`, other than a double backward, and stops at `inference_mode`."""
    function = (lambda y: y.mul_(3).add_(1)) if write else (lambda y: (y.sin() + y) * y)
    block, h, v = under(mode, function, write), state(3, 4), state(3, 4, seed=4)
    expected = torch.func.jvp(block, (h,), (v,))
    for run in (contextlib.nullcontext(), recognition(False)):
        with run:
            for mine, theirs in zip(fused_jvp(block, h, v), expected, strict=True):
                torch.testing.assert_close(mine, theirs)


def test_weights_used_without_gradients_get_none():
    weight = state(4, 4, seed=5).requires_grad_()
    block = under(torch.no_grad, lambda y: y @ weight)
    loss = fused_jsrr(lambda x: block(x) @ weight.mT, state(2, 3, 4), v=state(2, 3, 4, seed=4))
    (found,) = torch.autograd.grad(loss, weight)
    held = weight.detach().clone()
    block = under(contextlib.nullcontext, lambda y: y @ held)
    loss = fused_jsrr(lambda x: block(x) @ weight.mT, state(2, 3, 4), v=state(2, 3, 4, seed=4))
    torch.testing.assert_close(found, torch.autograd.grad(loss, weight)[0])


def test_what_waits_before_a_region_of_inference_mode_keeps_its_gradient():
    weight = state(4, 4, seed=5).requires_grad_()

    def block(x):
        y = (x @ weight).pow(2)
        with torch.inference_mode():
            y.sum().item()
        return y.mean(-1, keepdim=True) * x

    def gradient():
        return torch.autograd.grad(fused_jvp(block, state(3, 4), state(3, 4))[1].sum(), weight)[0]

    with recognition(False):
        expected = gradient()
    torch.testing.assert_close(gradient(), expected)


def test_overloads_of_aten_that_give_constants():
    for detach in (torch.ops.aten.detach, torch.ops.aten.detach.default):
        dual = pair(3)
        assert torch.equal(detach(dual), dual.primal)
    for like in (torch.ops.aten.zeros_like, torch.ops.aten.zeros_like.default):
        check(lambda h, like=like: like(h).copy_(h.sin()) * h, 3, 4)
    check(lambda h: h * h + torch.ops.aten.new_full(h, (4,), 2.0), 3, 4)


def test_a_block_that_forgets_h_is_an_error():
    with pytest.raises(TypeError, match="constant tensor"):
        fused_jsrr(lambda h: h.detach() * 2, state(2, 3, 4))
    with pytest.raises(TypeError, match="got NoneType"):
        fused_jsrr(lambda h: None, state(2, 3, 4))


def test_leaving_through_the_back_door_is_an_error():
    x = pair(3)
    with (
        pytest.raises(RuntimeError, match="below its rules"),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        torch.sin(x)
    with pytest.raises(RuntimeError, match="data_ptr"):
        x.data_ptr()
    with pytest.raises(RuntimeError, match="backward"):
        x.sum().backward()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(x)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(x.pow(2))  # it waits
    with pytest.raises(RuntimeError, match="deep-copied"):
        __import__("copy").deepcopy(x)


# -- foreign functions


class Cube(torch.autograd.Function):
    """With a forward derivative."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad

    @staticmethod
    def jvp(ctx, x_dot):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * x_dot


class Opaque(torch.autograd.Function):
    """Without one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_custom_function_with_a_jvp_is_exact():
    check(lambda h: Cube.apply(h.sin()) * h, 3, 4)
    assert "Cube" in explain(lambda h: Cube.apply(h), state(3, 4)).fallbacks


class Rounding(torch.autograd.Function):
    """x^3 and, as a constant, x rounded."""

    @staticmethod
    def forward(x):
        return x**3, x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        return 3 * ctx.saved_tensors[0] ** 2 * grad

    @staticmethod
    def jvp(ctx, x_dot):
        return 3 * ctx.saved_tensors[0] ** 2 * x_dot, None


def test_what_a_custom_function_marks_is_a_constant():
    def block(h):
        cube, rounded = Rounding.apply(h)
        assert type(rounded) is torch.Tensor
        return cube * rounded

    check(block, 3, 4)
    check(lambda h: h * Rounding.apply(h)[1], 3, 4)


class Weighted(torch.autograd.Function):
    """x^3 w, and x rounded, whose backward hands the gradient on."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x**3 * w, x.round()

    @staticmethod
    def backward(ctx, grad, through):
        x, w = ctx.saved_tensors
        return 3 * x**2 * w * grad + through, (x**3 * grad).sum_to_size(w.shape)


class Rooted(torch.autograd.Function):
    """exp of a multiple, which keeps its output, and a mask in the type of numbers."""

    @staticmethod
    def forward(ctx, x, factor):
        y = (factor * x).exp() * (x > 0).to(x.dtype)
        ctx.mask, ctx.factor = (x > 0).to(x.dtype), factor
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * ctx.factor * ctx.mask * grad, None


def test_a_custom_function_without_one_has_the_derivative_of_its_backward():
    weight = torch.linspace(0.5, 2.0, 4, dtype=torch.float64, requires_grad=True)

    def written_out(x):
        rounded = x + (x.round() - x).detach()
        return (x**3 * weight).sin() * rounded

    def block(x):
        cubes, rounded = Weighted.apply(x, weight)
        return cubes.sin() * rounded

    h, v = state(3, 4).requires_grad_(), state(3, 4, seed=4)
    results = []
    for f in (block, written_out):
        y, jv = fused_jvp(f, h, v)
        results.append((y, jv, *torch.autograd.grad((y * jv.sin()).sum(), (h, weight))))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert "Weighted" in explain(block, h).fallbacks


def test_a_custom_function_may_keep_its_output_and_a_mask():
    factor = torch.tensor(0.7, dtype=torch.float64)
    h, v = state(3, 4).requires_grad_(), state(3, 4, seed=4)
    results = []
    for f in (
        lambda x: Rooted.apply(x, factor),
        lambda x: (factor * x).exp() * (x > 0).to(x.dtype),
    ):
        jv = fused_jvp(f, h, v)[1]
        results.append((jv, torch.autograd.grad(jv.square().sum(), h)[0]))
    torch.testing.assert_close(*results)


def keeping(ctx, x):
    ctx.save_for_backward(x.cos())
    return x.sin()


def keeping_in_a_list(ctx, x):
    ctx.parts = {"cos": [x.cos()]}
    return x.sin()


def keeping_a_number(ctx, x):
    ctx.largest = x.abs().max().item()
    return x / x.abs().max()


def writing(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(3)


def outside(ctx, x):
    ctx.weight = OUTSIDE
    return x * OUTSIDE


OUTSIDE = torch.ones(4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("forward", "backward", "reason"),
    [
        (
            lambda ctx, x: x.clone(),
            torch.autograd.function.once_differentiable(lambda ctx, g: g),
            "a part without torch",
        ),
        (lambda ctx, x: x.clone(), lambda ctx, g: g.detach() * 1, "not made of torch functions"),
        (lambda ctx, x: x * 3, lambda ctx, g: g + 2 * g.detach(), "a part without torch"),
        (keeping, lambda ctx, g: ctx.saved_tensors[0] * g, "computed on the way"),
        (keeping_in_a_list, lambda ctx, g: ctx.parts["cos"][0] * g, "computed on the way"),
        (keeping_a_number, lambda ctx, g: g / ctx.largest, "computed on the way"),
        (outside, lambda ctx, g: ctx.weight * g, "none of its arguments"),
        (lambda ctx, x: x * OUTSIDE, lambda ctx, g: OUTSIDE * g, "none of its arguments"),
        (lambda ctx, x: x.clone(), lambda ctx, g: g.clamp(-1, 1), "not linear"),
        (lambda ctx, x: x.clone(), lambda ctx, g: g.clamp(-100, 100), "not linear"),
        (lambda ctx, x: x.clone(), lambda ctx, g: g.relu(), "not linear"),
        (lambda ctx, x: x.clone(), lambda ctx, g: g.abs(), "not linear"),
        (lambda ctx, x: x.clone(), lambda ctx, g: g / g.norm().detach(), "not linear"),
        (lambda ctx, x: x.clone(), lambda ctx, g: g * torch.rand_like(g), "not linear"),
        (lambda ctx, x: x.clone(), lambda ctx, g: g + 1e-5, "not linear"),
        (writing, lambda ctx, g: 3 * g, "writes into its arguments"),
    ],
    ids=[
        "once", "detached", "in part", "an intermediate result", "one in a list", "a number",
        "a weight from outside", "a global weight", "clipping", "clipping of what is large",
        "half", "absolute", "a norm", "a draw", "a penalty", "dirty",
    ],
)  # fmt: skip
def test_a_custom_function_without_one_is_named(forward, backward, reason):
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    cls = type("Without", (torch.autograd.Function,), parts)
    with pytest.raises(RuntimeError, match=f"Without has no `jvp`.*{reason}.*; define a `jvp`"):
        fused_jsrr(lambda h: cls.apply(h), state(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "backward",
    [
        lambda ctx, g: g.clamp(-1, 1),
        lambda ctx, g: g * (1 / (g.norm() + 1e-6)).clamp(max=1),
        lambda ctx, g: g / (g.detach().norm() + 1e-6),
        lambda ctx, g: g + g.detach(),
        lambda ctx, g: g.relu(),
    ],
    ids=["clip", "clip the norm", "over the norm", "in part", "half"],
)
def test_a_large_one_hides_nothing_among_its_elements(backward, dtype):
    parts = {"forward": lambda ctx, x: 2 * x, "backward": backward}
    cls = type("Without", (torch.autograd.Function,), parts)
    with pytest.raises(RuntimeError, match=r"Without has no `jvp`.*(not linear|a part)"):
        fused_jvp(lambda x: cls.apply(x), *(state(128, 256, seed=i).to(dtype) for i in (3, 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_that_is_kept_moves_in_every_dtype(dtype):
    parts = {"forward": keeping_a_number, "backward": lambda ctx, g: g / ctx.largest}
    cls = type("Without", (torch.autograd.Function,), parts)
    h = state(3, 4).to(dtype).requires_grad_()
    with pytest.raises(RuntimeError, match=r"Without has no `jvp`.*computed on the way"):
        fused_jvp(lambda x: cls.apply(x), h, state(3, 4, seed=4).to(dtype))


class Clipped(torch.autograd.Function):
    """With a mask of the dtype of its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(((x > -1) & (x < 1)).to(x.dtype))
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Paired(torch.autograd.Function):
    """With nothing, a number and integers beside its output."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x.sin(), None, 3, x.argmax()

    @staticmethod
    def backward(ctx, grad, *_):
        return ctx.saved_tensors[0].cos() * grad


class PairedWithJvp(Paired):
    @staticmethod
    def jvp(ctx, x_dot):
        return ctx.saved_tensors[0].cos() * x_dot, None, None, None


@pytest.mark.parametrize("cls", [Paired, PairedWithJvp])
def test_outputs_that_are_no_tensors_stay_what_they_are(cls):
    def block(x):
        y, nothing, three, place = cls.apply(x)
        assert nothing is None
        assert three == 3
        return y * (three + int(place))

    h, v = state(3, 4), state(3, 4, seed=4)
    factor = 3 + int(h.argmax())
    torch.testing.assert_close(fused_jvp(block, h, v)[1], h.cos() * v * factor)


def test_a_custom_function_in_inference_mode_is_a_constant():
    """As are torch's own functions there."""

    def block(x):
        with torch.inference_mode():
            factor = Rooted.apply(x, 1.0) + x.sin()
        return x * factor.clone()

    h, v = state(3, 4), state(3, 4, seed=4)
    expected = v * (h.exp() * (h > 0) + h.sin())
    torch.testing.assert_close(fused_jvp(block, h, v)[1], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_mask_that_some_element_is_at_the_edge_of(dtype):
    for seed in range(10):
        h, v = (state(64, 64, seed=100 + 2 * seed + i).to(dtype) for i in (0, 1))
        found = fused_jvp(lambda x: Clipped.apply(x), h, v)[1]
        torch.testing.assert_close(found, v * (h.abs() < 1))


def test_the_backward_that_stands_for_a_derivative_runs_as_often_as_the_guide_says():
    runs = []

    def backward(ctx, grad):
        runs.append(1)
        return ctx.saved_tensors[0].cos() * grad

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    cls = type("Without", (torch.autograd.Function,), {"forward": forward, "backward": backward})
    jv = fused_jvp(lambda x: cls.apply(x), state(3, 4).requires_grad_(), state(3, 4, seed=4))[1]
    assert len(runs) == 4
    jv.square().sum().backward()
    assert len(runs) == 4 + 2


def test_a_number_that_is_not_finite_goes_on():
    h = state(3, 4)
    h[0, 0], h[1, 1] = torch.inf, torch.nan
    factor = torch.tensor(0.7, dtype=torch.float64)
    out, tangent = fused_jvp(lambda x: Rooted.apply(x, factor), h, torch.ones_like(h))
    expected = (factor * h).exp() * (h > 0)
    torch.testing.assert_close(out, expected, equal_nan=True)
    finite = expected.isfinite()
    torch.testing.assert_close(tangent[finite], (factor * expected)[finite])


def test_what_a_recomputed_region_cut_off_is_plain_again():
    outside, kept = state(3, 4, seed=9), []

    def part(x):
        kept.append(outside.detach())
        kept[-1].lerp_(x, 0.1)
        return x.tanh() * x.sin()

    h = state(3, 4).requires_grad_()
    jv = fused_jvp(lambda x: checkpoint(part, x, use_reentrant=False), h, state(3, 4, seed=4))[1]
    jv.square().sum().backward()
    assert len(kept) > 1
    assert all(type(each) is torch.Tensor for each in kept)


def test_a_custom_function_without_one_in_a_checkpointed_region_is_exact():
    weight = torch.linspace(0.5, 2.0, 4, dtype=torch.float64, requires_grad=True)
    h, v = state(3, 4).requires_grad_(), state(3, 4, seed=4)

    def part(x):
        return Weighted.apply(x.sin(), weight)[0] * weight

    results = []
    for f in (part, lambda x: checkpoint(part, x, use_reentrant=False)):
        jv = fused_jvp(f, h, v)[1]
        results.append((jv, *torch.autograd.grad(jv.square().sum(), (h, weight))))
    torch.testing.assert_close(*results)


def test_a_custom_function_whose_backward_gives_nothing_has_no_derivative():
    parts = {"forward": lambda ctx, x: x * 2, "backward": lambda ctx, g: None}
    cls = type(
        "Nothing", (torch.autograd.Function,), {k: staticmethod(f) for k, f in parts.items()}
    )
    h, v = state(3, 4), state(3, 4, seed=4)
    torch.testing.assert_close(fused_jvp(lambda x: x + cls.apply(x), h, v), (3 * h, v))


def test_a_custom_function_that_takes_a_module_is_refused_before_its_backward_runs():
    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            ctx.save_for_backward(x)
            return module(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                ctx.module(x).backward(grad)
            return x.grad, None

    linear = nn.Linear(4, 4).double()
    with pytest.raises(RuntimeError, match="takes a function or a module"):
        fused_jsrr(lambda h: Region.apply(h, linear), state(2, 3, 4))
    assert linear.weight.grad is None


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_fake_quantisation_has_the_derivative_of_its_backward(per):
    """One inside the range and none outside; torch has no forward derivative of it."""
    scale = torch.full((4,), 0.1) if per == "channel" else torch.tensor([0.1])
    zero = torch.zeros(scale.shape, dtype=torch.int32)

    def block(x):
        if per == "channel":
            x = torch.fake_quantize_per_channel_affine(x, scale, zero, 1, -8, 7)
        else:
            x = torch.fake_quantize_per_tensor_affine(x, scale, zero, -8, 7)
        return x**3

    h, v = state(3, 4).float().requires_grad_(), state(3, 4, seed=4).float()
    y, jv = fused_jvp(block, h, v)
    quantised = (h.detach() / 0.1).round().clamp(-8, 7) * 0.1
    inside = (quantised - h.detach()).abs() <= 0.0501
    assert inside.any()
    assert not inside.all()
    torch.testing.assert_close(y, quantised**3)
    torch.testing.assert_close(jv, 3 * quantised**2 * inside * v)
    (grad,) = torch.autograd.grad(jv.sum(), h)
    torch.testing.assert_close(grad, 6 * quantised * inside * v)


bound_opaque, bound_cube = Opaque.apply, Cube.apply


class Opening(torch.autograd.Function):
    """Takes its tensor out of a list, an object or a closure."""

    @staticmethod
    def forward(ctx, take):
        return take().sin() * 2

    @staticmethod
    def backward(ctx, grad):
        return None


class Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xs):
        return xs[0] * 2

    @staticmethod
    def backward(ctx, grad):
        return None


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


bound_identity = Identity.apply
AROUND = {
    "no weight": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "block",
    [
        lambda h: h + bound_opaque(h),
        lambda h: bound_opaque(h.sin()).cos(),
        lambda h: h + bound_cube(h),
        lambda h: h + bound_identity(h),
        lambda h: h + Listed.apply([h]),
        lambda h: h + Opening.apply(lambda: h),
    ],
    ids=["last", "between", "with a jvp", "identity", "a list", "a closure"],
)
def test_a_function_that_a_pass_can_not_see_is_noticed(block, around):
    with AROUND[around](), pytest.raises(RuntimeError, match=r"at \S+test_guards\.py:\d+, where"):
        fused_jvp(block, state(3, 4), state(3, 4, seed=4))
    with AROUND[around](), pytest.raises(RuntimeError, match="bound before the pass"):
        spectral_radius(block, state(1, 3, 4))


def test_a_function_that_a_pass_can_not_see_is_noticed_in_checkpoints_around_and_inside():
    block, h = lambda x: x + bound_opaque(x), state(2, 3, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="bound before the pass"):
        checkpoint(lambda x: fused_jsrr(block, x), h, use_reentrant=True)
    for reentrant in (False, True):
        inside = lambda x: checkpoint(block, x, use_reentrant=reentrant)  # noqa: B023, E731
        with pytest.raises(RuntimeError, match="bound before the pass"):
            fused_jsrr(inside, h)


def test_a_pass_in_a_reentrant_checkpoint_is_exact():
    weight, h = state(4, 4, seed=5).requires_grad_(), state(2, 3, 4).requires_grad_()

    def loss(h):
        return fused_jsrr(lambda x: torch.hypot(x @ weight, x).sin(), h, v=state(2, 3, 4, seed=4))

    (expected,) = torch.autograd.grad(loss(h), weight)
    checkpoint(loss, h, use_reentrant=True).backward()
    torch.testing.assert_close(weight.grad, expected)


def test_tensors_by_keyword_reach_a_function_with_their_tangent():
    try:
        Cube.apply(x=state(3, 4))
    except TypeError:
        pytest.skip("torch 2.11 takes none")
    check(lambda h: Cube.apply(x=h.sin()) * h, 3, 4)


class Sized(torch.autograd.Function):
    """A weight for a tensor that it is told of in a list, as what gathers or offloads weights."""

    @staticmethod
    def forward(ctx, weight, told, ask):
        ask(told[0])
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.size(0), lambda x: x.shape[-1], lambda x: x.dim(), lambda x: x.ndim, len,
        lambda x: x.numel(), lambda x: x.requires_grad, lambda x: x.is_floating_point(),
        lambda x: x.is_contiguous(), lambda x: x.is_cuda, lambda x: x.stride(), lambda x: x.device,
    ],
)  # fmt: skip
def test_a_custom_function_may_ask_what_a_tensor_is(ask):
    weight = state(4, 4, seed=5).requires_grad_()
    args = state(3, 4), state(3, 4, seed=4)
    found = fused_jvp(lambda h: h.sin() @ Sized.apply(weight, [h], ask), *args)
    torch.testing.assert_close(found, fused_jvp(lambda h: h.sin() @ weight, *args))
    with pytest.raises(RuntimeError, match="met a tensor with a tangent"):
        fused_jvp(lambda h: h @ Sized.apply(weight, [h], torch.round), *args)


class Scaled(torch.autograd.Function):
    """A function of weights alone, which does more than read them."""

    @staticmethod
    def forward(ctx, weight):
        return weight.abs() + weight.tan() * 0

    @staticmethod
    def backward(ctx, grad):
        return grad


bound_scaled = Scaled.apply


def test_what_waits_may_run_in_the_forward_of_a_function_of_weights():
    weight = state(4, 4, seed=5).requires_grad_()

    def block(h):
        square = (h @ weight).pow(2)  # it waits
        return (square @ bound_scaled(weight)).sin() + square.mean(-1, keepdim=True)

    def gradient():
        return torch.autograd.grad(fused_jvp(block, state(3, 4), state(3, 4))[1].sum(), weight)[0]

    with recognition(False):
        expected = gradient()
    torch.testing.assert_close(gradient(), expected)


def test_function_apply_is_untouched_outside_a_pass():
    original = torch.autograd.Function.__dict__["apply"]
    fused_jsrr(nn.Linear(4, 4).double(), state(2, 3, 4))
    assert torch.autograd.Function.__dict__["apply"] is original
    x = torch.ones(3, requires_grad=True)
    Opaque.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@torch.library.custom_op("stars_fast_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_a_library_op_is_refused_because_torch_would_answer_zero():
    _, tangent = torch.func.jvp(twice, (torch.ones(3),), (torch.ones(3),))
    assert not tangent.any()  # why
    with pytest.raises(RuntimeError, match="stars_fast_test::twice has no forward derivative"):
        fused_jsrr(lambda h: twice(h), state(2, 3, 4))


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("segment_reduce", lambda h: torch.segment_reduce(h, "sum", lengths=torch.tensor([1, 1]))),
        (
            "embedding_bag",
            lambda h: torch.embedding_bag(h, torch.tensor([0]), torch.tensor([0]))[0],
        ),
        ("lstsq", lambda h: torch.linalg.lstsq(torch.eye(2, dtype=h.dtype), h)[0]),
        ("native_layer_norm", lambda h: torch.native_layer_norm(h, (4,), None, None, 1e-5)[0]),
        ("multi_margin_loss", lambda h: F.multi_margin_loss(h, torch.tensor([0, 1]))),
    ],
)
def test_what_torch_can_not_differentiate_is_refused_with_the_way_out(name, f):
    assert name in REFUSED
    with pytest.raises(RuntimeError, match=f"stars_fast: {name} .*; (use|write)"):
        fused_jsrr(f, state(2, 4))


def test_an_op_without_a_forward_derivative_is_named_or_has_that_of_its_backward():
    def block(h):
        return h + torch.ops.aten.native_dropout_backward(h, h > 0, 2.0)

    h, v = state(2, 4), state(2, 4, seed=4)
    torch.testing.assert_close(fused_jvp(block, h, v)[1], v + 2 * (h > 0) * v)
    scale, zero = torch.tensor([0.1]), torch.zeros(1)
    learnable = torch._fake_quantize_learnable_per_tensor_affine
    with pytest.raises(RuntimeError, match=r"_fake_quantize_learnable.* no forward derivative"):
        fused_jsrr(lambda h: learnable(h, scale, zero, -8, 7), state(2, 4).float())


def test_a_pair_needs_no_telling_that_it_requires_a_gradient():
    h, v = state(3, 4).requires_grad_(), state(3, 4, seed=4)
    _, jv = fused_jvp(lambda x: (x * x).requires_grad_() * x.requires_grad_(True), h, v)
    torch.testing.assert_close(jv, 3 * h**2 * v)
    with pytest.raises(RuntimeError, match=r"requires_grad_\(False\) .* detach"):
        fused_jvp(lambda x: (x * x).requires_grad_(False), h, v)


def test_derivatives_that_a_block_takes_are_refused_by_name():
    with pytest.raises(RuntimeError, match=r"stars_fast: torch\.autograd\.grad of .* write it out"):
        fused_jsrr(lambda h: torch.autograd.grad((h**3).sum(), h)[0], state(2, 3, 4))
    for block in (torch.func.grad(lambda h: (h**3).sum()), torch.vmap(torch.sin)):
        with pytest.raises(RuntimeError, match=r"stars_fast: .* in torch\.vmap or a transform of"):
            fused_jsrr(block, state(2, 3, 4))


def test_a_pass_inside_vmap_is_right_or_refused_by_name():
    h, v = state(1, 1, 4).expand(2, 3, 4), state(5, 2, 3, 4, seed=4)
    weight = state(4, 4, seed=8)
    found = torch.vmap(lambda v: fused_jvp(lambda x: x @ weight, h.contiguous(), v)[1])(v)
    torch.testing.assert_close(found, v @ weight)
    for block, start, message in (
        (lambda x: x * (x * x).mean(-1, keepdim=True).rsqrt(), h.contiguous(), "inside torch.vmap"),
        (lambda x: x @ weight, h, r"inside torch\.vmap, got an expanded one; call contiguous"),
        (lambda x: x.tanh() @ weight, h.contiguous(), r"a dual pass inside torch\.vmap or a trans"),
    ):
        with pytest.raises(RuntimeError, match=f"stars_fast: .*{message}"):
            torch.vmap(lambda v, f=block, start=start: fused_jvp(f, start, v)[1])(v)

    def own_error(x):
        raise RuntimeError("my setup_context is missing")

    with pytest.raises(RuntimeError, match=r"^my setup_context is missing$"):
        fused_jvp(own_error, state(2, 3), state(2, 3))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_products_with_sparse_constants_are_exact(layout):
    dense = state(5, 3, seed=8).relu()
    sparse = dense.to_sparse(layout=layout)
    with_sparse, with_dense = (
        lambda h, a=a, mm=mm: (a @ h).sin() + mm(a, h * h) + torch.mv(a, h[:, 0])[:, None]
        for a, mm in ((sparse, torch.sparse.mm), (dense, torch.mm))
    )
    check(with_dense, 3, 4)
    h, v = state(3, 4).requires_grad_(), state(3, 4, seed=4)
    for mine, theirs in zip(fused_jvp(with_sparse, h, v), fused_jvp(with_dense, h, v), strict=True):
        torch.testing.assert_close(mine, theirs)
        grads = (
            torch.autograd.grad(x.square().sum(), h, retain_graph=True) for x in (mine, theirs)
        )
        torch.testing.assert_close(*grads)


def test_sparse_weights_get_their_gradients():
    weight = state(5, 3, seed=8).relu().to_sparse().requires_grad_()
    block = lambda h: torch.sparse.mm(weight, h * h)  # noqa: E731
    fused_jvp(block, state(3, 4), state(3, 4, seed=4))[1].square().sum().backward()
    dense = weight.detach().to_dense().requires_grad_()
    fused_jvp(lambda h: dense @ (h * h), state(3, 4), state(3, 4, seed=4))[
        1
    ].square().sum().backward()
    kept = dense.detach() != 0
    torch.testing.assert_close(weight.grad.to_dense()[kept], dense.grad[kept])


def test_a_function_inside_a_recomputed_region_is_exact():
    def grads(f):
        h = state(2, 3, 4).requires_grad_()
        fused_jsrr(f, h, v=state(2, 3, 4, seed=4), detach=False).backward()
        return h.grad

    part = lambda y: Cube.apply(y.sin())  # noqa: E731
    recomputed = grads(lambda x: checkpoint(part, x, use_reentrant=False))
    torch.testing.assert_close(recomputed, grads(part))


def test_batch_norm_in_training_is_refused_and_in_eval_exact():
    norm = nn.BatchNorm1d(4).double()
    with pytest.raises(RuntimeError, match=r"call eval\(\)"):
        fused_jsrr(norm, state(2, 4))
    norm.running_var.uniform_(0.5, 2)
    check(norm.eval(), 3, 4)


@pytest.mark.parametrize("which", ["mean", "var", "both"])
@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("instance_norm", {"use_input_stats": True}),
        ("instance_norm", {"use_input_stats": False}),
        ("batch_norm", {}),  # training mode is refused as such
    ],
)
def test_running_statistics_with_a_tangent_are_refused_by_name(norm, options, which):
    def block(h):
        mean = h.mean((0, 2)) if which != "var" else torch.zeros(3).double()
        var = h.var((0, 2)) if which != "mean" else torch.ones(3).double()
        return getattr(F, norm)(h, mean, var, **options)

    expected = "running_var" if which == "var" else "running_mean"
    with pytest.raises(RuntimeError, match=f"{norm}: {expected}: expected a tensor without"):
        fused_jsrr(block, state(2, 3, 4))


def test_an_instance_norm_whose_buffer_was_set_to_what_depends_on_h():
    norm = nn.InstanceNorm1d(3, track_running_stats=True).double()

    def block(h):
        norm.running_mean = h.mean((0, 2))
        return norm(h)

    with pytest.raises(RuntimeError, match="running_mean: expected a tensor without a tangent"):
        fused_jsrr(block, state(2, 3, 4))


def test_group_norm_is_exact():
    norm = nn.GroupNorm(2, 4).double()
    h = state(3, 4, 5).requires_grad_()
    written_out = lambda x: (  # noqa: E731
        (lambda g: (g - g.mean(-1, keepdim=True)) / (g.var(-1, False, keepdim=True) + 1e-5).sqrt())(
            x.reshape(3, 2, 10)
        ).reshape(3, 4, 5)
    )
    run = lambda stack: dual_pass(norm, stack, (), {})  # noqa: E731
    assert_dual_matches(run, written_out, h, state(3, 4, 5, seed=4), [h])


# -- attention beyond the fused op


def attend(h, **kwargs):
    q, k, v = h.view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, **kwargs)


def test_a_mask_with_a_gradient_gets_it():
    bias = state(2, 5, 5, seed=8).requires_grad_()
    h = state(2, 5, 24).requires_grad_()
    f = lambda x: attend(x, attn_mask=bias)  # noqa: E731
    run = lambda stack: dual_pass(f, stack, (), {})  # noqa: E731
    assert_dual_matches(run, f, h, state(2, 5, 24, seed=4), [h, bias])


def test_a_mask_that_depends_on_h():
    check(lambda h: attend(h, attn_mask=h[:, None, :, :5].tanh()), 2, 5, 24)


def test_attention_of_grouped_heads_without_a_batch():
    def block(h):
        q, k, v = h.view(5, 8, 3).transpose(0, 1).split((4, 2, 2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    check(block, 5, 24)


@pytest.mark.parametrize("shape", [(5, 24), (3, 2, 5, 24)], ids=["2-d", "4-d-batch"])
def test_attention_of_unusual_rank(shape):
    def block(h):
        q, k, v = h.chunk(3, -1)
        if len(shape) == 4:
            q, k, v = (x.unsqueeze(2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    check(block, *shape)


def test_dropout_uses_one_mask_and_the_ordinary_draw():
    h, v = state(4, 50), state(4, 50, seed=4)
    torch.manual_seed(0)
    plain = F.dropout(h, 0.3)
    torch.manual_seed(0)
    out, jv = fused_jvp(lambda x: F.dropout(x, 0.3), h, v)
    assert torch.equal(out, plain)
    assert torch.equal(jv == 0, plain == 0)


def test_attention_dropout_is_consistent():
    h, v = state(2, 5, 24), state(2, 5, 24, seed=4)
    f = lambda x: attend(x, dropout_p=0.5)  # noqa: E731

    def value(x):
        torch.manual_seed(0)
        return fused_jvp(f, x, v)[0]

    torch.manual_seed(0)
    jv = fused_jvp(f, h, v)[1]
    numeric = (value(h + 1e-6 * v) - value(h - 1e-6 * v)) / 2e-6
    torch.testing.assert_close(jv, numeric, rtol=1e-6, atol=1e-7)


def test_heads_that_do_not_fit_are_named():
    q, k = state(1, 4, 5, 8), state(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="enable_gqa=True"):
        fused_jsrr(lambda h: F.scaled_dot_product_attention(h, k, k), q)


# -- forms of torch functions


@pytest.mark.parametrize(
    "f",
    [
        lambda h: h.sum(axis=-1, keepdims=True) * h,
        lambda h: torch.as_tensor(h).sin() + torch.as_tensor(h, dtype=torch.complex128).real,
        lambda h: h.new(h.size()).copy_(h) * h + h.new(3, 4).fill_(2.0),
        lambda h: h * torch.empty_like(h).bernoulli_((h > 0) + 0 * h),
        lambda h: h * torch.empty(3, 4).bernoulli_((h > 0) + 0 * h),
        lambda h: nn.Softmax()(h) + F.log_softmax(h[None]),
        lambda h: torch.swapaxes(h.sin(), axis0=0, axis1=1).swapaxes_(axis0=0, axis1=1) * h,
        lambda h: torch.cat(h.sin().tensor_split(indices=(1,), dim=1)[::-1], 1),
        lambda h: torch.cat(h.sin().tensor_split(sections=2, dim=1)[::-1], 1),
        lambda h: torch.split_with_sizes(h, split_sizes=[1, 3], dim=1)[1].sin(),
        lambda h: h.clone().addmm_(mat1=h[:, :3], mat2=h.sin()),
        lambda h: torch.cat((h, 2 * h), axis=0),
        lambda h: torch.mm(h, mat2=h.mT.tanh()),
        lambda h: torch.ones_like(h).expand_as(h) * h + torch.ones(4, dtype=h.dtype).expand_as(h),
        lambda h: torch.ones(3, 4).type_as(h) * h + torch.ones(3, 4).to(h) * h,
        lambda h: torch.full_like(h, 2.0).scatter_(1, torch.zeros(3, 4, dtype=torch.long), h),
        lambda h: h.new_full((3, 4), 1.0).copy_(h),
        lambda h: h.where(h > 0, 2 * h),
        lambda h: torch.cat((h, torch.tensor([[70000] * 4]))),
        lambda h: h.div(3, rounding_mode="floor") + h,
        lambda h: h.softmax(0) + torch.log_softmax(h, 0),
        lambda h: h[torch.tensor(1)] * h + h[[0, 2]].sum(),
        lambda h: torch.fft.irfft(torch.fft.rfft(h).sin() * 0.3, n=4),
        lambda h: torch.addmm(h, h, h.mT @ h, beta=0.5, alpha=2.0),
        lambda h: h.sum().softmax(0) * h + h.sum().sin(),
        lambda h: F.multi_head_attention_forward(
            h[:, None],
            h[:, None],
            h[:, None],
            4,
            2,
            torch.eye(4, dtype=h.dtype).repeat(3, 1),
            None,
            None,
            None,
            False,
            0.0,
            torch.eye(4, dtype=h.dtype),
            None,
            training=False,
        )[0][:, 0],
    ],
)
def test_unusual_forms_are_right(f):
    check(f, 3, 4)


def test_out_and_setters_and_numpy_are_refused():
    x = pair(3, 4)
    with pytest.raises(RuntimeError, match=r"out=\.\.\."):
        torch.matmul(x, x.mT, out=torch.zeros(3, 3, dtype=x.dtype))
    with pytest.raises(RuntimeError, match="setting data"):
        x.data = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="NumPy would lose it"):
        x.numpy()


def setting(name):
    def block(h):
        made = torch.zeros(3, 4, dtype=h.dtype)
        setattr(made, name, h)
        return h * made

    return block


def through_data(h):
    made = torch.zeros_like(h)
    made.data.copy_(h)
    return h * made


def through_detached(h, cut=torch.Tensor.detach):
    made = h.sin()
    cut(made).copy_(h)
    return h * made


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (setting("data"), "setting data"),
        (setting("grad"), "setting grad"),
        (lambda h: h * torch.from_dlpack(h), "__dlpack__"),
        (through_data, "into a plain tensor"),
        (through_detached, "into a plain tensor"),
        (lambda h: through_detached(h, lambda x: x.detach().data), "into a plain tensor"),
    ],
    ids=["data", "grad", "dlpack", "through data", "through detached", "cut off twice"],
)
def test_ways_around_the_rules_are_refused(block, message):
    with pytest.raises(RuntimeError, match=message):
        fused_jvp(block, state(3, 4), state(3, 4, seed=4))


class Averaging(nn.Module):
    """It keeps an average of its states, and uses what it holds by then."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("kept", state(3, 4, seed=9))
        self.write = write

    def forward(self, h):
        self.write(self.kept, h.sin())
        return h * h * self.kept.clone()


@pytest.mark.parametrize("around", ["no weight", "no_grad"])
@pytest.mark.parametrize(
    "write",
    [
        lambda kept, x: kept.data.lerp_(x, 0.1),
        lambda kept, x: kept.data.lerp_(torch.ones_like(kept), x),
        lambda kept, x: kept.detach().copy_(x),
        lambda kept, x: kept.data.mul_(0.9).add_(x, alpha=0.1).clamp_(-0.5, 0.5).mul_(x[0, 0]),
        lambda kept, x: kept[1:].data[1].copy_(x[0]),
        lambda kept, x: kept.data.__setitem__(torch.tensor([2, 0]), x[:2]),
        lambda kept, x: kept.data.index_add_(0, torch.tensor([2, 0]), x[:2]),
        lambda kept, x: kept.data.__iadd__(x),
        lambda kept, x: setattr(kept, "data", kept.data * 0.9 + x * 0.1),
    ],
    ids=[
        "lerp", "weights", "detached", "a chain", "views", "indices", "index_add", "+=", "set",
    ],
)  # fmt: skip
def test_a_write_through_data_from_outside_keeps_the_value_alone(write, around, recwarn):
    """As in eager, where neither autograd nor forward mode see it."""

    def within(kept, x):
        with AROUND[around]():
            write(kept, x)

    eager, mine = Averaging(within), Averaging(within)
    h, v = state(3, 4).requires_grad_(), state(3, 4, seed=4)
    expected = eager(h)
    constant = eager.kept.clone()
    y, jv = fused_jvp(mine, h, v)
    assert torch.equal(mine.kept, eager.kept)
    assert type(mine.kept) is torch.Tensor
    assert not mine.kept.requires_grad
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(jv, 2 * h * v * constant)
    (found,) = torch.autograd.grad(jv.square().sum(), h)
    torch.testing.assert_close(found, 8 * h * (v * constant).square())
    assert not recwarn.list


@pytest.mark.parametrize("around", ["no weight", "no_grad"])
@pytest.mark.parametrize(
    "read",
    [
        lambda cut, row: cut,
        lambda cut, row: cut.clone(),
        lambda cut, row: row,
        lambda cut, row: cut[0],
    ],
    ids=["factor", "copy", "an older view", "a view"],
)
def test_what_was_cut_off_is_not_read_after_such_a_write(read, around):
    """In eager it has a derivative there."""
    outside = state(3, 4, seed=9)

    def block(h):
        cut = outside.data
        row = cut[1]
        with AROUND[around]():
            cut.copy_(h)
        assert cut.shape == (3, 4)
        return h * read(cut, row)

    with pytest.raises(RuntimeError, match="after a value with a tangent was written there"):
        fused_jvp(block, state(3, 4), state(3, 4, seed=4))
    expected = state(3, 4, seed=4) * state(3, 4)
    found = fused_jvp(
        lambda h: (outside.data.copy_(h), h * outside)[1], state(3, 4), state(3, 4, seed=4)
    )[1]
    torch.testing.assert_close(found, expected)


def test_what_was_cut_off_is_a_plain_tensor_after_the_pass():
    """Also where someone keeps it, and where the block failed."""
    outside, kept = state(3, 4, seed=9), []

    def writing(h):
        kept.append(outside.detach())
        kept[-1].copy_(h)
        return h * 2.0

    fused_jvp(writing, state(3, 4), state(3, 4, seed=4))
    with pytest.raises(RuntimeError, match="after a value with a tangent was written there"):
        fused_jvp(lambda h: writing(h) * kept[-1], state(3, 4), state(3, 4, seed=4))
    for each in kept:
        assert type(each) is torch.Tensor
        torch.testing.assert_close(each * 1.0, state(3, 4))


def test_a_library_that_asks_for_the_module_of_a_class_finds_torch():
    found = []
    fused_jvp(lambda h: (found.append(type(h).__module__), h)[1], state(3), state(3))
    assert found[0].split(".")[0] == "torch"


def test_dimensions_that_would_hit_the_pair_are_refused():
    x = pair(3, 4)
    for f in (
        lambda: x.sum(-3),
        lambda: x.select(-3, 0),
        lambda: x.softmax(-3),
        lambda: x.transpose(-3, 0),
        lambda: x.unbind(2),
        lambda: x.permute(2, 0),
    ):
        with pytest.raises(IndexError, match="Dimension out of range"):
            f()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[torch.tensor(1)].mul_(3),
        lambda x: x.floor_(),
        lambda x: x.masked_fill_(x > 0, 1.0),
        lambda x: x.fill_(2.0),
    ],
)
def test_more_in_place_ops(write):
    check(written(write), 3, 4)


def test_random_in_place_ops_draw_what_torch_draws():
    def block(h):
        x = h * 1.0
        x[:, :2].normal_()
        return x

    torch.manual_seed(0)
    expected = block(state(3, 4))
    torch.manual_seed(0)
    out, jv = fused_jvp(block, state(3, 4), state(3, 4, seed=4))
    assert torch.equal(out, expected)
    assert not jv[:, :2].any()
    assert torch.equal(jv[:, 2:], state(3, 4, seed=4)[:, 2:]) or torch.allclose(
        jv[:, 2:], state(3, 4, seed=4)[:, 2:]
    )


@pytest.mark.parametrize("name", ["detach_", "resize_as_"])
def test_metadata_in_place_ops_are_refused(name):
    with pytest.raises(RuntimeError, match=f"no rule for in-place {name}"):
        getattr(pair(3, 3), name)(*[torch.zeros(3, 3)] * (name == "resize_as_"))


def test_a_later_write_to_an_argument_of_a_fallback_is_noticed():
    buffer = state(3, 4)
    h = state(3, 4).requires_grad_()
    loss = fused_jsrr(lambda x: torch.hypot(x, buffer), h, detach=False)
    buffer.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode_runs_fallbacks():
    with torch.inference_mode():
        inside = fused_jsrr(lambda x: torch.hypot(x, x + 1), state(2, 3, 4), v=state(2, 3, 4))
    outside = fused_jsrr(lambda x: torch.hypot(x, x + 1), state(2, 3, 4), v=state(2, 3, 4))
    torch.testing.assert_close(inside, outside)


def test_a_pass_inside_a_pass_says_so():
    with pytest.raises(RuntimeError, match="dual pass inside a dual pass"):
        fused_jsrr(lambda x: fused_jvp(torch.sin, x, x)[0], state(2, 3, 4))


@pytest.mark.parametrize(
    "use",
    [
        lambda z, x: z * z * x,
        lambda z, x: torch.cat((z, x)),
        lambda z, x: z * x.pow(2),
        lambda z, x: F.linear(z, x[0]),
        lambda z, x: z.sin() if x.exp().sum() > 0 else z,
    ],
    ids=["product", "list", "waits", "function", "alone"],
)
def test_a_pass_whose_block_uses_the_state_of_the_pass_around_it_says_so(use):
    """Its tangent would be taken for one of the inner direction."""

    def block(x):
        return x + fused_jvp(lambda z: use(z, x), x.detach(), torch.ones_like(x.detach()))[1].sum()

    with pytest.raises(RuntimeError, match="dual pass inside a dual pass"):
        fused_jvp(block, state(2, 3, 4), state(2, 3, 4, seed=4))


def test_a_pass_at_a_constant_is_one():
    h, v = state(2, 3, 4), state(2, 3, 4, seed=4)
    stack = torch.stack((h, torch.ones_like(h)))

    def block(x):
        y = x * 1.0
        square, n = y.pow(2), x.detach()  # the square waits
        _, jn = dual_pass(lambda z: (z * z).sin() * n, stack, (), {})
        y.add_(1)
        return square * jn + y

    out, jv = fused_jvp(block, h, v)
    factor = (h * h).cos() * 2 * h * h
    torch.testing.assert_close(out, h.square() * factor + h + 1)
    torch.testing.assert_close(jv, 2 * h * v * factor + v)


def test_a_pair_in_a_helper_thread_carries_its_tangent():
    from concurrent.futures import ThreadPoolExecutor

    def block(x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.sin, x * x).result()

    h, v = state(3, 4), state(3, 4, seed=4)
    torch.testing.assert_close(fused_jvp(block, h, v)[1], (h * h).cos() * 2 * h * v)


def test_functions_of_torch_may_be_replaced_at_any_time(monkeypatch):
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    h, v = state(2, 3, 4), state(2, 3, 4, seed=4)

    def block(x):
        return attention(x, x, x, need_weights=False)[0]

    def causal(q, k, v, *args, **kwargs):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def assert_alike():
        expected = block(h.clone().requires_grad_())
        torch.testing.assert_close(fused_jvp(block, h, v)[0], expected)
        return expected

    before = assert_alike()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", causal)
        assert not torch.allclose(assert_alike(), before)
    assert_alike()


def test_passes_of_two_threads_leave_nothing_behind():
    from threading import Barrier, Thread

    from torch._dynamo import eval_frame

    barrier = Barrier(2, timeout=20)

    def block(h, wait):
        barrier.wait()
        if wait:
            barrier.wait()
        return h.sin()

    def first():
        fused_jsrr(block, state(2, 3, 4), args=(False,))
        barrier.wait()

    threads = [
        Thread(target=first),
        Thread(target=fused_jsrr, args=(block, state(2, 3, 4)), kwargs={"args": (True,)}),
    ]
    before = eval_frame._stance.stance
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert eval_frame._stance.stance == before


def test_an_exception_inside_a_pass_leaves_nothing_behind():
    original = torch.autograd.Function.__dict__["apply"]

    def broken(h):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fused_jsrr(broken, state(2, 3, 4))
    assert torch.autograd.Function.__dict__["apply"] is original

"""The public functions: values, options, errors."""

import pytest
import torch
from oracle import relative_error
from torch import nn

from stars_fast import fused_jsrr, fused_jvp, spectral_radius


def state(*shape, seed=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Block(nn.Module):
    """Mixes tokens (causally) and channels; small enough for an explicit Jacobian."""

    def __init__(self, width=4):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, h, shift=None):
        past = h.cumsum(1) / torch.arange(1, h.shape[1] + 1, device=h.device)[:, None]
        x = self.out(torch.tanh(self.mix(past)))
        return h / 2 + (x if shift is None else x * shift)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().double()


def jacobian(block, h):
    """[D, D] at one sample [S, d]."""
    size = h.numel()
    return torch.func.jacfwd(lambda x: block(x[None])[0])(h).reshape(size, size)


# -- fused_jvp


def test_jvp_has_the_order_and_gradients_of_torch_func(block):
    h, v = state(2, 5, 4).requires_grad_(), state(2, 5, 4, seed=4).requires_grad_()
    leaves = [h, v, *block.parameters()]
    bars = state(2, 5, 4, seed=5), state(2, 5, 4, seed=6)
    mine, theirs = fused_jvp(block, h, v), torch.func.jvp(block, (h,), (v,))
    for a, b in zip(mine, theirs, strict=True):
        assert relative_error(a, b) <= 1e-12
    got, expected = (
        torch.autograd.grad(mine, leaves, bars),
        torch.autograd.grad(theirs, leaves, bars),
    )
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 1e-9


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e12])
def test_jvp_is_linear_in_v_at_any_size(block, size):
    h, v = state(2, 5, 4), state(2, 5, 4, seed=4)
    jv = fused_jvp(block, h, size * v)[1]
    torch.testing.assert_close(jv, size * fused_jvp(block, h, v)[1], rtol=1e-12, atol=0.0)


def test_jvp_of_a_tiny_direction_survives_fp16():
    layer = nn.Linear(64, 64).half()
    h, v = state(1, 8, 64, dtype=torch.float16), state(1, 8, 64, seed=4) * 1e-6
    v16 = v.half()  # near the smallest numbers of fp16
    jv = fused_jvp(layer, h, v16)[1]
    exact = v16.double() @ layer.weight.double().T
    assert relative_error(jv, exact) < 0.05


def test_jvp_accepts_any_output_shape_and_arguments(block):
    h, v = state(2, 5, 4), state(2, 5, 4, seed=4)
    _, jv = fused_jvp(
        lambda x, k, p=1: (x.sum((1, 2)) * k) ** p, h, v, args=(3.0,), kwargs={"p": 2}
    )
    expected = torch.func.jvp(lambda x: (x.sum((1, 2)) * 3.0) ** 2, (h,), (v,))[1]
    torch.testing.assert_close(jv, expected)


# -- fused_jsrr: what it estimates


def test_its_mean_over_seeds_is_the_mean_squared_singular_value(block):
    h = state(3, 5, 4)
    exact = torch.stack([jacobian(block, x).square().sum() / x.numel() for x in h]).mean()
    draws = torch.stack(
        [
            fused_jsrr(block, h, generator=torch.Generator().manual_seed(seed)).detach()
            for seed in range(256)
        ]
    )
    standard_error = draws.std() / 256**0.5
    assert abs(draws.mean() - exact) <= 3 * standard_error
    assert standard_error < 0.05 * exact  # the check has teeth


def test_it_is_the_squared_norm_for_a_given_direction(block):
    h, v = state(2, 5, 4), state(2, 5, 4, seed=4)
    expected = torch.stack(
        [
            (jacobian(block, x) @ d.flatten() / d.norm()).square().sum()
            for x, d in zip(h, v, strict=True)
        ]
    )
    torch.testing.assert_close(fused_jsrr(block, h, v=v), expected.mean())
    torch.testing.assert_close(fused_jsrr(block, h, v=1e-9 * v), expected.mean())


def test_many_power_steps_tend_to_the_squared_spectral_radius():
    matrix = state(4, 4)
    matrix = matrix + matrix.T  # a real dominant eigenvalue: the iterates settle
    radius = torch.linalg.eigvalsh(matrix).abs().max()
    generator = torch.Generator().manual_seed(0)
    value = fused_jsrr(lambda h: h @ matrix, state(1, 1, 4), power_steps=60, generator=generator)
    assert value.item() == pytest.approx(radius.item() ** 2, rel=1e-3)


def test_power_steps_differentiate_the_last_step_unless_asked(block):
    """In the weights and, not detached, in h, where the last step's Jacobian stands."""
    h, v = state(1, 5, 4).requires_grad_(), state(1, 5, 4, seed=4)
    leaves = [h, *block.parameters()]

    def by_hand(through):
        u = v / v.square().mean().sqrt()
        for step in range(3):
            j = fused_jvp(block, h, u)[1]
            if step < 2:
                u = j / j.square().mean().sqrt()
                u = u if through else u.detach()
        return torch.autograd.grad(j.square().mean(), leaves)

    for through in (False, True):
        options = {"power_steps": 3, "through_power_steps": through, "detach": False}
        loss = fused_jsrr(block, h, v=v, **options)
        for a, b in zip(torch.autograd.grad(loss, leaves), by_hand(through), strict=True):
            assert relative_error(a, b) <= 1e-9


def test_normalize_batch_uses_one_unit_direction(block):
    h, v = state(2, 5, 4), state(2, 5, 4, seed=4)
    v[0] *= 10
    unit = v / v.norm()
    expected = fused_jvp(block, h, unit)[1].square().sum()
    torch.testing.assert_close(fused_jsrr(block, h, v=v, normalize="batch"), expected)


# -- masks, documents, fractions


def test_pads_change_neither_loss_nor_gradient(block):
    h, v = state(2, 7, 4), state(2, 7, 4, seed=4)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 5:] = False
    weights = list(block.parameters())
    padded = fused_jsrr(block, h, v=v, mask=mask)
    short = fused_jsrr(block, h[:, :5], v=v[:, :5])
    torch.testing.assert_close(padded, short)
    for a, b in zip(
        torch.autograd.grad(padded, weights), torch.autograd.grad(short, weights), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_sample_of_pads_alone_does_not_count(block):
    h, v = state(3, 5, 4), state(3, 5, 4, seed=4)
    mask = torch.ones(3, 5)
    mask[1] = 0
    expected = fused_jsrr(block, h[[0, 2]], v=v[[0, 2]])
    torch.testing.assert_close(fused_jsrr(block, h, v=v, mask=mask), expected)
    assert fused_jsrr(block, h, mask=torch.zeros(3, 5)).item() == 0.0


def test_documents_of_a_packed_row_have_their_own_direction_and_norm():
    torch.manual_seed(0)
    tokenwise = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    h, v = state(1, 9, 4), state(1, 9, 4, seed=4)
    bounds = torch.tensor([0, 2, 2, 3, 9])  # one document is empty, one has one token
    each = [fused_jsrr(tokenwise, h[:, a:b], v=v[:, a:b]) for a, b in [(0, 2), (2, 3), (3, 9)]]
    packed = fused_jsrr(tokenwise, h, v=v, cu_seqlens=bounds)
    torch.testing.assert_close(packed, torch.stack(each).mean())
    # The last document all pads: it does not count
    pads = torch.arange(9)[None] < 3
    packed = fused_jsrr(tokenwise, h, v=v, cu_seqlens=bounds, mask=pads)
    torch.testing.assert_close(packed, torch.stack(each[:2]).mean())


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("return_output", [False, True])
def test_a_fraction_is_unbiased(packed, return_output):
    torch.manual_seed(0)
    tokenwise = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    h, v = state(4, 5, 4), state(4, 5, 4, seed=4)
    h[0] *= 5  # samples that differ much
    options = {}
    if packed:
        h, v = h.reshape(1, 20, 4), v.reshape(1, 20, 4)
        options["cu_seqlens"] = torch.arange(0, 21, 5)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        out = fused_jsrr(
            tokenwise,
            h,
            v=v,
            fraction=0.5,
            generator=generator,
            return_output=return_output,
            **options,
        )
        return (out[1] if return_output else out).detach()

    full = fused_jsrr(tokenwise, h, v=v, **options)
    draws = torch.stack([draw(seed) for seed in range(200)])
    assert draws.std() > 0
    assert abs(draws.mean() - full) <= 3 * draws.std() / 200**0.5


def test_a_fraction_cuts_the_arguments_along(block):
    h, v, shift = state(4, 5, 4), state(4, 5, 4, seed=4), state(4, 1, 4, seed=5)
    seen = []

    def watched(x, shift):
        seen.append((x.shape[0], shift.shape[0]))
        return block(x, shift)

    loss = fused_jsrr(watched, h, v=v, kwargs={"shift": shift}, fraction=0.5)
    assert seen == [(2, 2)]
    pairs = [
        torch.stack([fused_jsrr(block, h[[i]], args=(shift[[i]],), v=v[[i]]) for i in pair]).mean()
        for pair in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    ]
    assert any(torch.allclose(loss, each) for each in pairs)
    with pytest.raises(ValueError, match="can't tell whether"):
        fused_jsrr(block, state(5, 5, 4), kwargs={"shift": torch.ones(5, 5)}, fraction=0.4)


# -- gradients


def test_detach_decides_whether_h_gets_a_gradient(block):
    h, v = state(2, 5, 4).requires_grad_(), state(2, 5, 4, seed=4)
    loss = fused_jsrr(block, h, v=v)
    assert torch.autograd.grad(loss, h, allow_unused=True)[0] is None

    unit = v / v.square().mean((1, 2), keepdim=True).sqrt()
    tangent = torch.func.jvp(block, (h,), (unit,))[1]
    (expected,) = torch.autograd.grad(tangent.square().mean(), h)
    (got,) = torch.autograd.grad(fused_jsrr(block, h, v=v, detach=False), h)
    assert relative_error(got, expected) <= 1e-9


def test_the_output_comes_free_and_keeps_its_gradient(block):
    h = state(2, 5, 4).requires_grad_()
    output, loss = fused_jsrr(block, h, detach=False, return_output=True)
    torch.testing.assert_close(output, block(h))
    (got,) = torch.autograd.grad(output.sum(), h, retain_graph=True)
    (expected,) = torch.autograd.grad(block(h).sum(), h)
    torch.testing.assert_close(got, expected)
    assert loss.requires_grad


def test_an_output_that_would_lose_h_in_silence_is_an_error(block):
    h = state(2, 5, 4).requires_grad_()
    with pytest.raises(ValueError, match="detach"):
        fused_jsrr(block, h, return_output=True)
    fused_jsrr(block, h.detach(), return_output=True)
    with torch.no_grad():
        fused_jsrr(block, h, return_output=True)


def test_no_grad_gives_a_number_without_a_graph(block):
    with torch.no_grad():
        loss = fused_jsrr(block, state(2, 5, 4))
    assert not loss.requires_grad
    assert torch.isfinite(loss)


def test_a_seeded_generator_repeats(block):
    h = state(2, 5, 4)
    a, b = (fused_jsrr(block, h, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_is_fp32_for_narrower_states(block, dtype):
    loss = fused_jsrr(block.to(dtype), state(2, 5, 4, dtype=dtype), v=state(2, 5, 4, dtype=dtype))
    assert loss.dtype == torch.float32
    exact = fused_jsrr(block.double(), state(2, 5, 4), v=state(2, 5, 4))
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)


# -- errors name the argument


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"v": torch.ones(2, 5, 3, dtype=torch.float64)}, ValueError, "v: expected the shape"),
        ({"v": torch.ones(2, 5, 4)}, ValueError, "v: expected the shape, dtype"),
        ({"v": 3}, TypeError, "v: expected a tensor, got int"),
        ({"mask": torch.ones(2, 4)}, ValueError, r"mask: expected shape \[B, S\]"),
        ({"mask": [1]}, TypeError, "mask: expected a tensor"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"expected shape \[1, total, D\]"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens: expected integers, got"),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens: expected a tensor of integers, got list"),
        ({"power_steps": 0}, ValueError, "power_steps: expected an integer of at least 1, got 0"),
        ({"normalize": "row"}, ValueError, "normalize: expected 'sample' or 'batch', got 'row'"),
        ({"fraction": 0.0}, ValueError, r"fraction: expected a number in \(0, 1\], got 0.0"),
        ({"fraction": 1.5}, ValueError, "fraction"),
    ],
    ids=str,
)
def test_bad_arguments(block, options, error, message):
    with pytest.raises(error, match=message):
        fused_jsrr(block, state(2, 5, 4), **options)


def test_bad_states_and_bounds(block):
    with pytest.raises(TypeError, match=r"h: expected a floating-point tensor, got torch\.int64"):
        fused_jsrr(block, torch.ones(2, 5, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="h: expected at least 2 dimensions"):
        fused_jsrr(block, state(4))
    with pytest.raises(ValueError, match="bounds that rise from 0 to total = 5"):
        fused_jsrr(block, state(1, 5, 4), cu_seqlens=torch.tensor([0, 3, 2, 5]))
    with pytest.raises(ValueError, match="block: expected an output of h's shape"):
        fused_jsrr(lambda h: h[:, :2], state(2, 5, 4))


# -- spectral radius


@pytest.mark.parametrize("method", ["krylov", "arnoldi"])
def test_spectral_radius_is_that_of_the_explicit_jacobian(block, method):
    h = state(3, 5, 4)
    exact = torch.stack([torch.linalg.eigvals(jacobian(block, x)).abs().max() for x in h])
    found = spectral_radius(
        block, h, method=method, tol=1e-5, steps=2000, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("method", ["krylov", "arnoldi"])
def test_spectral_radius_of_a_rotation_is_its_modulus(method):
    """A complex dominant pair: no iterate ever settles, the modulus does."""
    turn = 0.9 * torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    matrix = torch.block_diag(turn, 0.3 * torch.eye(6, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    found = spectral_radius(
        lambda h: h @ matrix.T, state(2, 1, 8), method=method, generator=generator
    )
    torch.testing.assert_close(found, torch.full((2,), 0.9, dtype=torch.float64), rtol=1e-3, atol=0)


@pytest.mark.parametrize("method", ["krylov", "arnoldi"])
def test_spectral_radius_leaves_pads_out(block, method):
    h = state(2, 6, 4)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    generator = torch.Generator().manual_seed(0)
    found = spectral_radius(
        block, h, mask=mask, method=method, tol=1e-5, steps=2000, generator=generator
    )
    exact = torch.linalg.eigvals(jacobian(block, h[0, :4])).abs().max()
    assert found[0].item() == pytest.approx(exact.item(), rel=1e-3)


@pytest.mark.parametrize("method", ["krylov", "arnoldi"])
def test_spectral_radius_of_tiny_and_zero_jacobians(method):
    generator = torch.Generator().manual_seed(0)
    found = spectral_radius(lambda h: 0 * h, state(2, 1, 8), method=method, generator=generator)
    assert torch.equal(found, torch.zeros(2, dtype=torch.float64))
    found = spectral_radius(lambda h: 0.5 * h, state(2, 1, 2), method=method, generator=generator)
    torch.testing.assert_close(found, torch.full((2,), 0.5, dtype=torch.float64))


def test_spectral_radius_says_when_it_has_not_settled(block):
    with pytest.warns(RuntimeWarning, match="raise steps, or use method='arnoldi'"):
        spectral_radius(block, state(2, 5, 4), steps=3, tol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"method": "qr"}, "method"), ({"steps": 1}, "steps"), ({"tol": 0.0}, "tol")],
)
def test_spectral_radius_names_bad_arguments(block, options, message):
    with pytest.raises(ValueError, match=message):
        spectral_radius(block, state(2, 5, 4), **options)

"""Reductions into places, sampling at points, and ops on tensors with the channels last."""

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_matches_differences, randn
from torch import nn

from stars_fast import fused_jvp

INDEX = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2], [2, 0, 0, 1]])
ROWS = torch.tensor([0, 2, 0])
BASE = randn(3, 4, seed=8)
REDUCTIONS = ["sum", "mean", "amax", "amin", "prod"]


def state(*shape):
    return randn(*shape, seed=3)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_scatter_reduce(reduce, include_self):
    options = {"reduce": reduce, "include_self": include_self}
    for f in (
        lambda h: BASE.scatter_reduce(0, INDEX, h, **options),
        lambda h: BASE.scatter_reduce(-1, INDEX % 4, h, **options),
        lambda h: h.scatter_reduce(0, INDEX, BASE, **options),
        lambda h: h.scatter_reduce(0, INDEX[:2, :3], h.sin(), **options),
        lambda h: torch.scatter_reduce(h.flatten(), 0, ROWS, h[0, :3], **options),
        lambda h: (h * 1.0).scatter_reduce_(0, INDEX, h.cos(), **options),
    ):
        assert_matches_differences(f, state(3, 4))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCTIONS[1:])
def test_index_reduce(reduce, include_self):
    options = {"reduce": reduce, "include_self": include_self}
    for f in (
        lambda h: BASE.index_reduce(0, ROWS, h, **options),
        lambda h: h.index_reduce(0, ROWS, BASE, **options),
        lambda h: h.index_reduce(1, torch.tensor([3, 3]), h[:, :2].cos(), **options),
        lambda h: (h * 1.0).index_reduce_(0, ROWS, h.cos(), **options),
    ):
        assert_matches_differences(f, state(3, 4))


def test_products_with_zeros():
    """Two factors of one place vanish, and one of another."""
    source = state(3, 4)
    source[0, 0] = source[2, 2] = source[1, 0] = 0
    product = lambda h: BASE.scatter_reduce(0, INDEX, h, "prod")  # noqa: E731
    assert_matches_differences(product, source)


@pytest.mark.parametrize(
    "f",
    [
        lambda h: BASE.scatter_add(0, INDEX, h),
        lambda h: BASE.index_add(0, ROWS, h, alpha=2),
        lambda h: BASE.index_copy(0, torch.tensor([2, 0, 1]), h),
        lambda h: h.index_fill(0, torch.tensor([1]), 2.0),
        lambda h: BASE.masked_scatter(BASE > 0, h),
        lambda h: BASE.index_put((ROWS,), h, accumulate=True),
        lambda h: BASE.put(torch.tensor([0, 5]), h[0, :2]),
        lambda h: F.embedding(torch.tensor([[0, 1], [2, 0]]), h),
    ],
)
def test_other_writes_into_places(f):
    assert_matches_differences(f, state(3, 4))


GRID = 2.4 * torch.rand(2, 4, 4, 2, generator=torch.Generator().manual_seed(0)).double() - 1.2
PADDINGS = ["zeros", "border", "reflection"]


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_of_an_image(mode, padding, align_corners):
    options = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
    assert_matches_differences(lambda h: F.grid_sample(h, GRID, **options), state(2, 3, 5, 6))


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding", PADDINGS)
def test_grid_sample_at_points_that_move(padding, align_corners):
    options = {"padding_mode": padding, "align_corners": align_corners}
    image, volume = state(2, 3, 5, 6), state(2, 3, 4, 5, 3)
    points = 1.2 * state(2, 2, 2, 2, 3).tanh()
    assert_matches_differences(lambda h: F.grid_sample(image, h, **options), GRID)
    assert_matches_differences(lambda h: F.grid_sample(volume, h, **options), points)
    both = lambda h: F.grid_sample(h, h[:, :2].permute(0, 2, 3, 1).tanh(), **options)  # noqa: E731
    assert_matches_differences(both, image)


def test_a_cubic_grid_that_moves_is_refused():
    image = state(2, 3, 5, 6)
    with pytest.raises(RuntimeError, match="use mode='bilinear'"):
        fused_jvp(lambda h: F.grid_sample(image, h, mode="bicubic"), GRID, GRID)


def test_affine_grid():
    f = lambda h: F.affine_grid(h.view(2, 2, 3), [2, 3, 4, 4], align_corners=False)  # noqa: E731
    assert_matches_differences(f, state(2, 6))


# -- channels last


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


torch.manual_seed(0)
CONV = nn.Conv2d(3, 4, 3, padding=1).double().to(memory_format=torch.channels_last)
GROUPS = nn.GroupNorm(2, 4).double()
BATCHES = nn.BatchNorm2d(4).double().eval()
BATCHES.running_mean.normal_()
BATCHES.running_var.uniform_(0.5, 2)


@pytest.mark.parametrize(
    "f",
    [
        lambda h: GROUPS(CONV(last(h))),
        lambda h: GROUPS(CONV(h)),
        lambda h: GROUPS(CONV(last(h))).relu_(),
        lambda h: F.conv2d(GROUPS(CONV(last(h))), torch.ones(3, 4, 1, 1, dtype=h.dtype)),
        lambda h: F.group_norm(h.transpose(1, 2).reshape(2, 5, 18).transpose(1, 2), 3),
        lambda h: F.instance_norm(last(h)),
        lambda h: BATCHES(CONV(last(h))),
        lambda h: F.interpolate(CONV(last(h)), scale_factor=2, mode="bilinear"),
        lambda h: F.interpolate(last(h), scale_factor=2.3, mode="bicubic"),
        lambda h: F.interpolate(last(h), scale_factor=2),
        lambda h: F.max_pool2d(CONV(last(h)), 2),
        lambda h: F.avg_pool2d(last(h), 2),
        lambda h: F.adaptive_avg_pool2d(last(h), 2),
        lambda h: F.adaptive_max_pool2d(last(h), 2),
        lambda h: F.layer_norm(last(h), (5, 6)),
        lambda h: last(h).softmax(1),
        lambda h: last(h).log_softmax(1),
        lambda h: F.pixel_shuffle(last(h.repeat(1, 4, 1, 1)), 2),
        lambda h: F.unfold(last(h), 2),
        lambda h: F.pad(last(h), (1, 1, 1, 1), mode="reflect"),
        lambda h: F.prelu(last(h), torch.tensor([0.1, 0.2, 0.3]).to(h)),
        lambda h: F.conv_transpose2d(last(h), torch.ones(3, 2, 2, 2, dtype=h.dtype)),
        lambda h: CONV(last(h)).flatten(1),
        lambda h: CONV(last(h)).mean((2, 3)),
    ],
)
def test_channels_last(f):
    assert_matches_differences(f, state(2, 3, 5, 6))


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (2, 4, 2, 3, 4)], ids=["2d", "3d"])
def test_group_norm_keeps_the_channels_last(shape):
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    strides = []

    def block(h):
        y = F.group_norm(h.contiguous(memory_format=form), 2)
        strides.append(y.stride())
        return y.contiguous()

    h = state(*shape)
    block(h)
    fused_jvp(block, h, h)
    assert strides[0] == strides[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_running_statistics_are_updated_once(kind, momentum, dtype):
    shape = {nn.InstanceNorm1d: (5,), nn.InstanceNorm2d: (5, 2), nn.InstanceNorm3d: (5, 2, 3)}[kind]
    h = state(2, 3, *shape).to(dtype)
    options = {"momentum": momentum, "affine": True, "track_running_stats": True}
    norms = [kind(3, **options).to(dtype) for _ in range(2)]
    for _ in range(2):
        norms[0](h)
        fused_jvp(norms[1], h, h)[1].sum().backward()
    for mine, theirs in zip(norms[1].buffers(), norms[0].buffers(), strict=True):
        assert torch.equal(mine, theirs)
    norms[1].eval()
    if dtype == torch.float64:
        assert_matches_differences(norms[1], h)


@pytest.mark.parametrize("options", [{}, {"dim": 0}, {"dim": -1, "keepdim": True}], ids=str)
def test_both_ends(options):
    def block(h):
        ends = torch.aminmax(h, **options)
        return h.sin() * ends.max - h * ends[0]

    assert_matches_differences(block, randn(4, 4))

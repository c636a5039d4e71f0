"""FLOPs and bytes against counts written by hand."""

import torch
import torch.nn.functional as F

from benchmarks.counting import count
from stars_fast import ops

ROWS, IN, OUT = 3, 4, 5
PRODUCT = 2 * ROWS * IN * OUT


def attention_inputs(*shape):
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def test_a_linear_layer_forward():
    x, w = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    flops, moved = count(lambda: F.linear(x, w))
    assert flops == PRODUCT
    assert moved == 4 * (ROWS * IN + IN * OUT + ROWS * OUT)  # fp32, each tensor once


def test_a_linear_layer_backward():
    x = torch.randn(ROWS, IN, requires_grad=True)
    w = torch.randn(OUT, IN, requires_grad=True)
    assert count(lambda: F.linear(x, w).sum().backward()).flops == 3 * PRODUCT
    assert count(lambda: F.linear(x.detach(), w).sum().backward()).flops == 2 * PRODUCT


def test_views_are_free():
    x = torch.randn(ROWS, IN)
    assert count(lambda: x.t()[1:].reshape(-1, 1).detach().unbind(0)) == (0, 4 * 2 * 9)  # one copy


def test_causal_attention_counts_half_the_square():
    batch, heads, length, width = 2, 3, 64, 16
    q, k, v = attention_inputs(batch, heads, length, width)
    product = 2 * batch * heads * length**2 * width // 2
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)).flops == (
        2 * product
    )
    assert count(lambda: out.sum().backward()).flops == 5 * product


def test_dual_attention_has_three_times_the_products():
    shape = 2, 3, 64, 16
    q, k, v = attention_inputs(*shape)
    plain = count(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward()).flops
    assert plain == 7 * 2 * 2 * 3 * 64**2 * 16
    q, k, v = attention_inputs(2, *shape)
    assert count(lambda: ops.attention(q, k, v).sum().backward()).flops == 3 * plain

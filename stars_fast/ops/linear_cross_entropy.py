"""Cross entropy of a linear head, chunk by chunk, without the logits of all tokens.

With z_i = W h_i, lse_i = log sum exp(z_i), nll_i = lse_i - z_i[y_i] and count n:
    loss = sum_i w_i nll_i / n
    g_i  = w_i (softmax(z_i) - onehot(y_i))
    h_bar_i = g_i W / n        W_bar = sum_i g_i h_i^T / n        w_bar_i = nll_i / n
A chunk's logits are used for its loss and for both its gradients before the next chunk's are
computed: three products in the forward pass, none in the backward, which only scales. What is kept
in between is h_bar of the supervised rows and one W_bar. 1/n and the incoming gradient, a loss
scaler's included, come in there, in fp32: nothing of an fp16 pass underflows for being a mean.

Labels are aligned to the hidden states: the token that h_i predicts is y_i. Nothing is shifted.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from stars_fast.base.checks import check_integer
from stars_fast.ops.arguments import check_stack
from stars_fast.ops.first_derivative import first_derivative
from stars_fast.ops.precision import widen

_CHUNK_BYTES = 512 * 2**20  # of a chunk's logits and their log-softmax, in the statistics' dtype
_TILE = 64
_BLOCK = 4096  # rows of W_bar that are converted at a time
_LIGER = "0.8.2"  # before it, the gradient of unreduced losses took the first token's for all


class TokenLoss(NamedTuple):
    """loss: scalar, fp32 (fp64 for fp64). nll: of the labels' shape, in nats, the same dtype,
    without gradient, 0 where nothing is supervised."""

    loss: Tensor
    nll: Tensor


def supervised_positions(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """[N] int64: the supervised places in `labels` flattened. Waits for a CUDA device (N decides a
    shape); call it where the labels are on the CPU, in the data loader."""
    return (labels.reshape(-1) != ignore_index).nonzero().squeeze(1)


def chunk_rows(tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Tokens whose logits are computed at a time: the fewest chunks that stay within 512 MiB, two
    [chunk, vocabulary] in `dtype` counted, or else single tokens. If one chunk does not hold all
    tokens, they are shared out evenly, rounded up to a multiple of 64 where 64 fit."""
    most = max(_CHUNK_BYTES // (2 * vocabulary * dtype.itemsize), 1)
    if tokens <= most:
        return max(tokens, 1)
    tile = _TILE if most >= _TILE else 1
    even = -(-tokens // -(-tokens // (most // tile * tile)))
    return -(-even // tile) * tile


def averaged(op: str, total: Tensor, tokens: int, count: Tensor | float | None) -> Tensor:
    """`total`, a sum over `tokens` supervised tokens, divided by `count`, by default by `tokens`.

    Raises:
        TypeError: `count` is neither a number nor a tensor.
        ValueError: `count` is not one positive number without gradient, on total's device or the
            CPU. A tensor's value is not looked at.
    """
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.requires_grad:
            raise ValueError(
                f"{op}: count: expected one number without gradient, got shape "
                f"{list(count.shape)}, requires_grad={count.requires_grad}"
            )
        if count.device not in (total.device, torch.device("cpu")):
            raise ValueError(
                f"{op}: count: expected a tensor on {total.device} or the CPU, got {count.device}"
            )
    elif count is not None and not isinstance(count, Real):
        raise TypeError(f"{op}: count: expected a number or a tensor, got {count!r}")
    if count is None or tokens == 0:  # the sum of nothing is 0, whatever the count
        return total / max(tokens, 1)
    if isinstance(count, Tensor):
        return total / count.reshape(()).to(total.dtype)
    if not count > 0:
        raise ValueError(f"{op}: count: expected a positive number, got {count!r}")
    return total / count


def _add_product(total: Tensor, g: Tensor, x: Tensor) -> None:
    """total [V, D] += g^T x, for g [C, V] and x [C, D], summed in total's dtype. Where no product
    of 16-bit factors can do that, x and 4,096 columns of g at a time are copied to it."""
    if g.dtype == total.dtype:
        total.addmm_(g.t(), x)
    elif _mixed_products(total.device):
        torch.addmm(total, g.t(), x, out_dtype=total.dtype, out=total)
    else:
        x = x.to(total.dtype)
        for rows, part in zip(total.split(_BLOCK), g.split(_BLOCK, 1), strict=True):
            rows.addmm_(part.t().to(total.dtype), x)


def _mixed_products(device: torch.device) -> bool:
    """Whether 16-bit products can be summed into fp32 memory: NVIDIA, Ampere and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale as `dtype`, multiplied in scale's dtype, block by block where that is another."""
    if x.dtype == dtype == scale.dtype:
        return x * scale
    out = torch.empty_like(x, dtype=dtype)
    for target, source in zip(out.split(_BLOCK), x.split(_BLOCK), strict=True):
        target.copy_(widen(source) * scale)
    return out


def _add_chunk(
    x: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    nll: Tensor,
    x_bar: Tensor | None,
    head_bar: Tensor | None,
) -> None:
    """Write a chunk's nll [C] and x_bar [C, D], add to head_bar [V, D]. At most two [C, V] in nll's
    dtype are held, so `g` has one name through all that it becomes: log p, g, g in x's dtype."""
    labels = labels.unsqueeze(1)
    g = torch.log_softmax((x @ head.t()).to(nll.dtype), -1)
    label_log_p = g.gather(1, labels)
    nll.copy_(-label_log_p.squeeze(1))
    if x_bar is None and head_bar is None:
        return
    g.exp_().scatter_(1, labels, label_log_p.expm1_())
    if weights is not None:
        g.mul_(weights.to(g.dtype).unsqueeze(1))
    g = g.to(x.dtype)
    if x_bar is not None:
        x_bar.copy_(g @ head)
    if head_bar is not None:
        _add_product(head_bar, g, x)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        chunk: int,
        dtype: torch.dtype,
        grads: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        """rows [N, D], labels and weights [N] -> summed loss, nll [N]. Products run in `dtype`;
        `grads` says which of rows, weight and weights want a gradient."""
        wide = torch.promote_types(dtype, torch.float32)
        rows_bar = torch.empty_like(rows) if grads[0] else None
        weight_bar = torch.zeros_like(weight, dtype=wide) if grads[1] else None
        nll = torch.empty(len(rows), dtype=wide, device=rows.device)
        head = weight.to(dtype)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            _add_chunk(
                rows[part].to(dtype),
                head,
                labels[part],
                None if weights is None else weights[part],
                nll[part],
                None if rows_bar is None else rows_bar[part],
                weight_bar,
            )
        ctx.save_for_backward(rows_bar, weight_bar, nll if grads[2] else None)
        ctx.dtypes = rows.dtype, weight.dtype, None if weights is None else weights.dtype
        ctx.mark_non_differentiable(nll)
        return (nll if weights is None else nll * weights.to(wide)).sum(), nll

    @staticmethod
    @first_derivative("linear_cross_entropy")
    def backward(ctx: Any, loss_bar: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        rows_bar, weight_bar, weights_bar = (
            None if x is None else _scaled(x, loss_bar, dtype)
            for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return rows_bar, weight_bar, None, weights_bar, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    count: Tensor | float | None = None,
    chunk: int | None = None,
    supervised: Tensor | None = None,
    backend: str | None = None,
) -> TokenLoss:
    """Cross entropy of the logits `hidden @ weight.T`, computed at supervised positions only, a
    chunk of tokens at a time.

    Products run in the dtype of `hidden` and `weight`, under torch.autocast in autocast's (never
    less than fp64 for fp64); softmax and sums in fp32 (fp64 for fp64). The gradient is worked out
    in the forward pass, unless nothing requires one or gradients are off.

    Memory of the forward pass: a chunk's logits twice in fp32 (fp64 for fp64), by default within
    512 MiB; a copy of the supervised rows, unless all are (`ignore_index=None`); under autocast a
    copy of `weight` in autocast's dtype; and where 16-bit products can't be summed in fp32 (all but
    NVIDIA since Ampere) a chunk's rows in fp32. Kept for the backward pass, if wanted: the
    supervised rows' gradient in hidden's dtype, and weight's in fp32 (fp64 for fp64), of which the
    results are scaled copies.

    Second derivatives and the transforms of torch.func (grad, vmap, jvp) are not supported.

    Args:
        hidden: [..., D], floating point. Rows that are not supervised are never read, nor get
            other gradients than 0.
        weight: [V, D], of hidden's dtype (any floating dtype under autocast); it may be an
            embedding's.
        labels: [...] int64, aligned to hidden: `labels[i]` is what `hidden[i]` predicts. A causal
            model's caller has shifted them.
        weights: [...] floating point, of each token's loss; differentiable. 1 by default.
        ignore_index: the label of positions that are not supervised. None: all are, and no row is
            copied.
        reduction: "mean" divides the sum by the count, "sum" does not.
        count: what "mean" divides by, a positive number or a tensor of one element, on hidden's
            device or the CPU: the number of supervised tokens of a whole window of micro-batches
            and ranks. By default that of this call. Not the sum of `weights`. A tensor's value is
            not checked, as a device would have to be waited for: if it is 0 while a token is
            supervised, loss and gradients are not finite.
        chunk: tokens whose logits are computed at a time; by default what `chunk_rows` says.
        supervised: [N] int64 on hidden's device, the supervised places in the flattened labels,
            each once, as `supervised_positions` finds them; `ignore_index` is not looked at.
            Without it a CUDA pass waits once to learn N.
        backend: None or "torch" for this file's; "liger" for Liger-Kernel's Triton kernel (CUDA,
            package liger-kernel, sums in fp32), which computes the logits twice. Never chosen
            silently: its roundings differ.

    Returns:
        `TokenLoss(loss, nll)`. Without any supervised token the loss is 0, and so is every
        gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or value, named.
        RuntimeError: in the backward pass, when it is asked for a graph (create_graph=True); under
            a transform of torch.func.
        ImportError: Liger-Kernel is asked for and absent or too old.
    """
    op = "linear_cross_entropy"
    check_head(op, "hidden", hidden, weight, labels)
    if weights is not None:
        check_tensor(op, "weights", weights, labels.device)
        check_stack(op, "weights", weights, dual=False)
        if weights.shape != labels.shape:
            raise ValueError(
                f"{op}: weights: expected shape {list(labels.shape)}, got {list(weights.shape)}"
            )
    if supervised is not None:
        check_supervised(op, supervised, labels)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{op}: reduction: expected 'mean' or 'sum', got {reduction!r}")
    if reduction == "sum" and count is not None:
        raise ValueError(f"{op}: count: expected None with reduction='sum', got {count!r}")
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    scales = None if weights is None else weights.reshape(-1)
    positions = supervised
    if positions is None and ignore_index is not None:
        positions = supervised_positions(labels, ignore_index)
    if positions is not None:
        rows, targets = rows.index_select(0, positions), targets.index_select(0, positions)
        scales = None if scales is None else scales.index_select(0, positions)
    loss, nll = summed_loss(op, "hidden", rows, weight, targets, scales, chunk, backend)
    if reduction == "mean":
        loss = averaged(op, loss, len(rows), count)
    if positions is not None:
        nll = nll.new_zeros(labels.numel()).index_copy(0, positions, nll)
    return TokenLoss(loss, nll.view(labels.shape))


def summed_loss(
    op: str,
    name: str,
    rows: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    chunk: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """The sum of the weighted losses, and nll [N], of rows [N, D] that are all supervised. The
    arguments are those of `linear_cross_entropy`; in errors `op` raises and the rows are `name`."""
    if backend not in (None, "torch", "liger"):
        raise ValueError(f"{op}: backend: expected 'torch', 'liger' or None, got {backend!r}")
    dtype = _product_dtype(op, name, rows, weight)
    _check_range(f"{op}: labels at supervised positions", labels, len(weight))
    if backend == "liger" and len(rows):
        return _liger(op, name, rows, weight, labels, weights)
    if chunk is None:
        chunk = chunk_rows(len(rows), len(weight), torch.promote_types(dtype, torch.float32))
    check_integer(f"{op}: chunk", chunk, 1)
    wanted = (x is not None and x.requires_grad for x in (rows, weight, weights))
    grads = tuple(torch.is_grad_enabled() and want for want in wanted)
    return _LinearCrossEntropy.apply(rows, weight, labels, weights, chunk, dtype, grads)


def check_tensor(op: str, name: str, x: Tensor, device: torch.device | None = None) -> None:
    """Raise TypeError unless `x` is a tensor, ValueError unless on `device`, where one is given."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name}: expected a tensor, got {type(x).__name__}")
    if device is not None and x.device != device:
        raise ValueError(f"{op}: {name}: expected a tensor on {device}, got {x.device}")


def check_head(op: str, name: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Raise TypeError or ValueError unless `weight` is [V, D] and `labels` [...] int64 for `hidden`
    [..., D], which the errors call `name`."""
    check_tensor(op, name, hidden)
    check_tensor(op, "weight", weight, hidden.device)
    check_tensor(op, "labels", labels, hidden.device)
    check_stack(op, name, hidden, dual=False)
    check_stack(op, "weight", weight, dual=False)
    fits = hidden.dim() > 0 and weight.dim() == 2 and weight.shape[1] == hidden.shape[-1]
    if not fits or weight.numel() == 0:
        raise ValueError(
            f"{op}: weight: expected [V, D] for {name} [..., D], with V, D >= 1, got "
            f"{list(weight.shape)} for {list(hidden.shape)}"
        )
    if labels.dtype != torch.int64:
        raise TypeError(f"{op}: labels: expected int64, got {labels.dtype}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{op}: labels: expected shape {list(hidden.shape[:-1])}, got {list(labels.shape)}"
        )


def check_supervised(op: str, supervised: Tensor, labels: Tensor) -> None:
    """Raise unless `supervised` is [N] int64 on the labels' device, places in them flattened.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape or device, or (on the CPU) a place that does not exist.
    """
    check_tensor(op, "supervised", supervised, labels.device)
    if supervised.dtype != torch.int64:
        raise TypeError(f"{op}: supervised: expected int64, got {supervised.dtype}")
    if supervised.dim() != 1 or len(supervised) > labels.numel():
        raise ValueError(
            f"{op}: supervised: expected [N] with N <= {labels.numel()}, got "
            f"{list(supervised.shape)}"
        )
    _check_range(f"{op}: supervised", supervised, labels.numel())


def _check_range(name: str, values: Tensor, bound: int) -> None:
    """Raise ValueError unless values are in [0, bound). A GPU would have to be waited for: there
    the gather that follows checks its indices."""
    if torch.compiler.is_compiling() or values.device.type != "cpu" or not len(values):
        return
    low, high = (int(value) for value in values.aminmax())
    if low < 0 or high >= bound:
        raise ValueError(f"{name}: expected a value in [0, {bound}), got {low} to {high}")


def _product_dtype(op: str, name: str, hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that F.linear would compute in."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"{op}: weight: expected the dtype of {name}, {hidden.dtype}, got {weight.dtype}"
        )
    return hidden.dtype


def _liger(
    op: str, name: str, rows: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Summed loss and nll [N] by Liger-Kernel."""
    if not rows.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"{op}: backend='liger' needs {name} on CUDA, got {rows.device}")
    try:
        found = version("liger-kernel")
        functional = import_module("liger_kernel.transformers.functional")
    except (ImportError, PackageNotFoundError) as error:
        raise ImportError(
            f"{op}: backend='liger' needs the package liger-kernel >= {_LIGER} "
            f"(pip install liger-kernel): {error}"
        ) from error
    if TorchVersion(found) < _LIGER:
        raise ImportError(
            f"{op}: backend='liger' needs liger-kernel >= {_LIGER}, got {found}: the weight of a "
            "single token would count for all"
        )
    nll = functional.liger_fused_linear_cross_entropy(
        rows, weight, labels, reduction="none", accum_dtype=torch.float32
    )
    return (nll if weights is None else nll * weights.to(nll.dtype)).sum(), nll.detach()

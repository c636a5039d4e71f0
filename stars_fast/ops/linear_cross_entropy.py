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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from stars_fast.checks import check_integer
from stars_fast.ops.arguments import check_stack
from stars_fast.ops.precision import no_autocast, widen

_CHUNK_BYTES = 256 * 2**20  # of logits in the dtype of the statistics
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
    """Tokens whose logits are computed at a time: the fewest chunks whose logits, in `dtype`, stay
    within 256 MiB, all of about one size, a multiple of 64 where more than one is needed."""
    most = max(_CHUNK_BYTES // (vocabulary * dtype.itemsize), 1)
    if tokens <= most:
        return max(tokens, 1)
    most = max(most // _TILE * _TILE, 1)
    even = -(-tokens // -(-tokens // most))
    return min(most, -(-even // _TILE) * _TILE)


def mean_divisor(
    op: str, count: Tensor | float | None, tokens: int, dtype: torch.dtype
) -> Tensor | float:
    """What the sum over `tokens` supervised tokens is divided by, a tensor `count` as `dtype`.

    Raises:
        ValueError: `count` is not one positive number without gradient. A tensor's value is not
            looked at.
    """
    if count is None or tokens == 0:  # the sum of nothing is 0, whatever the count
        return max(tokens, 1)
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.requires_grad:
            raise ValueError(
                f"{op}: count must be one number without gradient, got shape {list(count.shape)}, "
                f"requires_grad={count.requires_grad}"
            )
        return count.reshape(()).to(dtype)
    if not count > 0:
        raise ValueError(f"{op}: count must be positive, got {count!r}")
    return count


def _add_product(total: Tensor, g: Tensor, x: Tensor) -> None:
    """total [V, D] += g^T x, for g [C, V] and x [C, D], summed in total's dtype."""
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


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        divisor: Tensor | float,
        chunk: int,
        dtype: torch.dtype,
        grads: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        """rows [N, D], labels and weights [N] -> loss, nll [N]. Products run in `dtype`; `grads`
        says which of rows, weight and weights want a gradient."""
        wide = torch.promote_types(dtype, torch.float32)
        rows_bar = torch.empty_like(rows) if grads[0] else None
        weight_bar = torch.zeros_like(weight, dtype=wide) if grads[1] else None
        nll = torch.empty(len(rows), dtype=wide, device=rows.device)
        with no_autocast(rows):
            head = weight.to(dtype)
            for start in range(0, len(rows), chunk):
                part = slice(start, start + chunk)
                x, y = rows[part].to(dtype), labels[part].unsqueeze(1)
                logits = x @ head.t()
                log_p = torch.log_softmax(logits, -1, dtype=wide)
                label_log_p = log_p.gather(1, y)
                nll[part] = -label_log_p.squeeze(1)
                if rows_bar is None and weight_bar is None:
                    continue
                g = log_p.exp_().scatter_(1, y, label_log_p.expm1_())
                if weights is not None:
                    g.mul_(weights[part].to(wide).unsqueeze(1))
                if dtype != wide:
                    g = logits.copy_(g)
                if rows_bar is not None:
                    rows_bar[part] = g @ head
                if weight_bar is not None:
                    _add_product(weight_bar, g, x)
                del logits, log_p, g  # before the next chunk's
        total = (nll if weights is None else nll * weights.to(wide)).sum()
        on_device = divisor if isinstance(divisor, Tensor) else None
        ctx.save_for_backward(rows_bar, weight_bar, nll if grads[2] else None, on_device)
        ctx.divisor = None if on_device is not None else divisor
        ctx.dtypes = rows.dtype, weight.dtype, None if weights is None else weights.dtype
        ctx.mark_non_differentiable(nll)
        return total / divisor, nll

    @staticmethod
    def backward(ctx: Any, loss_bar: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable would say nothing: the gradient of a loss that comes in is a constant.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy: expected a first derivative, got create_graph=True: the "
                "gradient is worked out in the forward pass and can't be differentiated again"
            )
        *unscaled, divisor = ctx.saved_tensors
        scale = loss_bar / (ctx.divisor if divisor is None else divisor)
        rows_bar, weight_bar, weights_bar = (
            None if x is None else _scaled(x, scale, dtype)
            for x, dtype in zip(unscaled, ctx.dtypes, strict=True)
        )
        return rows_bar, weight_bar, None, weights_bar, None, None, None, None


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
    """Cross entropy of the logits `hidden @ weight.T`, computed at supervised positions only, some
    hundred tokens at a time. There is never a tensor of [tokens, V].

    Memory besides the results: one chunk's logits in the products' dtype and once more in fp32, and
    one fp32 [V, D] where weight's gradient is wanted, which is cast once. Products run in the dtype
    of `hidden` and `weight`, under torch.autocast in autocast's (never less than fp64 for fp64);
    softmax and sums in fp32 (fp64 for fp64). The gradient is worked out in the forward pass, unless
    nothing requires one or gradients are off; it can't be differentiated again.

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
        count: what "mean" divides by, a number or a tensor of one element (which may lie on the
            device): the number of supervised tokens of a whole window of micro-batches and ranks.
            By default that of this call. Not the sum of `weights`.
        chunk: tokens whose logits are computed at a time; by default as many as keep them within
            256 MiB of fp32 (`chunk_rows`).
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
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value, named.
        RuntimeError: in the backward pass, when it is asked for a graph (create_graph=True).
        ImportError: Liger-Kernel is asked for and absent or too old.
    """
    op = "linear_cross_entropy"
    _check(hidden, weight, labels, weights, supervised)
    dtype = _product_dtype(hidden, weight)
    if backend not in (None, "torch", "liger"):
        raise ValueError(f"{op}: backend must be 'torch', 'liger' or None, got {backend!r}")
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    scales = None if weights is None else weights.reshape(-1)
    positions = supervised
    if positions is None and ignore_index is not None:
        positions = supervised_positions(labels, ignore_index)
    if positions is not None:
        rows, targets = rows.index_select(0, positions), targets.index_select(0, positions)
        scales = None if scales is None else scales.index_select(0, positions)
    _check_range(f"{op}: labels at supervised positions", targets, len(weight))
    wide = torch.promote_types(dtype, torch.float32)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{op}: reduction must be 'mean' or 'sum', got {reduction!r}")
    if reduction == "sum" and count is not None:
        raise ValueError(f"{op}: count must be None with reduction='sum', got {count!r}")
    divisor = mean_divisor(op, count, len(rows), wide) if reduction == "mean" else 1
    if backend == "liger" and len(rows):
        loss, nll = _liger(rows, weight, targets, scales, divisor)
    else:
        if chunk is None:
            chunk = chunk_rows(len(rows), len(weight), wide)
        check_integer(f"{op}: chunk", chunk, 1)
        wanted = (x is not None and x.requires_grad for x in (rows, weight, scales))
        grads = tuple(torch.is_grad_enabled() and want for want in wanted)
        loss, nll = _LinearCrossEntropy.apply(
            rows, weight, targets, scales, divisor, chunk, dtype, grads
        )
    if positions is not None:
        nll = nll.new_zeros(labels.numel()).index_copy(0, positions, nll)
    return TokenLoss(loss, nll.view(labels.shape))


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    supervised: Tensor | None,
) -> None:
    op = "linear_cross_entropy"
    check_stack(op, "hidden", hidden, dual=False)
    check_stack(op, "weight", weight, dual=False)
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{op}: weight must be [V, D] for hidden [..., D], got {list(weight.shape)} for "
            f"{list(hidden.shape)}"
        )
    if labels.dtype != torch.int64:
        raise TypeError(f"{op}: labels must be int64, got {labels.dtype}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{op}: labels must have shape {list(hidden.shape[:-1])}, got {list(labels.shape)}"
        )
    if weights is not None:
        check_stack(op, "weights", weights, dual=False)
        if weights.shape != labels.shape:
            raise ValueError(
                f"{op}: weights must have shape {list(labels.shape)}, got {list(weights.shape)}"
            )
    for name, tensor in {"weight": weight, "labels": labels, "weights": weights}.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{op}: {name} must be on {hidden.device}, got {tensor.device}")
    if supervised is not None:
        check_supervised(op, supervised, labels)


def check_supervised(op: str, supervised: Tensor, labels: Tensor) -> None:
    """Raise unless `supervised` is [N] int64 on the labels' device, places in them flattened.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device, or (on the CPU) a place that does not exist.
    """
    if supervised.dtype != torch.int64:
        raise TypeError(f"{op}: supervised must be int64, got {supervised.dtype}")
    if supervised.dim() != 1 or len(supervised) > labels.numel():
        raise ValueError(
            f"{op}: supervised must be [N] with N <= {labels.numel()}, got {list(supervised.shape)}"
        )
    if supervised.device != labels.device:
        raise ValueError(f"{op}: supervised must be on {labels.device}, got {supervised.device}")
    _check_range(f"{op}: supervised", supervised, labels.numel())


def _check_range(name: str, values: Tensor, bound: int) -> None:
    """Raise ValueError unless values are in [0, bound). A GPU would have to be waited for: there
    the gather that follows checks its indices."""
    if torch.compiler.is_compiling() or values.device.type != "cpu" or not len(values):
        return
    low, high = (int(value) for value in values.aminmax())
    if low < 0 or high >= bound:
        raise ValueError(f"{name} must be in [0, {bound}), got {low} to {high}")


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that F.linear would compute in."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"linear_cross_entropy: weight must have hidden's dtype {hidden.dtype}, got "
            f"{weight.dtype}"
        )
    return hidden.dtype


def _liger(
    rows: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None, divisor: Tensor | float
) -> tuple[Tensor, Tensor]:
    """loss and nll [N] by Liger-Kernel."""
    op = "linear_cross_entropy"
    if not rows.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"{op}: backend='liger' needs hidden on CUDA, got {rows.device}")
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
    total = (nll if weights is None else nll * weights.to(nll.dtype)).sum()
    return total / divisor, nll.detach()

"""The Jacobian of a looped block, in a random direction: `fused_jsrr` and `fused_jvp`.

    seed        v ~ N(0, I), one direction a sample, scaled to unit RMS
    dual pass   (h, u) -> (Phi(h), J u), one pass through the block
    norm        mean over samples of mean(J u * J u)  =  ||J v||^2 with ||v|| = 1

A unit vector over D entries has entries of size D^-1/2, too small for 16-bit numbers. The tangent
is linear, so u = sqrt(D) v is carried instead, and the mean over the D entries of (J u)^2 is
||J v||^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from stars_fast.base.checks import check_number
from stars_fast.dual.dual_pass import dual_pass, tangent_pass
from stars_fast.dual.graphed_block import GraphedBlock
from stars_fast.dual.layout import stack_pair
from stars_fast.dual.repeatable import repeatable
from stars_fast.ops.sample_norms import SampleNorms, sample_norms
from stars_fast.ops.seed import can_seed
from stars_fast.tokens import take_rows

Block = Callable[..., Any]


def fused_jvp(
    block: Block,
    h: Tensor,
    v: Tensor,
    *,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Value and Jacobian-vector product of a block, in one pass.

    Both results are differentiable in the block's weights, in `h` and in `v`.

    Args:
        block: any module or callable `h -> h'`; a tuple, mapping or model output counts by its
            first element.
        h: floating point, any shape, e.g. [B, S, D].
        v: the direction, of h's shape and dtype. It is carried at unit RMS and scaled back.
        args: further positional arguments of `block`.
        kwargs: keyword arguments of `block`.

    Returns:
        `(block(h), J v)`, in the order of `torch.func.jvp`.

    Raises:
        TypeError: `h` or `v` is not a floating-point tensor, or the block returned no tensor that
            depends on `h`.
        ValueError: `v` does not have h's shape, dtype and device.
        RuntimeError: the block met an op whose tangent can't be computed; the op is named.
    """
    _check_h(h)
    _check_v(v, h)
    wide = v.dtype if v.dtype == torch.float64 else torch.float32
    scale = _rms(v.detach().to(wide))
    u = (v.to(wide) / scale).to(v.dtype)
    out = _pair(block, stack_pair(h, u), args, kwargs or {})
    return out[0], (out[1] * scale).to(out.dtype)


def _pair(block: Block, stack: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    if not isinstance(block, GraphedBlock):
        return dual_pass(block, stack, args, kwargs)
    if args or kwargs:
        raise ValueError("args, kwargs: a GraphedBlock took them when it was captured")
    return block.dual(stack)


def _tangent(block: Block, stack: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    if isinstance(block, GraphedBlock):
        return _pair(block, stack, args, kwargs)[1]
    return tangent_pass(block, stack, args, kwargs)


def _rms(v: Tensor) -> Tensor:
    """Root mean square, of any size of v without overflow; 1 for a zero or empty v."""
    if v.numel() == 0:
        return v.new_ones(())
    top = v.abs().amax()
    top = torch.where(top > 0, top, 1.0)
    rms = (v / top).square().mean().sqrt()
    return torch.where(rms > 0, top * rms, 1.0)


@overload
def fused_jsrr(
    block: Block,
    h: Tensor,
    *,
    args: Sequence[Any] = ...,
    kwargs: dict[str, Any] | None = ...,
    v: Tensor | None = ...,
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    power_steps: int = ...,
    through_power_steps: bool = ...,
    normalize: Literal["sample", "batch"] = ...,
    detach: bool = ...,
    fraction: float = ...,
    margin: float = ...,
    generator: torch.Generator | None = ...,
    return_output: Literal[False] = ...,
) -> Tensor: ...


@overload
def fused_jsrr(
    block: Block,
    h: Tensor,
    *,
    args: Sequence[Any] = ...,
    kwargs: dict[str, Any] | None = ...,
    v: Tensor | None = ...,
    mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    power_steps: int = ...,
    through_power_steps: bool = ...,
    normalize: Literal["sample", "batch"] = ...,
    detach: bool = ...,
    fraction: float = ...,
    margin: float = ...,
    generator: torch.Generator | None = ...,
    return_output: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def fused_jsrr(
    block: Block,
    h: Tensor,
    *,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    v: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    power_steps: int = 1,
    through_power_steps: bool = False,
    normalize: Literal["sample", "batch"] = "sample",
    detach: bool = True,
    fraction: float = 1.0,
    margin: float = 0.0,
    generator: torch.Generator | None = None,
    return_output: bool = False,
) -> Any:
    """Jacobian spectral radius regularisation (STARS, eq. for L_JSRR): mean_i ||J_i v_i||^2.

    J_i is the Jacobian of the block at sample i of `h` and v_i a random unit direction. With one
    power step the expected value is the mean squared singular value ||J||_F^2 / D; with many it
    tends to the squared spectral radius. The loss is differentiable in the block's weights (and in
    `h` with `detach=False`).

    Args:
        block: any module or callable `h -> h'` that keeps the shape and treats the rows of the
            batch independently; a tuple, mapping or model output counts by its first element.
        h: the state, [B, S, D] floating point; or [1, total, D] with `cu_seqlens`.
        args: further positional arguments of `block`.
        kwargs: keyword arguments of `block`.
        v: direction of h's shape, instead of a random one; masked and normalised like it. The last
            step of the state, `h - h_before`, has been through the Jacobians of the turns before
            and leans to their largest eigenvalues; the loss is then no estimate of ||J||_F^2 / D,
            and wants a smaller weight (about a third: `benchmarks/log/2026-11-28.md`).
        mask: [B, S], boolean or 0/1, True for real tokens: v is zero on the others and they do not
            count in the norm. It is not handed to `block`.
        cu_seqlens: [n + 1] integers, 0 = c_0 <= ... <= c_n = total: documents packed in one row,
            each with its own v and its own norm. It is not handed to `block`. A row may end in
            pads, by `mask` [1, total]: documents of pads alone do not count.
        power_steps: v <- J v / ||J v||, this many times; the last gives the loss. All are with one
            J: of a block in training mode, with the dropout masks and buffers of one forward.
        through_power_steps: differentiate through the earlier power steps too.
        normalize: "sample" gives every sample (or document) its own unit v; "batch" one unit v over
            the whole tensor, as in the published code. Both have the same expected value where
            samples are of equal length.
        detach: evaluate J at `h.detach()`: the loss reaches weights only.
        fraction: of the samples, in (0, 1], drawn without replacement: an unbiased estimate at this
            part of the cost. Tensors in `args` and `kwargs` whose first dimension is B are cut
            along with `h`. With `cu_seqlens` or `return_output` the others stay in the pass with a
            zero v: unbiased too, but at full cost.
        margin: m of the hinge max(0, ||J v|| - m)^2, which takes the place of ||J v||^2: where the
            map shrinks v to m or less there is no pressure. With `normalize` "sample" that is
            asked of each sample, with "batch" of all together.
        generator: of v and of the drawn samples. Under activation checkpointing around this call
            use the global generator (checkpointing restores it) or pass `v`.
        return_output: also return the primal output, which the pass computes anyway.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64 input); with `return_output` the pair
        `(block(h), loss)`. Samples without a real token do not count; with none the loss is 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named.
        ValueError: `return_output` with `detach` where `h` requires a gradient: one pass can't be
            cut off from `h` for the loss and stay connected for the output.
        RuntimeError: the block met an op whose tangent can't be computed; the op is named.
    """
    kwargs = kwargs or {}
    _check_h(h)
    _check_options(power_steps, normalize, fraction)
    check_number("margin", margin, 0.0)
    if detach and h.requires_grad and return_output and torch.is_grad_enabled():
        raise ValueError(
            "detach: one pass can't cut the loss off from h and keep the output connected to it; "
            "pass detach=False (the loss then reaches h too) or h.detach()"
        )
    if detach:
        h = h.detach()
    samples = sample_norms(h, mask, cu_seqlens)
    if v is not None:
        _check_v(v, h)

    if fraction < 1.0:
        chosen = _chosen_rows(samples.count, fraction, generator, h.device)
        if cu_seqlens is None and not return_output:
            length = h.shape[1]
            size = h.shape[0]
            h, samples = h[chosen], samples.cut_out(chosen)
            v = None if v is None else v[chosen]
            args, kwargs = take_rows((args, kwargs), chosen, size, length)
        else:
            samples = samples.count_only(chosen)

    stack = _seed(h, v, samples, normalize, generator)
    block = block if power_steps == 1 else repeatable(block)
    for _ in range(power_steps - 1):
        with torch.set_grad_enabled(torch.is_grad_enabled() and through_power_steps):
            jv = _tangent(block, stack, args, kwargs)
            _check_output(jv, h)
            u = samples.unit_rms(jv.to(samples.dtype), normalize)
        stack = stack_pair(h, u.to(h.dtype))  # h keeps its graph, whatever the direction does
    if not return_output:
        jv = _tangent(block, stack, args, kwargs)
        _check_output(jv, h)
        return samples.mean_square(jv, normalize, margin)
    output, jv = _pair(block, stack, args, kwargs)
    _check_output(jv, h)
    return output, samples.mean_square(jv, normalize, margin)


def _seed(
    h: Tensor,
    v: Tensor | None,
    samples: SampleNorms,
    normalize: str,
    generator: torch.Generator | None,
) -> Tensor:
    """[2, *h.shape]: h and the direction, of unit RMS on each sample."""
    if v is None and can_seed(h) and not h.requires_grad:
        stack = samples.seeded(h, generator, normalize)
        return stack if h.is_contiguous() else stack_pair(h, stack[1])
    if v is None:
        v = torch.randn(h.shape, generator=generator, device=h.device, dtype=samples.dtype)
    return stack_pair(h, samples.unit_rms(v.to(samples.dtype), normalize).to(h.dtype))


def _chosen_rows(
    count: int, fraction: float, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Sorted indices of round(fraction * count) samples, at least one, without replacement."""
    number = max(1, round(fraction * count))
    where = generator.device if generator is not None else device
    order = torch.randperm(count, generator=generator, device=where)
    return order[:number].sort().values.to(device)


def _check_h(h: Any) -> None:
    if not isinstance(h, Tensor) or not h.is_floating_point():
        kind = h.dtype if isinstance(h, Tensor) else type(h).__name__
        raise TypeError(f"h: expected a floating-point tensor, got {kind}")


def _check_v(v: Any, h: Tensor) -> None:
    if not isinstance(v, Tensor):
        raise TypeError(f"v: expected a tensor, got {type(v).__name__}")
    if v.shape != h.shape or v.dtype != h.dtype or v.device != h.device:
        raise ValueError(
            f"v: expected the shape, dtype and device of h ({list(h.shape)}, {h.dtype}, "
            f"{h.device}), got {list(v.shape)}, {v.dtype}, {v.device}"
        )


def _check_output(jv: Tensor, h: Tensor) -> None:
    if jv.shape != h.shape:
        raise ValueError(
            f"block: expected an output of h's shape {list(h.shape)}, got {list(jv.shape)}"
        )


def _check_options(power_steps: Any, normalize: Any, fraction: Any) -> None:
    if not isinstance(power_steps, int) or power_steps < 1:
        raise ValueError(f"power_steps: expected an integer of at least 1, got {power_steps!r}")
    if normalize not in ("sample", "batch"):
        raise ValueError(f"normalize: expected 'sample' or 'batch', got {normalize!r}")
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction: expected a number in (0, 1], got {fraction!r}")

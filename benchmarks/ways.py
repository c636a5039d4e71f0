"""Every way to the Jacobian penalty of a block, what each costs and errs.

    plain                a loss through the block: the unit
    dual                 `fused_jsrr`
    last                 `fused_jsrr` with its output, a loss on both: what the penalty adds to a
                         turn that is run anyway is its cost beyond `plain`
    double_backward      u^T J by reverse mode and a second backward, the published code's way
    autograd_jvp         `torch.autograd.functional.jvp`: J u by two reverse passes
    func_jvp             `torch.func.jvp`
    finite_difference    two plain passes: an approximation
    jvp_flash_attention  `torch.func.jvp` with the attention of the package of that name

A way is a function (block, h, u) -> scalar loss; the gradient of the weights is what it is for. Of
PyTorch's own attention only the plain matrices have the derivatives that the ways need; in 16 bits
PyTorch computes those in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.blocks import attending, plain_norms, unit_rms
from benchmarks.report import Row
from benchmarks.timing import ratio, summary
from stars_fast import fused_jsrr

Way = Callable[[nn.Module, Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def mean_square(j: Tensor) -> Tensor:
    return j.float().square().mean() if j.dtype != torch.float64 else j.square().mean()


def token_loss(out: Tensor, u: Tensor) -> Tensor:
    """A loss whose gradient with respect to the output is dense."""
    return (out * u).mean(dtype=torch.promote_types(out.dtype, torch.float32))


def plain(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    return token_loss(block(h), u)


def dual(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    return fused_jsrr(block, h, v=u, normalize="batch")


def last(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    out, loss = fused_jsrr(block, h, v=u, normalize="batch", detach=False, return_output=True)
    return token_loss(out, u) + loss


def double_backward(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    """u^T J: another number than ||J u||^2 for one draw, the same in expectation."""
    x = h.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (j,) = torch.autograd.grad(block(x), x, u, create_graph=True)
        return mean_square(j)


def autograd_jvp(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return mean_square(torch.autograd.functional.jvp(block, h, u, create_graph=True)[1])


def func_jvp(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH), _norms(block, h):
        return mean_square(torch.func.jvp(block, (h,), (u,))[1])


def finite_difference(block: nn.Module, h: Tensor, u: Tensor, step: float = 1e-2) -> Tensor:
    return mean_square((block(h + step * u) - block(h)) / step)


def jvp_flash_attention(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    package = import_module("jvp_flash_attention.jvp_attention")
    attend = partial(package.JVPAttn.fwd_dual, causal=True)
    with attending(block, attend), _norms(block, h):
        return mean_square(torch.func.jvp(block, (h,), (u,))[1])


def _norms(block: nn.Module, h: Tensor) -> AbstractContextManager[None]:
    """In 16 bits `torch.func.jvp` of `nn.RMSNorm` mixes dtypes on CUDA (torch 2.11)."""
    return plain_norms(block) if h.dtype.itemsize == 2 else nullcontext()


def _func_last(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        pair = torch.func.jvp(block, (h,), (u,))
        return token_loss(pair[0], u) + mean_square(pair[1])


WAYS: dict[str, Way] = {
    "plain": plain,
    "dual": dual,
    "last": last,
    "double_backward": double_backward,
    "autograd_jvp": autograd_jvp,
    "func_jvp": func_jvp,
    "finite_difference": finite_difference,
    "jvp_flash_attention": jvp_flash_attention,
}
OURS = ("dual", "last")
COMPILED = ", compiled"
NAMES = (
    *WAYS,
    *(name + COMPILED for name in ("plain", "double_backward", "autograd_jvp", "func_jvp")),
)
"""Every way, and those that run under torch.compile too."""

# What computes the quantity of a way in fp64; `func_jvp` for those that are not here.
_EXACT: dict[str, Way] = {
    "plain": plain,
    "last": _func_last,
    "double_backward": double_backward,
}
# Relative error of the gradient of all weights: 84 units of roundoff in fp32, where sums are long
# against it, and 8 in 16 bits, where products and sums are in fp32 and results are rounded.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Of the finite difference: of the order of its step, times the curvature along it.
_APPROXIMATE = {"finite_difference": 5e-2}


def eager(name: str) -> str:
    """The way without torch.compile."""
    return name.removesuffix(COMPILED)


def tolerance(name: str, dtype: torch.dtype) -> float:
    """The largest relative error of a gradient that is not wrong."""
    return max(_APPROXIMATE.get(eager(name), 0.0), TOLERANCE[dtype])


def missing(name: str, device: torch.device | str) -> str | None:
    """Why a way can't run here, None if it can."""
    if name != "jvp_flash_attention":
        return None
    if torch.device(device).type != "cuda":
        return "needs CUDA"
    return None if find_spec("jvp_flash_attention") else "not installed"


def bind(name: str, block: nn.Module) -> Loss:
    """The way on this block, (h, u) -> loss; under torch.compile if the name says so."""
    loss = partial(WAYS[eager(name)], block)
    return Compiled(loss) if name.endswith(COMPILED) else loss


class Compiled:
    """A loss under torch.compile, as far as that goes: graph breaks are allowed.

    What ran in eager mode after all is told by the graphs that the compiler was handed: if none of
    them holds a product of matrices with weights, the call raises RuntimeError. Each size wants an
    object of its own.
    """

    def __init__(self, loss: Loss) -> None:
        def run(h: Tensor, u: Tensor) -> Tensor:
            return loss(h, u)

        run.__code__ = run.__code__.replace()  # torch.compile counts the recompilations of a code
        self._products = 0
        self._run = torch.compile(run, backend=self._compile, dynamic=False)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self._products += sum(node.target is torch._C._nn.linear for node in graph.graph.nodes)
        return _inductor()(graph, inputs)

    def __call__(self, h: Tensor, u: Tensor) -> Tensor:
        loss = self._run(h, u)
        if not self._products:
            raise RuntimeError("torch.compile fell back to eager mode")
        return loss


@cache
def _inductor() -> Callable[..., Any]:
    from torch._dynamo import lookup_backend

    return lookup_backend("inductor")


def gradient(loss: Loss, block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    """The gradient of all weights, as one vector in fp64."""
    scale = _scale(h)
    grads = torch.autograd.grad(scale * loss(h, u), list(block.parameters()))
    return torch.cat([g.double().flatten() for g in grads]) / scale


def _scale(h: Tensor) -> int:
    """Factor of the loss: cotangents of a mean over many are too small for fp16."""
    return h.numel() if h.dtype == torch.float16 else 1


class Exact:
    """Gradients in fp64 at the same (rounded) weights and inputs, each computed once.

    They are taken of at most `length` tokens, so that they can be had of large blocks.
    """

    def __init__(self, block: nn.Module, h: Tensor, u: Tensor, length: int = 256) -> None:
        self.h, self.u = h[:, :length], unit_rms(u[:, :length]).to(u.dtype)
        self._block = block
        self._wide = deepcopy(block).double()
        self._found: dict[Way, Tensor] = {}

    def error(self, name: str, loss: Loss) -> float:
        """Relative error, in the L2 norm, of the gradient that `loss` gives for the way `name`."""
        exact = _EXACT.get(eager(name), func_jvp)
        if exact not in self._found:
            h, u = self.h.double(), self.u.double()
            self._found[exact] = gradient(partial(exact, self._wide), self._wide, h, u)
        truth = self._found[exact]
        mine = gradient(loss, self._block, self.h, self.u)
        return ((mine - truth).norm() / truth.norm()).item()


def forward_backward(loss: Loss, block: nn.Module, h: Tensor, u: Tensor) -> None:
    """Forward and backward; the block keeps its gradients."""
    block.zero_grad(set_to_none=True)
    (_scale(h) * loss(h, u)).backward()


def figures(times: Mapping[str, list[float]], errors: Mapping[str, float | None]) -> dict[str, Row]:
    """Median, spread and ratio to `plain` of each way, its error, and of `last` what it adds."""
    rows: dict[str, Row] = {}
    for name, seconds in times.items():
        row: Row = summary(seconds)
        row["ratio"] = round(ratio(seconds, times["plain"]), 3)
        if name == "last":
            row["marginal"] = round(row["ratio"] - 1, 3)
        rows[name] = row | {"error": errors.get(name)}
    return rows

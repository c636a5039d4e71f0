"""Every way to get the Jacobian term, and what each costs and errs.

`plain` (a loss through the block) is the unit; the others compute the penalty alone. `dual` is
`fused_jsrr`; `double_backward` is `v^T J` by reverse mode with a second backward, the way of the
published code; `func_jvp` is `torch.func.jvp` + backward; `finite_difference` is two plain passes,
an approximation.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stars_fast import fused_jsrr

Way = Callable[[nn.Module, Tensor, Tensor], Tensor]


def penalty(j: Tensor) -> Tensor:
    return j.float().square().mean() if j.dtype != torch.float64 else j.square().mean()


def plain(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    return (block(h) * u).mean()


def dual(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    return fused_jsrr(block, h, v=u, normalize="batch")


def double_backward(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    """u^T J: another number than ||J u||^2 for one draw, the same in expectation."""
    x = h.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (j,) = torch.autograd.grad(block(x), x, u, create_graph=True)
        return penalty(j)


def func_jvp(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return penalty(torch.func.jvp(block, (h,), (u,))[1])


def finite_difference(block: nn.Module, h: Tensor, u: Tensor, step: float = 1e-2) -> Tensor:
    return penalty((block(h + step * u) - block(h)) / step)


WAYS: dict[str, Way] = {
    "plain": plain,
    "dual": dual,
    "double_backward": double_backward,
    "func_jvp": func_jvp,
    "finite_difference": finite_difference,
}


def gradient(way: Way, block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    """The gradient of all weights, as one vector in fp64."""
    loss = way(block, h, u)
    grads = torch.autograd.grad(loss, list(block.parameters()))
    return torch.cat([g.double().flatten() for g in grads])


def gradient_errors(block: nn.Module, h: Tensor, u: Tensor, names: list[str]) -> dict[str, float]:
    """Relative error of each way's gradient, against the same quantity in fp64 for the same
    (rounded) weights. The block is left as it was."""
    dtype = h.dtype
    mine = {name: gradient(WAYS[name], block, h, u) for name in names}
    block.double()
    exact = {
        name: gradient(WAYS[name], block, h.double(), u.double())
        for name in ("func_jvp", "double_backward")
    }
    block.to(dtype)
    truths = {
        name: exact["double_backward" if name == "double_backward" else "func_jvp"]
        for name in names
    }
    return {
        name: ((mine[name] - truth).norm() / truth.norm()).item() for name, truth in truths.items()
    }


def measure(
    block: nn.Module, h: Tensor, u: Tensor, repeats: int, ways: dict[str, Way]
) -> dict[str, list[float]]:
    """Seconds of forward + backward, the ways taking turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    sync = torch.cuda.synchronize if h.is_cuda else (lambda: None)
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            block.zero_grad(set_to_none=True)
            sync()
            start = time.perf_counter()
            way(block, h, u).backward()
            sync()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return times


def summary(times: dict[str, list[float]], errors: dict[str, float]) -> dict[str, dict]:
    """Median, spread and ratio to `plain` of each way."""
    unit = statistics.median(times["plain"])
    rows = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows[name] = {
            "ms": round(1e3 * median, 3),
            "spread": round((max(seconds) - min(seconds)) / median, 3),
            "ratio": round(median / unit, 3),
            "gradient_error": errors.get(name),
        }
    return rows


def show(rows: dict[str, dict]) -> None:
    """Print a summary as a table."""
    print(f"{'way':<18} {'ms':>9} {'spread':>8} {'ratio':>6}  gradient error")
    for name, row in rows.items():
        error = "" if row["gradient_error"] is None else f"{row['gradient_error']:.1e}"
        print(f"{name:<18} {row['ms']:9.2f} {row['spread']:8.1%} {row['ratio']:6.2f}  {error}")


def commit() -> str:
    """The commit that is measured; "+" where the tree differs from it."""
    try:
        run = ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude=*"]
        out = subprocess.run(run, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return out.stdout.strip()

"""What the Jacobian term costs at block level, against every way to get it.

    python benchmarks/block_cost.py [--device cpu] [--repeats 10] [--json FILE]

One run times, interleaved, forward + backward of: the plain block (the unit); the dual pass of
`fused_jsrr`; `v^T J` with double backward (the published way); `torch.func.jvp` + backward; and a
one-sided finite difference (two plain passes, an approximation). Each way's gradient is compared
with the fp64 one first, so that nothing wrong is timed in silence.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stars_fast import fused_jsrr


class Layer(nn.Module):
    """Pre-norm decoder layer: RMSNorm, causal attention, SwiGLU."""

    def __init__(self, d: int, heads: int, d_ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        batch, length, d = h.shape
        qkv = self.qkv(self.norm1(h)).view(batch, length, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).reshape(batch, length, d))
        x = self.norm2(h)
        return h + self.down(F.silu(self.gate(x)) * self.up(x))


def penalty(j: Tensor) -> Tensor:
    return j.square().mean()


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


def plain(block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    return (block(h) * u).mean()


WAYS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "dual": dual,
    "double_backward": double_backward,
    "func_jvp": func_jvp,
    "finite_difference": finite_difference,
}


def gradient(way: Callable[..., Tensor], block: nn.Module, h: Tensor, u: Tensor) -> Tensor:
    loss = way(block, h, u)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(block.parameters()))])


def errors(block: nn.Module, h: Tensor, u: Tensor) -> dict[str, float]:
    """Relative error of each way's gradient, against the same quantity in fp64."""
    exact = {}
    block.double()
    for name in ("func_jvp", "double_backward"):
        exact[name] = gradient(WAYS[name], block, h.double(), u.double())
    block.float()
    found = {}
    for name in ("dual", "double_backward", "func_jvp", "finite_difference"):
        truth = exact["double_backward" if name == "double_backward" else "func_jvp"]
        mine = gradient(WAYS[name], block, h, u).double()
        found[name] = ((mine - truth).norm() / truth.norm()).item()
    return found


def measure(block: nn.Module, h: Tensor, u: Tensor, repeats: int) -> dict[str, list[float]]:
    """Seconds of forward + backward, the ways taking turns."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    sync = torch.cuda.synchronize if h.is_cuda else (lambda: None)
    for repeat in range(repeats + 1):
        for name, way in WAYS.items():
            block.zero_grad(set_to_none=True)
            sync()
            start = time.perf_counter()
            way(block, h, u).backward()
            sync()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return times


def commit() -> str:
    try:
        out = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return out.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--d-ff", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="write the result here")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    layers = [Layer(options.width, options.heads, options.d_ff) for _ in range(options.layers)]
    block = nn.Sequential(*layers).to(options.device)
    shape = (options.batch, options.length, options.width)
    h = torch.randn(shape, device=options.device)
    u = torch.randn(shape, device=options.device)
    u = u / u.square().mean().sqrt()

    error = errors(block, h, u)
    times = measure(block, h, u, options.repeats)
    unit = statistics.median(times["plain"])
    rows = {}
    print(f"{'way':<18} {'ms':>8} {'spread':>8} {'ratio':>6}  gradient error")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / median
        rows[name] = {
            "ms": round(1e3 * median, 2),
            "spread": round(spread, 3),
            "ratio": round(median / unit, 3),
            "gradient_error": error.get(name),
        }
        shown = f"{error[name]:.1e}" if name in error else ""
        print(f"{name:<18} {1e3 * median:8.1f} {spread:8.1%} {median / unit:6.2f}  {shown}")
    result = {
        "shape": {k: getattr(options, k) for k in ("width", "heads", "d_ff", "layers", "batch")}
        | {"length": options.length},
        "dtype": "float32",
        "device": torch.cuda.get_device_name() if h.is_cuda else platform.processor() or "cpu",
        "threads": options.threads,
        "torch": torch.__version__,
        "commit": commit(),
        "rows": rows,
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

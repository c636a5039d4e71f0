"""What the Jacobian term costs at block level, against every way to get it.

    python benchmarks/block_cost.py [--device cpu] [--dtype float32] [--repeats 10] [--json FILE]
    python benchmarks/block_cost.py --profile

One run times, interleaved, forward + backward of the ways of `ways.py`. Each way's gradient is
compared with the fp64 one first, so that nothing wrong is timed in silence.
"""

from __future__ import annotations

import argparse
import json
import platform

import torch
from blocks import PreNormLayer, stack
from torch import Tensor, nn
from torch.profiler import profile
from ways import WAYS, commit, gradient_errors, measure, show, summary

from stars_fast import explain, ops


def profiled(way: str, block: nn.Module, h: Tensor, u: Tensor, repeats: int = 5) -> None:
    """Print the arithmetic of the products and each op's share of the time of one way."""
    WAYS[way](block, h, u).backward()
    with profile(with_flops=True) as found:
        for _ in range(repeats):
            WAYS[way](block, h, u).backward()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    flops = sum(row.flops for row in rows if row.key == "aten::mm") / repeats
    print(f"{way}: {flops / 1e9:.2f} GFLOP in aten::mm, {total / repeats / 1e3:.0f} ms")
    for row in rows[:12]:
        print(f"  {row.key:<40} {row.self_cpu_time_total / total:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--d-ff", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--backend", choices=ops.BACKENDS, help="force one (default: the best)")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--profile", action="store_true", help="where the time goes, not the times")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    block = stack(PreNormLayer, options.layers, options.width, options.heads, options.d_ff)
    block.to(options.device, dtype)
    shape = (options.batch, options.length, options.width)
    h, u = (torch.randn(shape).to(options.device, dtype) for _ in range(2))
    u = u / u.float().square().mean().sqrt().to(dtype)

    if options.profile:
        for way in ("plain", "dual", "double_backward"):
            profiled(way, block, h, u)
        return
    with ops.backend(options.backend):
        backends = explain(block, h).backends
        errors = gradient_errors(block, h, u, [name for name in WAYS if name != "plain"])
        rows = summary(measure(block, h, u, options.repeats, WAYS), errors)
    show(rows)
    result = {
        "shape": {k: getattr(options, k) for k in ("width", "heads", "d_ff", "layers", "batch")}
        | {"length": options.length},
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if h.is_cuda else platform.processor() or "cpu",
        "threads": options.threads,
        "torch": torch.__version__,
        "commit": commit(),
        "backends": backends,
        "rows": rows,
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Peak memory of forward + backward on the CPU against the length of the sequence.

    python benchmarks/memory.py [--lengths 512 1024 2048 4096 8192] [--json FILE]

One pre-norm layer (d 128, 2 heads, SwiGLU 352), batch 1, fp32, 1 thread. Each cell is a process of
its own: what its resident memory grew by, at its peak, over the state before the pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

WAYS = ("plain", "dual", "double_backward", "func_jvp")


def grown(way: str, length: int) -> float:
    """MiB that the process grows by in one forward + backward."""
    import resource

    import torch
    from blocks import PreNormLayer, stack
    from ways import WAYS as FUNCTIONS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = stack(PreNormLayer, 1, 128, 2, 352)

    def run(length: int) -> None:
        h, u = torch.randn(1, length, 128), torch.randn(1, length, 128)
        FUNCTIONS[way](block, h, u).backward()

    run(16)  # what loads once is not the pass's own
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(length)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(grown(options.one[0], int(options.one[1])))
        return
    print("| length | " + " | ".join(f"{way}, MiB" for way in WAYS) + " |")
    print("|---" * (len(WAYS) + 1) + "|")
    rows = {}
    for length in options.lengths:
        rows[length] = {}
        for way in WAYS:
            run = [sys.executable, __file__, "--one", way, str(length)]
            out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
            rows[length][way] = round(float(out), 1)
        print(f"| {length} | " + " | ".join(str(rows[length][way]) for way in WAYS) + " |")
    if options.json:
        from ways import commit

        with open(options.json, "w") as file:
            json.dump({"commit": commit(), "MiB": rows}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()

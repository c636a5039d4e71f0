"""Has a change made something slower? Ratios of now against the last recorded ones.

    python -m benchmarks.guard --record [--device cuda]    # once a machine, on a commit to keep
    python -m benchmarks.guard [--margin 0.15]             # afterwards

What is compared is what each of our ways costs over a plain pass, and each of our methods over SFT,
measured in one run: ratios travel between runs of a machine where times do not. A ratio fails where
it is more than `--margin` above the recorded one; noisy machines need more rounds (`--repeats`) or
a wider margin. Records are kept by the class of the machine, processor or GPU and threads, in
results/ratios. Exits with 1 where a ratio fails, with 2 where this class has no record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import op
from benchmarks.block import way_rows
from benchmarks.blocks import SHAPES, build_block
from benchmarks.machine import measured_peaks, usual_dtype, usual_precision
from benchmarks.report import Row, write
from benchmarks.step import measure_steps
from benchmarks.ways import OURS
from stars_fast.base import machine

RECORDS = Path(__file__).parent / "results" / "ratios"
GUARDED_BLOCKS = {"cpu": ("study", "addition"), "cuda": ("ouro", "ouro-8k")}
GUARDED_MODEL = {"cpu": "tiny", "cuda": "ouro"}
GUARDED_STEPS = ("sft", "jsrr", "jsrr-last", "jsrr-last-quarter-micro", "stars")
GUARDED_OPS = ("rms_norm", "swiglu", "attention")


def ratios(device: str, repeats: int, small: bool) -> dict[str, float]:
    """Every ratio that is guarded, by its place."""
    found: dict[str, float] = {}
    dtype = getattr(torch, usual_dtype(device))
    peaks = measured_peaks(device, dtype)
    backend = "cpp" if device == "cpu" else "triton"
    for timed, checked in op.op_cases(device, small):
        if timed.name.partition("-")[0] in GUARDED_OPS:
            rows = op.op_rows(timed, checked, [backend], dtype, device, repeats, peaks)
            if backend not in rows:
                continue
            for way in op.DIRECTIONS:
                row = good(f"{timed.name} {backend}", rows[backend])
                found[f"op/{timed.name}/{way}"] = row[f"{way}_ratio"]
    for name in GUARDED_BLOCKS[device]:
        shape = SHAPES[name].small() if small else SHAPES[name]
        block, h, u = build_block(shape, device, dtype)
        for way, row in way_rows(("plain", *OURS), shape, block, h, u, repeats).items():
            if way in OURS:
                found[f"block/{name}/{way}"] = good(f"{name} {way}", row)["ratio"]
    shape_name = "tiny" if small else GUARDED_MODEL[device]
    precision = "float32" if small else usual_precision(device)
    steps = measure_steps(
        shape_name, device, precision, 64 if small else None, repeats, names=GUARDED_STEPS
    )
    for name, row in steps["methods"].items():
        if name != "sft":
            found[f"step/{shape_name}/{name}"] = good(name, row)["over_own"]
    return found


def good(what: str, row: Row) -> Row:
    """The row, which has figures of something that is right; else the end."""
    if "failed" in row or row.get("wrong"):
        sys.exit(f"{what}: {row.get('failed', 'wrong')}; ratios are of what is right")
    return row


def slower(
    now: dict[str, float], before: dict[str, float], margin: float
) -> dict[str, tuple[float, float]]:
    """The ratios that fail, with those of before; one that is gone fails as well."""
    return {
        name: (now.get(name, float("inf")), old)
        for name, old in before.items()
        if not now.get(name, float("inf")) <= old * (1 + margin)
    }


def machine_class(what: dict[str, Any]) -> str:
    """A file name for machines whose ratios are alike."""
    words = f"{what['device']} {what['threads']} threads"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--margin", type=float, default=0.15)
    parser.add_argument("--record", action="store_true", help="keep these as the last ratios")
    parser.add_argument("--records", type=Path, default=RECORDS, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="tiny sizes: prove the script")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    what = machine.describe(options.device)
    ending = "-small" * options.small
    path = options.records / f"{machine_class(what)}{ending}.json"
    if not options.record and not path.exists():
        print(f"no record for this machine: {path}; make one with --record")
        return 2
    now = ratios(options.device, options.repeats, options.small)
    if options.record:
        write(path, {"machine": what, "repeats": options.repeats, "ratios": now})
        print(f"written: {path}")
        return 0
    kept = json.loads(path.read_text())
    print(f"against {kept['machine']['commit']} of {kept['machine']['date']}")
    for name, ratio in now.items():
        print(f"{name:50} {kept['ratios'].get(name, float('nan')):7.3f} -> {ratio:7.3f}")
    failed = slower(now, kept["ratios"], options.margin)
    for name, (new, old) in failed.items():
        print(f"FAILED {name}: {new:.3f} is more than {options.margin:.0%} above {old:.3f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

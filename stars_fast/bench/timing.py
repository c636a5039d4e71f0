"""Seconds and memory of passes. What is compared takes turns, so that a machine that slows down
slows all alike."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

Run = Callable[[], Any]


def interleaved(
    ways: Mapping[str, Run], repeats: int, device: torch.device | str
) -> dict[str, list[float]]:
    """Wall seconds of each call, `repeats` of each way after one that warms up. The ways take
    turns, and another begins each round."""
    wait = waiter(device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(repeats + 1):
        start = repeat % len(names)
        for name in names[start:] + names[:start]:
            wait()
            begin = time.perf_counter()
            ways[name]()
            wait()
            if repeat:
                times[name].append(time.perf_counter() - begin)
    return times


def waiter(device: torch.device | str) -> Callable[[], None]:
    """What waits for all work on `device`."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def summary(seconds: list[float]) -> dict[str, float]:
    """Median in milliseconds, and the distance of the quartiles over it."""
    median = statistics.median(seconds)
    spread = 0.0
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        spread = (high - low) / median
    return {"ms": round(1e3 * median, 4), "spread": round(spread, 3)}


def cuda_growth(run: Run) -> float:
    """MiB that `run` allocates at its peak on the current CUDA device, over what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def process_growth(run: Run) -> float:
    """MiB that `run` makes this process grow by at its peak. The first such run of a process tells:
    later ones find memory that was not given back."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def in_its_own_process(function: str, timeout: float | None = None, **arguments: Any) -> Any:
    """What `function` ("module:name") returns for the arguments, all of it as JSON.

    Raises RuntimeError with the last lines of what the process said if it fails.
    """
    words = [sys.executable, "-m", "stars_fast.bench.timing", function, json.dumps(arguments)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{function} took more than {timeout} s") from error
    if done.returncode:
        said = " ".join(done.stderr.strip().splitlines()[-1:]) or f"code {done.returncode}"
        raise RuntimeError(f"{function}({arguments}): {said}")
    return json.loads(done.stdout.splitlines()[-1])


def _main() -> None:
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), name)(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    _main()

"""Seconds and memory of passes. What is compared takes turns, so that a machine that slows down
slows all alike."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]
Clock = Callable[[Run], float]
"""Runs once; seconds."""


def interleaved(
    ways: Mapping[str, Run],
    repeats: int,
    device: torch.device | str,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call by `clock` (default: `wall_clock`), `repeats` of each way after one that
    warms up. The ways take turns, and another begins each round."""
    clock = clock or wall_clock(device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(repeats + 1):
        start = repeat % max(len(names), 1)
        for name in names[start:] + names[:start]:
            seconds = clock(ways[name])
            if repeat:
                times[name].append(seconds)
    return times


def wall_clock(device: torch.device | str) -> Clock:
    """Wall seconds from a device at rest to a device at rest: the host's part is in them."""
    wait = waiter(device)

    def clock(run: Run) -> float:
        wait()
        begin = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - begin

    return clock


def process_clock(run: Run) -> float:
    """CPU seconds of this process, which other work on the machine moves less than wall seconds."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def device_clock(device: torch.device | str) -> Clock:
    """Seconds on the device's own clock, with a cold cache and without the first millisecond that
    the host takes to launch; on the CPU `wall_clock`."""
    if torch.device(device).type != "cuda":
        return wall_clock(device)
    flush = torch.empty(2**28, dtype=torch.int8, device=device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def clock(run: Run) -> float:
        flush.zero_()
        torch.cuda._sleep(2_000_000)  # about 1 ms in which the host runs ahead
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3

    return clock


def waiter(device: torch.device | str) -> Callable[[], None]:
    """A function that waits for all work on `device`."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def summary(seconds: list[float]) -> dict[str, float]:
    """Median in milliseconds, and the distance of the quartiles over it."""
    median = statistics.median(seconds)
    spread = 0.0
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        spread = (high - low) / median
    return {"ms": round(1e3 * median, 4), "spread": round(spread, 3)}


def ratio(seconds: Sequence[float], unit: Sequence[float]) -> float:
    """Time of one way over another, timed in turns: the median over the rounds, each of which
    compares neighbours in time."""
    return statistics.median(s / u for s, u in zip(seconds, unit, strict=True))


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
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = _peak_kib()
    run()
    return (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    """The peak of this process's resident memory. Linux counts the parent's in ru_maxrss."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def in_its_own_process(function: str, timeout: float | None = None, **arguments: Any) -> Any:
    """Result of `function` ("module:name") for the arguments, all of it as JSON.

    Raises:
        RuntimeError: it failed; with the last line of what the process said, or its signal.
    """
    words = [sys.executable, "-m", "benchmarks.timing", function, json.dumps(arguments)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{function} took more than {timeout} s") from error
    if done.returncode < 0:
        raise RuntimeError(f"killed by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _main() -> None:
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), name)(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    _main()

"""Kill a run with SIGKILL again and again, in each of its phases, resume it each time, and compare
it with one that was left alone: metrics, results, weights and optimiser state must agree to the
last bit.

    python -m benchmarks.kill_resume --kills 40 --processes 2

The kills come while the chats are tokenised, in the first save, in steps, later saves and
evaluations, and after the last step. In some attempts the disk is full at a random save, and free
again once the run has said so: by a limit on the size of files, or with --disk in earnest. The
processes of an attempt are forked from a server that has imported what they need and done nothing
else. The last line of the output is JSON.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from benchmarks import phases
from stars_fast.base.checkpoints import checkpoints, latest, saved_tensors, step_of
from stars_fast.training.run.metrics import read_metrics

TIMES = ("tokens_per_second", "memory_gib", "mfu")
SAVE_EVERY, EVALUATE_EVERY = 5, 6
IMPORTED = ["benchmarks.phases", "stars_fast.models.ouro"]
"""Modules that the server imports; a run imports the last one late."""
DELAYS = {"tokenising": 0.3, "save": 0.03, "step": 0.1, "evaluation": 0.1, "end": 0.3}
"""Seconds within which the kill comes, once the phase has begun."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--packing", choices=("true", "false"), default="true")
    parser.add_argument("--parallel", choices=("auto", "ddp", "fsdp"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--disk", type=Path, help="a file system to fill, of some 20 MB, such as a tmpfs"
    )
    args = parser.parse_args()
    schedule = schedule_of(args.kills)
    steps = 14 * sum(phase in ("step", "save", "evaluation") for phase, _ in schedule) + 14
    with tempfile.TemporaryDirectory() as folder:
        runs = Runner(Path(folder), args, steps)
        straight = Path(folder) / "straight"
        killed = (args.disk or Path(folder)) / "killed"
        shutil.rmtree(killed, ignore_errors=True)
        assert runs.whole(straight) == 0, runs.said()
        rng = random.Random(args.seed)
        kills: Counter[str] = Counter()
        full = 0
        for phase, fill in schedule:
            before = newest(killed)
            runs.killed(killed, phase, rng, fill)
            full += fill
            kills["first save" if phase == "save" and not before else phase] += 1
            check(killed, before)
        assert runs.whole(killed) == 0, runs.said()
        same = compare(straight, killed, steps)
        left = [*runs.cache.glob("chats/*.*/"), *killed.glob("checkpoints/[!s]*")]
    result = {
        "kills": dict(kills),
        "full_disks": full,
        "disk": "in earnest" if args.disk else "limit",
        "processes": args.processes,
        "packing": args.packing == "true",
        "parallel": args.parallel,
        "steps": steps,
        "identical": same,
        "left": [path.name for path in left],
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    return 0 if same and not left else 1


def schedule_of(kills: int) -> list[tuple[str, bool]]:
    """Phases to be killed in, and whether the disk is full at a save before."""
    ends = max(1, kills // 8)
    starts = ["tokenising", "save"] * ends  # before there is a checkpoint
    middle = ["step", "save", "evaluation", "tokenising", "step"]
    between = (middle * kills)[: kills - 3 * ends]
    fills = [phase == "step" and index % 5 == 0 for index, phase in enumerate(between)]
    return [
        *((phase, False) for phase in starts),
        *zip(between, fills, strict=True),
        *[("end", False)] * ends,
    ]


class Runner:
    """Starts runs of a tiny Ouro as one or more processes."""

    def __init__(self, folder: Path, args: argparse.Namespace, steps: int) -> None:
        self.processes = args.processes
        self.disk = args.disk
        self.cache = folder / "cache"
        self.phases, self.output = folder / "phases", folder / "output"
        self.server = multiprocessing.get_context("forkserver")
        self.server.set_forkserver_preload(IMPORTED)
        os.environ["OMP_NUM_THREADS"] = "1"  # which the server reads as it imports torch
        self.options = f"""
            ouro-tiny --steps {steps} --width 32 --samples 60 --validation 8 --data.max_length 192
            --packing {args.packing} --workers 1 --data.cache {self.cache}
            --batch_size 4 --accumulation {2 // min(args.processes, 2)} --threads 1 --log_every 1
            --save_every {SAVE_EVERY} --keep 2 --parallel.kind {args.parallel} --report_to none
            --eval.turns 1,2 --eval.every {EVALUATE_EVERY}
        """.split()

    def said(self) -> str:
        """The output of the last attempt."""
        return self.output.read_text()

    def start(self, out: Path) -> list[ForkServerProcess]:
        """The processes of an attempt on the run in `out`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.phases.write_text("")
        self.output.write_text("")
        resume = ["--resume"] if (out / "config.yaml").exists() else []
        words = ["train", *self.options, "--out", str(out), *resume]
        started = []
        for rank in range(self.processes):
            world = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.processes,
                "LOCAL_WORLD_SIZE": self.processes,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "PHASES": self.phases if rank == 0 else os.devnull,
            }
            environment = {name: str(value) for name, value in world.items()}
            arguments = (words, environment, str(self.output))
            started.append(self.server.Process(target=phases.attempt, args=arguments))
            started[-1].start()
        return started

    def whole(self, out: Path) -> int:
        """Run to the end; the worst exit code."""
        processes = self.start(out)
        for process in processes:
            process.join()
        return max(abs(process.exitcode or 0) for process in processes)

    def killed(self, out: Path, phase: str, rng: random.Random, fill: bool) -> None:
        """One attempt that is killed in `phase`, with `fill` after a save that failed."""
        if phase == "tokenising":
            shutil.rmtree(self.cache, ignore_errors=True)
        times = {"step": rng.randint(1, 10), "save": rng.randint(1, 2)}.get(phase, 1)
        if phase == "save" and not newest(out):
            times = 1  # the first of the run
        processes = self.start(out)
        if fill:
            self._fill_disk(processes, rng)
            times += len(self._seen(phase))
        while len(self._seen(phase)) < times:
            self._go_on(processes)
        time.sleep(rng.uniform(0, DELAYS[phase]))
        for process in processes:
            process.kill()
        for process in processes:
            process.join()

    def _fill_disk(self, processes: list[ForkServerProcess], rng: random.Random) -> None:
        """Have no room on the disk when a save comes, until the run has said so."""
        saves = rng.randint(1, 2)
        while sum((step + 1) % SAVE_EVERY == 0 for step in self._steps()) < saves:
            self._go_on(processes)
        self._limit(processes, full=True)
        while "could not be written" not in self.said():
            self._go_on(processes)
        self._limit(processes, full=False)

    def _limit(self, processes: list[ForkServerProcess], full: bool) -> None:
        if self.disk is None:
            most = 20_000 if full else resource.RLIM_INFINITY
            for process in processes:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        elif full:
            with suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))
        else:
            (self.disk / "filler").unlink()

    def _seen(self, phase: str) -> list[str]:
        return [line for line in self.phases.read_text().splitlines() if line.startswith(phase)]

    def _steps(self) -> list[int]:
        """Steps of this attempt that have begun; a line that is being written does not count."""
        text = self.phases.read_text().rpartition("\n")[0]
        return [int(line.split()[1]) for line in text.splitlines() if line.startswith("step")]

    def _go_on(self, processes: list[ForkServerProcess]) -> None:
        assert all(process.is_alive() for process in processes), self.said()
        time.sleep(0.001)


def newest(out: Path) -> int:
    path = latest(out / "checkpoints")
    return 0 if path is None else step_of(path)


def check(out: Path, before: int) -> None:
    """Whether a kill has left the checkpoints there were, and the metrics up to the newest."""
    step = newest(out)
    assert step >= before, f"after step {before} was saved the newest checkpoint is of step {step}"
    if step:
        rows = [row["step"] for row in read_metrics(out / "metrics.jsonl")]
        assert rows[:step] == list(range(1, step + 1)), f"metrics up to {step} have {rows}"


def compare(straight: Path, killed: Path, steps: int) -> bool:
    """Whether metrics, results, weights and optimiser state at the end are the same, bit for
    bit."""
    rows = []
    for out in (straight, killed):
        rows.append(read_metrics(out / "metrics.jsonl"))
        for row in rows[-1]:
            for name in TIMES:
                row.pop(name)
    tensors = [saved_tensors(checkpoints(out / "checkpoints")[steps]) for out in (straight, killed)]
    return (
        rows[0] == rows[1]
        and (straight / "results.json").read_text() == (killed / "results.json").read_text()
        and tensors[0].keys() == tensors[1].keys()
        and all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    )


if __name__ == "__main__":
    sys.exit(main())

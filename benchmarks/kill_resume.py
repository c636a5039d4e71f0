"""Kill a run with SIGKILL again and again, resume it each time, and compare it with one that was
left alone: metrics, weights and optimiser state must agree to the last bit.

    python -m benchmarks.kill_resume --kills 20 --processes 2 --packing true

Half of the kills come at a random moment between 0 and 2 s after a step of the new attempt, the
other half while a checkpoint is being written. The last line of the output is JSON.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from stars_fast.base.checkpoints import checkpoints, latest, saved_tensors
from stars_fast.training.run.metrics import read_metrics

TIMES = ("tokens_per_second", "memory_gib", "mfu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--packing", choices=("true", "false"), default="true")
    parser.add_argument("--parallel", choices=("auto", "ddp", "fsdp"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="default: 10 a kill, 40 more")
    args = parser.parse_args()
    steps = args.steps or 10 * args.kills + 40
    with tempfile.TemporaryDirectory() as folder:
        run = Runner(Path(folder), args, steps)
        straight, killed = Path(folder) / "straight", Path(folder) / "killed"
        assert run.whole(straight) == 0, "the run that is left alone failed"
        rng = random.Random(args.seed)
        during_saves = lost = 0
        kills = 0
        while kills < args.kills:
            in_save = kills % 2 == 1
            before, after, hit = run.killed(killed, rng, in_save)
            if before is None:
                break  # it ended first
            kills += 1
            during_saves += hit
            lost = max(lost, before - after)
        assert run.whole(killed) == 0, "the last attempt failed"
        same = compare(straight, killed, steps)
    result = {
        "kills": kills,
        "during_saves": during_saves,
        "most_steps_lost": lost,
        "save_every": run.save_every,
        "processes": args.processes,
        "packing": args.packing == "true",
        "parallel": args.parallel,
        "steps": steps,
        "identical": same,
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    return 0 if same and kills == args.kills and lost <= run.save_every + 1 else 1


class Runner:
    """Starts runs of a tiny Ouro as one or more processes."""

    save_every = 7

    def __init__(self, folder: Path, args: argparse.Namespace, steps: int) -> None:
        self.processes = args.processes
        self.options = f"""
            ouro-tiny --steps {steps} --width 32 --samples 60 --validation 0 --data.max_length 192
            --packing {args.packing} --workers 1 --data.cache {folder / "cache"}
            --batch_size 4 --accumulation {2 // min(args.processes, 2)} --threads 1
            --log_every 1 --save_every {self.save_every} --parallel.kind {args.parallel}
            --report_to none --eval.turns=
        """.split()

    def start(self, out: Path) -> list[subprocess.Popen]:
        """The processes of an attempt on the run in `out`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "stars_fast.cli", "train", *self.options]
        started = []
        for rank in range(self.processes):
            world = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.processes,
                "LOCAL_WORLD_SIZE": self.processes,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
            }
            environment = os.environ | {name: str(value) for name, value in world.items()}
            started.append(
                subprocess.Popen(
                    [*command, "--out", str(out), "--resume"],
                    env=environment,
                    stderr=subprocess.DEVNULL,
                )
            )
        return started

    def whole(self, out: Path) -> int:
        """Run to the end; the worst exit code."""
        return max(process.wait() for process in self.start(out))

    def killed(self, out: Path, rng: random.Random, in_save: bool) -> tuple[int | None, int, bool]:
        """One attempt that is killed: the last step before, the step that is left, and whether a
        checkpoint was being written. The first is None if the run ended first."""
        begun, starts = checkpoint_step(latest(out / "checkpoints")), attempts(out)
        processes = self.start(out)
        while attempts(out) == starts or last_step(out) <= begun:
            if processes[0].poll() is not None:
                return None, 0, False
            time.sleep(0.005)
        until = time.monotonic() + rng.uniform(0.0, 2.0)
        while time.monotonic() < until:
            time.sleep(0.001)
        while in_save and not list((out / "checkpoints").glob("writing-*")):
            if processes[0].poll() is not None:
                return None, 0, False
            time.sleep(0.0005)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()
        hit = bool(list((out / "checkpoints").glob("writing-*")))
        return last_step(out), checkpoint_step(latest(out / "checkpoints")), hit


def last_step(out: Path) -> int:
    path = out / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


def attempts(out: Path) -> int:
    path = out / "environment.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def checkpoint_step(path: Path | None) -> int:
    return 0 if path is None else int(path.name.rpartition("-")[2])


def compare(straight: Path, killed: Path, steps: int) -> bool:
    """Whether metrics, weights and optimiser state at the end are the same, bit for bit."""
    rows = []
    for out in (straight, killed):
        rows.append(read_metrics(out / "metrics.jsonl"))
        for row in rows[-1]:
            for name in TIMES:
                row.pop(name)
    tensors = [saved_tensors(checkpoints(out / "checkpoints")[steps]) for out in (straight, killed)]
    return (
        rows[0] == rows[1]
        and tensors[0].keys() == tensors[1].keys()
        and all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    )


if __name__ == "__main__":
    sys.exit(main())

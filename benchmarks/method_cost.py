"""What each method costs over SFT at four turns: whole training steps of an Ouro, all methods
taking turns in one run, on random weights and random chats.

    python benchmarks/method_cost.py --shape tiny --repeats 20
    python benchmarks/method_cost.py --shape ouro --device cuda --precision mixed --tokens 8192

A step is everything that the trainer does in one: four micro-batches forward and backward, the
gradient's norm, clipping, AdamW. `expected` is what the banner says. The last line of the output is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from typing import Any

import numpy as np
import torch

from stars_fast.models.ouro import OuroConfig, OuroForCausalLM
from stars_fast.training.batches import Batches
from stars_fast.training.chats import PackedChats
from stars_fast.training.config import config_from
from stars_fast.training.cost import relative_cost
from stars_fast.training.distributed import World
from stars_fast.training.metrics import peak_flops, peak_memory
from stars_fast.training.optim import make_optimizer
from stars_fast.training.ouro import Config, OuroLoop
from stars_fast.training.precision import parameter_dtype
from stars_fast.training.step import StepLoss, plan_step, train_step

MICROS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "ouro": {},
}
FIXED = {"law": "fixed", "value": 4}
LAW = {"law": "lognormal", "mu": 1.7, "sigma": 0.4, "high": 16, "stratified": True}
METHODS: dict[str, dict[str, Any]] = {
    "sft": {"method": "sft", "depth": FIXED},
    "random-loop": {"method": "random-loop", "depth": LAW},
    "jsrr": {"method": "jsrr", "depth": FIXED},
    "stars": {"method": "stars", "depth": LAW},
    "jsrr, last": {
        "method": "jsrr",
        "depth": FIXED,
        "penalty": {"at": "last", "detach": False},
    },
    "jsrr, last, 1/4": {
        "method": "jsrr",
        "depth": FIXED,
        "penalty": {"at": "last", "detach": False, "fraction": 0.25},
    },
    "stars, last, 1/4": {
        "method": "stars",
        "depth": LAW,
        "penalty": {"at": "last", "detach": False, "fraction": 0.25},
    },
}


class RandomChats:
    """Documents of random tokens, of log-normal length; three quarters of each are targets."""

    def __init__(self, count: int, longest: int, vocabulary: int) -> None:
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(np.log(longest / 4), 0.6, count)
        self.lengths = lengths.clip(8, longest).astype(np.int64)
        self._tokens = [rng.integers(3, vocabulary, n).astype(np.int32) for n in self.lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._tokens[index]
        return tokens, np.arange(len(tokens)) >= len(tokens) // 4


class Steps:
    """The training steps of one method on a model that all methods share."""

    def __init__(self, config: Config, model: Any, chats: RandomChats, world: World) -> None:
        self.config = config
        self.world = world
        source = PackedChats(chats, config.data.max_length, 0)
        train = config.train
        self.batches = Batches(source, 0, train.batch_size, train.accumulation, 0, 1, world.device)
        self.loop = OuroLoop(model)
        self.loss = StepLoss(self.loop, config)
        self.optimizer = make_optimizer(config.optim, model)
        self.seconds: list[float] = []
        self.turns: list[float] = []

    def run(self, step: int, timed: bool) -> None:
        window = self.batches.window(step)
        plan = plan_step(self.config, step)
        self._wait()
        begin = time.perf_counter()
        train_step(self.loss, self.optimizer, self.config, window, plan, self.world)
        self._wait()
        if timed:
            self.seconds.append(time.perf_counter() - begin)
            self.turns.append(sum(plan.turns) / len(plan.turns))

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def expected(self) -> float:
        window = self.batches.window(0)
        share = sum(len(b.labels) for b in window) / sum(b.tokens.numel() for b in window)
        return relative_cost(self.config, self.loop.outside_block(share))

    def flops(self) -> float:
        """Of one turn forward of a step's tokens."""
        return sum(
            self.loop.turn_flops(b.samples.lengths(b.tokens.shape[1]))
            for b in self.batches.window(0)
        )


def measure(
    shape: str,
    device: str,
    precision: str,
    tokens: int,
    repeats: int,
    layers: int | None = None,
    names: tuple[str, ...] = tuple(METHODS),
) -> dict[str, Any]:
    """Seconds a step of every method, and over SFT."""
    fields = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    torch.manual_seed(0)
    with torch.device(device):
        model = OuroForCausalLM(OuroConfig(**fields)).to(parameter_dtype(precision)).train()
    world = World(0, 1, torch.device(device))
    chats = RandomChats(400, tokens, model.config.vocab_size)
    runs = {}
    for name in names:
        config = config_from(
            {
                "task": "ouro",
                "precision": precision,
                "data": {"source": "random", "max_length": tokens},
                "optim": {"lr": 1e-6},
                "train": {"steps": 1000, "batch_size": MICROS, "accumulation": MICROS},
                **METHODS[name],
            }
        )
        runs[name] = Steps(config, model, chats, world)
    for step in range(repeats + 1):
        for run in runs.values():
            # One set of averages at a time is enough: a step's time does not depend on them.
            run.optimizer = runs[names[0]].optimizer
            run.run(step, timed=step > 0)
    unit = statistics.median(runs["sft"].seconds)
    peak = peak_flops(world.device, precision)
    table = {}
    for name, run in runs.items():
        seconds = statistics.median(run.seconds)
        entry = {
            "seconds": round(seconds, 4),
            "spread": round(statistics.pstdev(run.seconds) / seconds, 3),
            "turns": round(statistics.fmean(run.turns), 2),
            "over_sft": round(seconds / unit, 3),
            "expected": round(run.expected(), 3),
        }
        if peak is not None and name == "sft":
            entry["mfu"] = round(3 * run.flops() * 4 / seconds / peak, 3)
        table[name] = entry
    return {
        "shape": shape,
        "layers": model.config.num_hidden_layers,
        "tokens_a_micro_batch": tokens,
        "micro_batches": MICROS,
        "precision": precision,
        "repeats": repeats,
        "memory_gib": round(peak_memory(world.device) / 2**30, 2),
        "methods": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch, at most")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(
        options.shape,
        options.device,
        options.precision,
        options.tokens,
        options.repeats,
        options.layers,
    )
    for name, entry in result["methods"].items():
        print(f"{name:18} " + "  ".join(f"{key} {value}" for key, value in entry.items()))
    commit = ["git", "describe", "--always", "--dirty"]
    print(
        json.dumps(
            result
            | {
                "torch": torch.__version__,
                "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
                "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
                "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                "threads": options.threads,
            }
        )
    )


if __name__ == "__main__":
    main()

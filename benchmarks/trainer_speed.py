"""Tokens per second of this package's trainer over transformers' Trainer: SFT of a tiny Ouro on the
same samples, both in turns in one run.

    python -m benchmarks.trainer_speed [--repeats 5] [--steps 20] [--batch 4] [--length 64]

fp32, one thread, one process, fused AdamW without decay, gradient norm and clipping, four turns.
"padded" has the same padded micro-batches in both; "packed" has the same samples, packed in ours.
Tokens are real ones, without pads. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stars_fast.base.machine import describe
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.batches import HostBatch
from stars_fast.data.kinds import OpenData
from stars_fast.models.ouro.losses import next_tokens
from stars_fast.tokens import packed_tokens, padded_tokens
from stars_fast.training.config import config_from
from stars_fast.training.run.metrics import read_metrics
from stars_fast.training.run.task import Task
from stars_fast.training.run.trainer import Trainer
from stars_fast.training.scale.distributed import processes

LR, CLIP = 1e-4, 1.0


class Size(NamedTuple):
    """Optimiser steps that are timed, those before them, micro-batches of each."""

    steps: int
    warmup: int
    accumulation: int


def transformers_rate(
    checkpoint: str | Path,
    micros: Sequence[dict[str, Tensor]],
    size: Size,
) -> float:
    """Tokens per second of the optimiser steps after the warm-up.

    `micros` are dictionaries of input_ids, labels (not shifted) and attention_mask, [B, S] each,
    used in their order and over again; `accumulation` of them make a step. The model runs at the
    checkpoint's own number of turns, on the CPU.

    Raises:
        ValueError: `micros` is not a whole number of steps, or without a warm-up.
    """
    steps, warmup, accumulation = size
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from stars_fast.models.ouro import OuroForCausalLM

    if warmup < 1 or steps < 1:
        raise ValueError(f"warmup, steps: expected at least 1, got {warmup} and {steps}")
    if not micros or len(micros) % accumulation:
        raise ValueError(f"micros: expected a multiple of {accumulation}, got {len(micros)}")

    class Given(Trainer):
        def get_train_dataloader(self):
            return DataLoader(list(micros), batch_size=1, collate_fn=lambda rows: dict(rows[0]))

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (warmup, warmup + steps):
                times.append(time.perf_counter())

    times: list[float] = []
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out, max_steps=warmup + steps, gradient_accumulation_steps=accumulation,
            learning_rate=LR, weight_decay=0.0, max_grad_norm=CLIP, lr_scheduler_type="constant",
            optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        model = OuroForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        Given(model, arguments, callbacks=[Clock()]).train()
    used = [micros[i % len(micros)] for i in range(accumulation * (warmup + steps))]
    tokens = sum(int(micro["attention_mask"].sum()) for micro in used[accumulation * warmup :])
    return tokens / (times[1] - times[0])


class Given:
    """The rows of micro-batches as a source."""

    def __init__(self, micros: Sequence[dict[str, Tensor]], packing: bool) -> None:
        self.packing = packing
        self.rows = [
            {name: tensor[i] for name, tensor in micro.items()}
            for micro in micros
            for i in range(len(micro["input_ids"]))
        ]
        self.longest = len(self.rows[0]["input_ids"])

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, units: np.ndarray) -> np.ndarray:
        return np.ones_like(units)

    def fingerprint(self) -> int:
        return 0  # it is never resumed

    def largest_token(self) -> int:
        return max(int(row["input_ids"].max()) for row in self.rows)

    def batch(self, units: np.ndarray) -> HostBatch:
        rows = [self.rows[unit] for unit in units]
        tokens, labels, mask = (
            torch.stack([row[name] for row in rows])
            for name in ("input_ids", "labels", "attention_mask")
        )
        real = mask.bool()
        targets = next_tokens(labels, real)
        if not self.packing:
            return HostBatch(tokens, targets, padded_tokens(real))
        samples = packed_tokens(mask.sum(1).tolist())
        return HostBatch(tokens[real][None], targets[real][None], samples)


def our_rate(
    checkpoint: str | Path,
    micros: Sequence[dict[str, Tensor]],
    packing: bool,
    size: Size,
) -> float:
    """The same of this package's trainer, with its metrics and its log; the rows come in the order
    of the trainer's own shuffle."""

    steps, warmup, accumulation = size

    class GivenTask(Task):
        def _open(self):
            return OpenData(Given(micros, packing), None, "samples")

    with tempfile.TemporaryDirectory() as folder, processes("cpu") as world:
        config = config_from(
            {
                "task": "ouro", "method": "sft", "precision": "float32",
                "out": f"{folder}/run",
                "model": {"path": str(checkpoint)}, "data": {"source": "given"},
                "depth": {"law": "fixed", "value": 4},
                "optim": {"lr": LR, "weight_decay": 0.0, "clip": CLIP, "schedule": "wsd"},
                "train": {
                    "steps": warmup + steps, "accumulation": accumulation,
                    "batch_size": accumulation * len(micros[0]["input_ids"]), "report_to": [],
                    "log_every": warmup, "save_every": 0, "device": "cpu", "threads": 1,
                },
                "eval": {"turns": []},
            }
        )  # fmt: skip
        run = RunFolder(config.out)
        task = GivenTask(config, world)
        trainer = Trainer(config, task, run, world)
        trainer._draw = lambda *_: None
        trainer.run()
        rows = read_metrics(run.metrics)
    done = [row["tokens"] for row in rows]
    tokens = [after - before for before, after in pairwise(done)]
    seconds = [n / row["tokens_per_second"] for n, row in zip(tokens, rows[1:], strict=True)]
    return sum(tokens) / sum(seconds)


def random_micros(count: int, batch: int, length: int) -> list[dict[str, Tensor]]:
    """Micro-batches of random tokens, padded on the right by up to a third."""
    generator = torch.Generator().manual_seed(0)
    micros = []
    for _ in range(count):
        ids = torch.randint(3, 300, (batch, length), generator=generator)
        short = torch.randint(0, length // 3, (batch, 1), generator=generator)
        short[0] = 0
        mask = (torch.arange(length) < length - short).long()
        labels = torch.where(mask.bool(), ids, -100)
        micros.append({"input_ids": ids * mask, "labels": labels, "attention_mask": mask})
    return micros


def main() -> None:
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    micros = random_micros(4 * options.accumulation, options.batch, options.length)
    size = Size(options.steps, options.warmup, options.accumulation)
    rates: dict[str, list[float]] = {"transformers": [], "padded": [], "packed": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_ouro(Path(folder) / "ouro", hidden_size=64, intermediate_size=128)
        for repeat in range(options.repeats):
            names = list(rates)
            for name in names if repeat % 2 else names[::-1]:  # no one always comes first
                if name == "transformers":
                    rate = transformers_rate(checkpoint, micros, size)
                else:
                    rate = our_rate(checkpoint, micros, name == "packed", size)
                rates[name].append(rate)
    import transformers

    def over_transformers(name: str) -> dict[str, float]:
        ratios = [a / b for a, b in zip(rates[name], rates["transformers"], strict=True)]
        return {
            "median": round(statistics.median(ratios), 3),
            "low": round(min(ratios), 3),
            "high": round(max(ratios), 3),
        }

    result = {
        "tokens_per_second": {name: round(statistics.median(each)) for name, each in rates.items()},
        "over_transformers": {name: over_transformers(name) for name in ("padded", "packed")},
        "repeats": options.repeats,
        "batch": [options.batch, options.length],
        **size._asdict(),
        "transformers": transformers.__version__,
        "machine": describe("cpu"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

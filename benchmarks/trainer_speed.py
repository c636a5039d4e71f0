"""Tokens per second of transformers' Trainer, SFT of an Ouro on given micro-batches.

    python benchmarks/trainer_speed.py [--steps 20] [--warmup 5] [--batch 4] [--length 64]

fp32, one thread, one process, fused AdamW without decay. Tokens are real ones, without pads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def transformers_rate(
    checkpoint: str | Path,
    micros: Sequence[dict[str, Tensor]],
    *,
    steps: int,
    warmup: int,
    accumulation: int = 1,
    lr: float = 1e-4,
    clip: float = 1.0,
) -> float:
    """Tokens per second of `steps` optimiser steps after `warmup` of them.

    `micros` are dictionaries of input_ids, labels (not shifted) and attention_mask, [B, S] each,
    used in their order and over again; `accumulation` of them make a step. The model runs at the
    checkpoint's own number of turns, on the CPU.

    Raises ValueError if `micros` is not a whole number of steps, or without a warm-up.
    """
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
            learning_rate=lr, weight_decay=0.0, max_grad_norm=clip, lr_scheduler_type="constant",
            optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        model = OuroForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        Given(model, arguments, callbacks=[Clock()]).train()
    used = [micros[i % len(micros)] for i in range(accumulation * (warmup + steps))]
    tokens = sum(int(micro["attention_mask"].sum()) for micro in used[accumulation * warmup :])
    return tokens / (times[1] - times[0])


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
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    micros = random_micros(4 * options.accumulation, options.batch, options.length)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_ouro(Path(folder) / "ouro", hidden_size=64, intermediate_size=128)
        rate = transformers_rate(
            checkpoint,
            micros,
            steps=options.steps,
            warmup=options.warmup,
            accumulation=options.accumulation,
        )
    print(json.dumps({"transformers_tokens_per_second": round(rate, 1)}))


if __name__ == "__main__":
    main()

"""Runs of the Ouro trainer, one after the other: python ouro.py CONFIG ...

Beside each run's folder the gradient of its first step is written as NAME.grad.pt. A run whose
folder is there goes on; what befalls one that begins is in its name. "killed": kill -9 on every
rank as step 7 begins and the checkpoint of step 5 is there, which is written beside the steps.
"lost": an error then, after which the next run follows.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from stars_fast.training.config import load_config
from stars_fast.training.run import trainer

real_step = trainer.train_step


class Lost(Exception):
    """Ends a run in the middle of it."""


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_step(step_loss, optimizer, config, window, plan, world):
    if plan.step == 7 and not resumes:
        if "killed" in config.name:
            while not Path(config.out, "checkpoints", "step-000005").is_dir():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if "lost" in config.name:
            raise Lost
    stats = real_step(step_loss, optimizer, config, window, plan, world)
    if plan.step == 0:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradient = [whole(p.grad) for p in parameters]
        if world.first:
            torch.save(gradient, f"{config.out}.grad.pt")
    return stats


trainer.train_step = train_step
trainer.Trainer._draw = lambda *_: None  # figures take longer than these runs
if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # one group for all runs
    torch.distributed.init_process_group("gloo")
for path in sys.argv[1:]:
    config = load_config(path)
    resumes = Path(config.out).exists()
    with suppress(Lost):
        trainer.train(config, resume=resumes)

"""Runs one after the other: python runs.py CONFIG ... What befalls a run is in its name.

"double": in double precision. "nan": a loss that is not a number in step 2, on the last rank.
"killed": kill -9 on every rank as step 7 begins and the checkpoint of step 5 is there, which is
written beside the steps. "signalled": SIGTERM on the last rank in step 3.
"""

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from stars_fast.models.families import looped_lm
from stars_fast.training.config import load_config
from stars_fast.training.graphs.recorder import stand_in
from stars_fast.training.run import trainer

real_loss, real_step = looped_lm.token_loss, trainer.train_step
poisoned = False


def token_loss(*args):
    return real_loss(*args) * (float("nan") if poisoned else 1.0)


def train_step(step_loss, optimizer, config, window, plan, world):
    global poisoned
    last = world.rank == world.size - 1
    poisoned = "nan" in config.name and plan.step == 2 and last
    if "killed" in config.name and plan.step == 7:
        while not Path(config.out, "checkpoints", "step-000005").is_dir():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if "signalled" in config.name and plan.step == 3 and last:
        signal.raise_signal(signal.SIGTERM)
    return real_step(step_loss, optimizer, config, window, plan, world)


looped_lm.token_loss, trainer.train_step = token_loss, train_step
trainer.Trainer._draw = lambda *_: None  # figures take longer than these runs
if int(os.environ["WORLD_SIZE"]) > 1:  # one group for all runs
    torch.distributed.init_process_group("gloo")
for path in sys.argv[1:]:
    config = load_config(path)
    torch.set_default_dtype(torch.float64 if "double" in config.name else torch.float32)
    with stand_in() if config.train.graphs == "on" else nullcontext():
        trainer.train(config)

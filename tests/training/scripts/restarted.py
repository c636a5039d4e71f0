"""`stars-fast` under torchrun, whose processes die in the second step of their first start."""

import os
import signal
import sys

from stars_fast.cli import main
from stars_fast.training.run import trainer

train_step = trainer.train_step


def dies(loss, optimizer, config, window, plan, world):
    if plan.step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(loss, optimizer, config, window, plan, world)


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    trainer.train_step = dies
sys.exit(main(sys.argv[1:]))

"""tiny_study.py RUN STEP WORDS: `python -m studies tiny WORDS`, killed as RUN begins STEP."""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]
torch.set_num_threads(1)

from studies_tiny import TINY  # noqa: E402

from stars_fast.training.run import trainer  # noqa: E402
from studies import __main__ as command  # noqa: E402
from studies.definition import parse_study  # noqa: E402


def main(run, step, *words):
    train_step = trainer.train_step

    def killed(step_loss, optimizer, config, window, plan, world):
        if config.name == run and plan.step + 1 == int(step):
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(step_loss, optimizer, config, window, plan, world)

    trainer.train_step = killed
    trainer.Trainer._draw = lambda *_: None
    command.read_study = lambda name: parse_study(name, TINY)
    return command.main(["tiny", *words])


sys.exit(main(*sys.argv[1:]))

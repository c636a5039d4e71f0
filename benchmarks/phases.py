"""`stars-fast`, with a line in the file PHASES for each phase that a run comes to, so that another
process can kill it there: python -m benchmarks.phases train ..."""

import os
import sys

from stars_fast.cli import main
from stars_fast.data import tokenised
from stars_fast.training.run import task, trainer
from stars_fast.training.run.checkpoint import Checkpoints


def announced(phase, call):
    def announce(*args):
        where = f"{phase} {args[4].step}" if phase == "step" else phase
        with open(os.environ["PHASES"], "a") as file:
            file.write(f"{where}\n")
        return call(*args)

    return announce


for owner, name, phase in (
    (tokenised, "_write_splits", "tokenising"),
    (Checkpoints, "_begin", "save"),
    (trainer, "train_step", "step"),
    (task.TextJudge, "results", "evaluation"),
    (trainer.Trainer, "_finish", "end"),
):
    setattr(owner, name, announced(phase, getattr(owner, name)))

if __name__ == "__main__":
    sys.exit(main())

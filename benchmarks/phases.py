"""`stars-fast`, with a line in the file PHASES for each phase that a run comes to, so that another
process can kill it there."""

import os
import sys

from stars_fast.cli import main
from stars_fast.data import tokenised
from stars_fast.training.run import task, trainer
from stars_fast.training.run.checkpoint import Checkpoints

PHASES = (
    (tokenised, "_write_splits", "tokenising"),
    (Checkpoints, "_begin", "save"),
    (trainer, "train_step", "step"),
    (task.TextJudge, "results", "evaluation"),
    (trainer.Trainer, "_finish", "end"),
)


def attempt(words: list[str], environment: dict[str, str], output: str) -> None:
    """`stars-fast` with these words in this process, its standard error at the end of `output`."""
    os.environ.update(environment)
    with open(output, "a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    for owner, name, phase in PHASES:
        setattr(owner, name, announced(phase, getattr(owner, name)))
    sys.exit(main(words))


def announced(phase, call):
    def announce(*args):
        where = f"{phase} {args[4].step}" if phase == "step" else phase
        with open(os.environ["PHASES"], "a") as file:
            file.write(f"{where}\n")
        return call(*args)

    return announce

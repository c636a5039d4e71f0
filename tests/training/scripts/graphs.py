"""Runs with graphs whose captures fail on the last process: python graphs.py FOLDER CONFIG ...

"trial": from the first one on. "later": once the trials and one pair have been captured. What a run
of that configuration raises is written to FOLDER as NAME-RANK.txt, nothing if it ends well.
"""

import sys
from pathlib import Path

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.training.config import load_config
from stars_fast.training.graphs import set_up
from stars_fast.training.graphs.recorder import StandIn, stand_in
from stars_fast.training.run import trainer


class Fails(StandIn):
    """Captures so many functions, and then no more."""

    def __init__(self, works):
        self.works = works

    def record(self, run):
        self.works -= 1
        if self.works < 0:
            raise RuntimeError("operation not permitted when a stream is capturing")
        return run


trainer.Trainer._draw = lambda *_: None  # figures take longer than these runs
torch.distributed.init_process_group("gloo")  # one group for all runs
rank = torch.distributed.get_rank()
for path in sys.argv[2:]:
    config = load_config(path)
    # Forward and backward of: two trials, without the penalty and with it, and one kind
    works = 0 if "trial" in config.name else 6
    set_up.recorder_for = lambda device, works=works: Fails(works) if rank else StandIn()
    said = ""
    with stand_in():
        try:
            trainer.train(config)
        except ConfigError as error:
            said = str(error)
    Path(sys.argv[1], f"{config.name}-{rank}.txt").write_text(said)

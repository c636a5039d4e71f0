"""The cost of a step of each rival of the penalty over SFT's: counted in turns, and measured.

    python -m benchmarks.rivals_cost [--rounds 56] [--only "*, decay"] [--json FILE]

The runs are those of the study `rivals` at its quick scale, seed 0. Each round is one step of each
run, at so many places spread over its training, so that the penalty is on in the share of steps
that it is on in; the runs take turns, and another begins each round. Counted and measured are sums
over the same steps. CPU seconds of this process (`time.process_time`), one thread, which other
work on the machine moves less than wall seconds; data and evaluation are not in them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import write
from benchmarks.timing import interleaved, process_clock
from stars_fast.base.errors import ConfigError
from stars_fast.base.machine import describe
from stars_fast.data.batches import Batches
from stars_fast.training.config import RunConfig
from stars_fast.training.run.task import Task
from stars_fast.training.scale.distributed import World, processes
from stars_fast.training.step.cost import step_cost
from stars_fast.training.step.optim import make_optimizer
from stars_fast.training.step.train_step import StepLoss, plan_step, train_step
from studies.definition import read_study, study_runs


class Steps:
    """The steps of one run at the given places of its training; a call is the next of them, the
    first one again at the beginning, which warms up.

    Attributes:
        counted: the cost of each, in turns of one micro-batch.
    """

    def __init__(self, config: RunConfig, places: list[int], world: World) -> None:
        self.config, self.world = config, world
        task = Task(config, world)
        self.loss = StepLoss(task.loop, config)
        self.optimizer = make_optimizer(config.optim, task.loop.model)
        train = config.train
        batches = Batches(task.data.source, config.seed, train.batch_size, train.accumulation)
        self.windows = [batches.window(place) for place in places]
        self.plans = [plan_step(config, place) for place in places]
        batch = self.windows[0][0]
        outside = task.loop.outside_block(len(batch.labels) / batch.tokens.numel())
        self.counted = [
            sum(step_cost(config, turns, plan.step, outside) for turns in plan.turns)
            for plan in self.plans
        ]
        self._next = -1

    def __call__(self) -> None:
        at = max(self._next, 0)
        train_step(
            self.loss, self.optimizer, self.config, self.windows[at], self.plans[at], self.world
        )
        self._next += 1


def measure(rounds: int, only: str) -> dict[str, dict[str, float]]:
    """Costs over SFT's by the label of a run, `counted` and `measured`.

    Raises:
        ConfigError: `only` leaves out the study's reference.
    """
    study = read_study("rivals")
    runs = [run for run in study_runs(study, "quick", "unused") if fnmatch(run.label, only)]
    total = runs[0].config.train.total_steps if runs else 0
    places = [round((i + 0.5) * total / rounds) for i in range(rounds)]
    with processes("cpu") as world:
        steps = {run.label: Steps(run.config, places, world) for run in runs}
        if study.reference not in steps:
            raise ConfigError(f"--only {only!r} leaves out {study.reference!r}, the unit")
        ways: dict[str, Callable[[], Any]] = dict(steps)
        times = interleaved(ways, rounds, "cpu", process_clock)
    unit, counted = times[study.reference], steps[study.reference].counted
    return {
        name: {
            "counted": round(sum(steps[name].counted) / sum(counted), 3),
            "measured": round(sum(seconds) / sum(unit), 3),
        }
        for name, seconds in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=56, help="steps of each run (default 56)")
    parser.add_argument("--only", default="*, decay", metavar="PATTERN", help="runs, by label")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.rounds, options.only)
    print("| rival | gradient | injection | counted | measured |\n|---|---|---|---|---|")
    for name, row in rows.items():
        cells = " | ".join(name.split(", ")[:3])
        print(f"| {cells} | {row['counted']:.2f} | {row['measured']:.2f} |")
    write(options.json, {"machine": describe("cpu"), "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()

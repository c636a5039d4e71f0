"""The cost of a step in turns of the block, for the banner and for the remaining time."""

from stars_fast.training.config import RunConfig
from stars_fast.training.step.methods import penalty_of


def step_cost(config: RunConfig, turns: float, step: int, outside: float) -> float:
    """The cost of `step` at `turns` turns, in turns of one micro-batch.

    `outside` is what lies outside the block. Only turns that carry a gradient cost in full: a turn
    without one is a third.
    """
    full = turns
    if config.train.backprop_turns is not None:
        full = min(turns, config.train.backprop_turns)
    cost = full + (turns - full) / 3 + outside + config.loop.cost(outside)
    if config.penalty_weight(step) > 0:
        cost += penalty_of(config).cost()
    return cost


def turns_in_graph(config: RunConfig, turns: int, penalised: bool) -> int:
    """The plain turns that carry a gradient in a micro-batch of so many turns; `penalised` says
    whether it has the penalty."""
    kept = config.train.backprop_turns
    found = (turns if kept is None else min(turns, kept)) + config.loop.more_turns
    if not penalised:
        return found
    penalty = penalty_of(config)
    return found - penalty.last_turns + penalty.more_turns


def relative_cost(config: RunConfig, outside: float) -> float:
    """Mean cost of a step of the run over one of SFT at `train.reference_turns`."""
    steps = config.train.total_steps
    total = sum(expected_costs(config, outside))
    return total / steps / (config.train.reference_turns + outside)


def expected_costs(config: RunConfig, outside: float) -> list[float]:
    """The cost of each step of the run, averaged over the depth law: it is not linear in the depth
    where the gradient stops after `backprop_turns`."""
    known: dict[tuple[bool, int], float] = {}
    costs = []
    for step in range(config.train.total_steps):
        # What a step costs changes while the curriculum lasts, and when the penalty begins.
        key = config.penalty_weight(step) > 0, min(step, config.depth.curriculum_steps)
        if key not in known:
            chances = config.depth.chances(step)
            known[key] = sum(p * step_cost(config, turns, step, outside) for turns, p in chances)
        costs.append(known[key])
    return costs


class RemainingTime:
    """Seconds to the end of a run: a recent rate in turns, times the expected turns to come.

    A step's time follows its depth, so the depth of recent steps cancels out of the rate, and the
    steps to come count at their mean over the law, with the penalty where it will be on.
    """

    def __init__(self, config: RunConfig, outside: float) -> None:
        self.config = config
        self.outside = outside
        self.after = [0.0]  # after[k]: expected cost of the last k steps
        for cost in reversed(expected_costs(config, outside)):
            self.after.append(self.after[-1] + cost)
        self.seconds = self.turns = 0.0
        self.steps = 0

    def add(self, step: int, turns: float, seconds: float) -> None:
        """Note that `step`, at `turns` turns on average, took `seconds`.

        The first step counts only until there is a second: it also warms up.
        """
        keep = 0.0 if self.steps == 1 else 0.98
        self.steps += 1
        self.seconds = keep * self.seconds + seconds
        self.turns = keep * self.turns + step_cost(self.config, turns, step, self.outside)

    def after_step(self, step: int) -> float:
        """Expected seconds from the end of `step` to the end of the run; `add` came before."""
        return self.seconds / self.turns * self.after[self.config.train.total_steps - 1 - step]

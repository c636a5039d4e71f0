"""What a step costs in turns of the block, for the banner and for the remaining time."""

from torch import nn

from stars_fast.models.looped import LoopedLM
from stars_fast.training.config import TrainConfig

DUAL_TURN = 2.1
"""Cost of a turn that carries a tangent, over a plain one: twice the linear maps, three times
attention's products."""


def step_cost(config: TrainConfig, turns: float, step: int, rest: float) -> float:
    """The cost of `step` at `turns` turns, in turns of one micro-batch.

    `rest` is what lies outside the block. Only turns that carry a gradient cost in full: a turn
    without one is a third.
    """
    full = turns
    if config.train.backprop_turns is not None:
        full = min(turns, config.train.backprop_turns)
    cost = full + (turns - full) / 3 + rest
    if config.penalised == "jacobian" and config.penalty_weight(step) > 0:
        # Power steps before the last carry the tangent forward without a gradient.
        cost += DUAL_TURN * (1 + (config.penalty.power_steps - 1) / 3)
    return cost


def outside_block(model: LoopedLM, supervised: float) -> float:
    """The cost of prelude, coda and head in turns, by the weights of their linear maps.

    The head counts for the share `supervised` of the positions, those that have a target.
    """
    layers = _weights(model.prelude_layers) + _weights(model.coda_layers)
    head = supervised * model.config.vocab_size * model.config.d_model
    return (layers + head) / _weights(model.block)


def relative_cost(config: TrainConfig, rest: float) -> float:
    """Mean cost of a step of the run over one of SFT at `train.reference_turns`."""
    steps = config.train.steps
    total = sum(expected_costs(config, rest))
    return total / steps / (config.train.reference_turns + rest)


def expected_costs(config: TrainConfig, rest: float) -> list[float]:
    """The cost of each step of the run, averaged over the depth law: it is not linear in the depth
    where the gradient stops after `backprop_turns`."""
    law = config.depth
    chances = [(k, law.pmf(k)) for k in range(law.low, law.high + 1)]
    if law.law == "fixed":
        chances = [(law.value, 1.0)]
    known: dict[float, float] = {}
    costs = []
    for step in range(config.train.steps):
        on = float(config.penalty_weight(step) > 0)
        if on not in known:
            known[on] = sum(p * step_cost(config, k, step, rest) for k, p in chances)
        costs.append(known[on])
    return costs


class RemainingTime:
    """Seconds to the end of a run: a recent rate in turns, times the expected turns to come.

    A step's time follows its depth, so the depth of recent steps cancels out of the rate, and the
    steps to come count at their mean over the law, with the penalty where it will be on.
    """

    def __init__(self, config: TrainConfig, rest: float) -> None:
        self.config = config
        self.rest = rest
        self.after = [0.0]  # after[k]: expected cost of the last k steps
        for cost in reversed(expected_costs(config, rest)):
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
        self.turns = keep * self.turns + step_cost(self.config, turns, step, self.rest)

    def after_step(self, step: int) -> float:
        """Expected seconds from the end of `step` to the end of the run; `add` came before."""
        return self.seconds / self.turns * self.after[self.config.train.steps - 1 - step]


def _weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() >= 2)

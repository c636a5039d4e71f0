"""Schedules that do not come to their end in a run, and what happens then."""

from stars_fast.training.config import RunConfig
from stars_fast.training.step.optim import learning_rate, schedule_steps


def beyond_the_end(config: RunConfig) -> list[str]:
    """A line for each schedule that is longer than the run; its steps must be known."""
    return [*_learning_rate(config), *_penalty(config), *_others(config)]


def _learning_rate(config: RunConfig) -> list[str]:
    steps, optim = config.train.total_steps, config.optim
    warmup, decay = schedule_steps(optim, steps)
    decay = decay if optim.schedule == "wsd" else 0
    if not optim.lr or warmup + decay <= steps:
        return []
    peak = max(learning_rate(optim, step, steps) for step in range(steps))
    given = {"optim.warmup_steps": warmup, "optim.decay_steps": decay}
    named = " and ".join(f"{name} ({value:,})" for name, value in given.items() if value)
    return [
        f"{named} take more than the run's {steps:,} steps: the learning rate gets to "
        f"{peak / optim.lr:.2g} of optim.lr at most; give fewer steps, or a fraction of the run, "
        "such as 0.1"
    ]


def _penalty(config: RunConfig) -> list[str]:
    steps, penalty = config.train.total_steps, config.penalty
    if not config.penalised:
        return []
    if penalty.start_step >= steps:
        return [
            f"penalty.start_step ({penalty.start_step:,}) is not before the last of the run's "
            f"{steps:,} steps: no penalty"
        ]
    last = penalty.weight_at(steps - 1)
    if last < penalty.weight:
        return [
            f"penalty.start_step + ramp_steps ({penalty.start_step + penalty.ramp_steps:,}) is "
            f"more than the run's {steps:,} steps: lambda ends at {last:.2g} instead of "
            f"{penalty.weight:g}"
        ]
    return []


def _others(config: RunConfig) -> list[str]:
    steps, depth, found = config.train.total_steps, config.depth, []
    if depth.curriculum_steps > steps:
        mean = sum(turns * chance for turns, chance in depth.chances(steps - 1))
        found.append(
            f"depth.curriculum_steps ({depth.curriculum_steps:,}) is more than the run's "
            f"{steps:,} steps: the mean depth ends at {mean:.3g} turns instead of "
            f"{depth.mean():.3g}"
        )
    if config.eval.every > steps:
        found.append(
            f"eval.every ({config.eval.every:,}) is more than the run's {steps:,} steps: it is "
            "evaluated at the end alone"
        )
    return found

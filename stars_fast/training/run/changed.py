"""Settings that a run which goes on has otherwise than before, and what they do to its schedule."""

from stars_fast.base import tree
from stars_fast.base.run_folder import RunFolder
from stars_fast.training.config import RunConfig, load_config
from stars_fast.training.step.optim import learning_rate


def changed_settings(run: RunFolder, config: RunConfig, step: int, units: int) -> list[str]:
    """Lines on what a run has otherwise than its folder says.

    Args:
        run: its folder, as it was left.
        config: the settings it goes on with.
        step: steps that are done.
        units: of the training data, as `LoopConfig.over` takes them.
    """
    before = load_config(str(run.config))
    was, now = (tree.flat_mapping(tree.to_dict(each)) for each in (before, config))
    changed = [
        f"{name} was {was.get(name)} and is {value}"
        for name, value in now.items()
        if name != "out" and was.get(name) != value
    ]
    if not changed:
        return []
    steps = before.train.over(units).total_steps, config.train.over(units).total_steps
    return [f"changed settings: {'; '.join(changed)}", *_schedule(config, step, *steps)]


def _schedule(config: RunConfig, step: int, before: int, now: int) -> list[str]:
    """A line on the learning rate, where it goes on otherwise than it would have."""

    def differs(at: int) -> bool:  # as one reads it
        new = learning_rate(config.optim, at, now)
        old = learning_rate(config.optim, min(at, before - 1), before)
        return abs(new - old) > 0.005 * max(new, old)

    first = next((each for each in range(step, now) if differs(each)), None)
    if not step or first is None:
        return []
    rate = f"optim.lr goes on by the schedule of {now:,} steps, at {_rate(config, first, now)}"
    if first >= before:
        last = _rate(config, before - 1, before)
        return [f"warning: {rate}, after the schedule of {before:,} steps had come to {last}"]
    rate += "" if first == step else f" in step {first + 1:,}"
    return [f"warning: {rate} rather than {_rate(config, first, before)}, of {before:,} steps"]


def _rate(config: RunConfig, step: int, steps: int) -> str:
    """The learning rate of a step, to be read."""
    return f"{learning_rate(config.optim, step, steps):.3g}"

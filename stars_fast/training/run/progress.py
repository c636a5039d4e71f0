"""Messages of a run: one line at the start, a progress bar or plain lines, and warnings."""

import sys
import time
from typing import Any

from torch import nn

from stars_fast.base.files import FULL
from stars_fast.training.config import RunConfig
from stars_fast.training.step.cost import RemainingTime, relative_cost

_SECONDS_BETWEEN_LINES = 10.0


def banner(config: RunConfig, title: str, model: nn.Module, batch: str, outside: float) -> str:
    """The run in one line: method, size, tokens a step, depth law, expected cost over SFT.

    `title` names the model, `batch` says what a step is made of.
    """
    size = sum(p.numel() for p in model.parameters())
    shown = f"{size_words(size)} parameters"
    if config.lora.wanted:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        shown += f" ({size_words(trained)} of them adapters, which are trained)"
    penalty = penalty_words(config)
    return (
        f"{config.name}: {config.method}, {title} with {shown}, {batch} "
        f"a step, {config.train.total_steps:,} steps, {depth_words(config)}, "
        + (f"{penalty}, " if penalty else "")
        + f"{config.precision}, expected "
        f"cost {relative_cost(config, outside):.2f} x SFT at {config.train.reference_turns} turns"
    )


def depth_words(config: RunConfig) -> str:
    """The turns of a run: "lognormal turns in [2, 40], mean 5.92"."""
    depth = config.depth
    if depth.law == "fixed":
        return f"{depth.value} turns"
    return f"{depth.law} turns in [{depth.low}, {depth.high}], mean {depth.mean():.2f}"


def penalty_words(config: RunConfig) -> str:
    """The weight of a run's penalty and the step it begins at; empty without one."""
    if not config.penalised:
        return ""
    start = config.penalty.start_step
    return f"lambda {config.penalty.weight:g}" + (f" from step {start}" if start else "")


class Progress:
    """A bar on a terminal, a line now and then elsewhere; silent unless `speaks`.

    The remaining time follows the depth of each step: see `RemainingTime`.
    """

    def __init__(self, config: RunConfig, step: int, outside: float, speaks: bool) -> None:
        self.speaks = speaks
        self.steps = config.train.total_steps
        self.remaining = RemainingTime(config, outside)
        self.clock = time.perf_counter()
        self.last_line = self.clock
        self.bar: Any = None
        if speaks and sys.stderr.isatty():
            self.bar = _bar(self.steps, step)

    def step(self, step: int, turns: float) -> None:
        """Note the end of `step`, at `turns` turns on average."""
        now = time.perf_counter()
        self.remaining.add(step, turns, now - self.clock)
        self.clock = now
        if self.bar is not None:
            self.bar.update()

    def pause(self) -> None:
        """Leave the time since the last step out of the remaining time."""
        self.clock = time.perf_counter()

    def show(self, row: dict[str, Any]) -> None:
        """Show a line of metrics."""
        text = summary(row)
        if self.remaining.steps:  # not for a line of the run that this one continues
            text = f"eta {duration(self.remaining.after_step(row['step'] - 1))} {text}"
        if self.bar is not None:
            self.bar.set_description_str(text)
        elif self.clock - self.last_line > _SECONDS_BETWEEN_LINES or row["step"] == self.steps:
            self.last_line = self.clock
            self.say(f"step {row['step']}/{self.steps} {text}")

    def say(self, text: str) -> None:
        """Print a message above the bar. One that a full disk does not take, to which the output
        goes, is lost and no more."""
        try:
            if self.speaks and self.bar is not None:
                self.bar.write(text, file=sys.stderr)
            elif self.speaks:
                print(text, file=sys.stderr, flush=True)
        except OSError as error:
            if error.errno not in FULL:
                raise

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()


class Speaker:
    """Says a message through the `progress` of a run, before there is one on every process."""

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def __call__(self, text: str) -> None:
        if self.progress is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self.progress.say(text)


def summary(row: dict[str, Any]) -> str:
    """A line of metrics for people."""
    parts = [f"loss {_number(row['loss'])}"]
    if row["lambda"]:
        parts.append(f"penalty {_number(row['penalty'])}")
    parts += [
        f"depth {row['depth']:.1f}",
        f"grad {_number(row['grad_norm'])}",
        f"{row['tokens_per_second']:,.0f} tok/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"mfu {row['mfu']:.1%}")
    parts.append(f"{row['memory_gib']:.1f} GiB")
    if row["skipped"]:
        parts.append(f"skipped {row['skipped']}")
    return " ".join(parts)


def duration(seconds: float) -> str:
    """`seconds` as 42s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def size_words(count: int) -> str:
    """A number of parameters in millions or billions."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _number(value: float | None) -> str:
    return "non-finite" if value is None else f"{value:.4g}"


def _bar(steps: int, step: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(
        total=steps,
        initial=step,
        # What a narrow terminal has no room for is cut off on the right
        bar_format="{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} {elapsed} {desc}",
        dynamic_ncols=True,
        mininterval=0.2,
        file=sys.stderr,
    )

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
    shown = f"{_size(size)} parameters"
    if config.lora.wanted:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        shown += f" ({_size(trained)} of them adapters, which are trained)"
    depth = config.depth
    law = (
        f"{depth.value} turns"
        if depth.law == "fixed"
        else f"{depth.law} turns in [{depth.low}, {depth.high}], mean {depth.mean():.2f}"
    )
    penalty = ""
    if config.penalised:
        start = config.penalty.start_step
        penalty = f", lambda {config.penalty.weight:g}" + (f" from step {start}" if start else "")
    return (
        f"{config.name}: {config.method}, {title} with {shown}, {batch} "
        f"a step, {config.train.total_steps:,} steps, {law}{penalty}, {config.precision}, expected "
        f"cost {relative_cost(config, outside):.2f} x SFT at {config.train.reference_turns} turns"
    )


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
        text = summary(row) + f" eta {duration(self.remaining.after_step(row['step'] - 1))}"
        if self.bar is not None:
            self.bar.set_postfix_str(text)
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


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _number(value: float | None) -> str:
    return "non-finite" if value is None else f"{value:.4g}"


def _bar(steps: int, step: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    form = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}] {postfix}"
    return tqdm(total=steps, initial=step, bar_format=form, mininterval=0.2, file=sys.stderr)

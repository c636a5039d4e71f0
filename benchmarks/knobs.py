"""`python -m benchmarks.knobs`: what each knob of a run costs, by `stars-fast plan`.

Every row is the recipe with one change, on the same GPUs; nothing is measured here, and nothing of
it has run on a GPU. `docs/guides/knobs.md` shows the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stars_fast.base.tables import right_aligned
from stars_fast.training.config import load_config
from stars_fast.training.plan.cards import parse_gpus
from stars_fast.training.plan.plan import plan
from stars_fast.training.scale.memory import GIB

RECIPE, GPUS = "ouro-numina-fast", "4xA800-80GB"

KNOBS = (
    ("as the recipe has it", ""),
    ("no penalty", "--method random-loop"),
    ("the exact penalty, at the last state", "--penalty.at next --penalty.fraction 1"),
    ("the penalty on all samples", "--penalty.fraction 1"),
    ("three power steps", "--penalty.power_steps 3"),
    ("more turns", "--depth.mu 2.0"),
    ("at most 8 turns", "--depth.high 8"),
    ("gradient through the last 4 turns", "--train.backprop_turns 4"),
    ("a loss after further turns", "--loop.progressive 0.5"),
    ("documents padded, 128 a step", "--data.packing false --train.batch_size 128"),
    ("rows twice as long, half as many", "--data.row_length 4096 --train.batch_size 16"),
    ("norms and gates computed again", "--memory.recompute selective"),
    ("turns computed again", "--memory.recompute turn"),
    ("fp32 throughout", "--precision float32"),
    ("bf16 throughout", "--precision bfloat16 --optim.stochastic_rounding true"),
    ("weights shared out (FSDP)", "--parallel.kind fsdp"),
    ("and gathered layer by layer", "--parallel.kind fsdp --parallel.reshard true"),
    ("adapters alone (LoRA)", "--lora.rank 16"),
)
"""Changes, and the words of the command line that make them."""

HEAD = ("change", "options", "s a step", "over the recipe", "GiB a GPU", "limit")


def rows(recipe: str = RECIPE, gpus: str = GPUS) -> list[tuple[str, ...]]:
    """The rows below `HEAD`: seconds of a step with the penalty, and memory at the most turns.

    Raises:
        ConfigError: the recipe or the GPUs are not known.
    """
    found: list[tuple[str, ...]] = []
    unit = 0.0
    for name, words in KNOBS:
        made = plan(load_config(recipe, words.split()), parse_gpus(gpus))
        unit = unit or made.ours.seconds
        taken = (made.memory.held + made.memory.activations) / GIB
        memory = f"{taken:.0f}" if made.memory.fits else f"{taken:.0f}: does not fit"
        ratio = f"{made.ours.seconds / unit:.2f}"
        found.append((name, words, f"{made.ours.seconds:.2f}", ratio, memory, made.ours.limit))
    return found


def markdown(recipe: str = RECIPE, gpus: str = GPUS) -> str:
    """The table for a page."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for name, words, *cells in rows(recipe, gpus):
        options = words.replace(" --", "`<br>`--")  # a line each: browsers break after a hyphen
        lines.append("| " + " | ".join([name, f"`{options}`" if options else "", *cells]) + " |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default=RECIPE, help=f"(default {RECIPE})")
    parser.add_argument("--gpus", default=GPUS, help=f"(default {GPUS})")
    options = parser.parse_args(words)
    shown = [HEAD, *rows(options.recipe, options.gpus)]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    print(
        right_aligned(
            [[row[0].ljust(widths[0]), row[1].ljust(widths[1]), *row[2:]] for row in shown]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks LEVEL [options]`: the options that all levels share, and the hand-over.

A level is a module with `add_options(parser)` and `run(options) -> exit code`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from stars_fast.base.exit_code import exit_code
from stars_fast.base.options import positive

LEVELS = {
    "op": "one op: its dual against PyTorch's plain one, by backend",
    "block": "a block: plain, and every way to its Jacobian penalty",
    "step": "whole training steps by method, the published way and ours",
    "scaling": "cost and memory of a block against length, depth, batch and width",
}
WITH_DTYPE = ("op", "block", "scaling")


def main(words: Sequence[str]) -> int:
    """Run a level; returns its exit code.

    Raises SystemExit or ConfigError for a mistake in the options.
    """
    options = options_of(words)
    prepare(options)
    return import_module(f"benchmarks.{options.level}").run(options)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options as they are given. Raises SystemExit for a mistake, or for --help."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="What the Jacobian penalty costs, against other ways."
    )
    levels = parser.add_subparsers(title="levels", required=True, metavar="LEVEL", dest="level")
    for name, summary in LEVELS.items():
        # A level may restate a shared option.
        level = levels.add_parser(
            name, help=summary, description=summary, conflict_handler="resolve"
        )
        if words and words[0] == name:  # the others need not load
            add_common(level, dtype=name in WITH_DTYPE)
            import_module(f"benchmarks.{name}").add_options(level)
    return parser.parse_args(words)


def add_common(parser: argparse.ArgumentParser, dtype: bool) -> None:
    """The options of every level."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: CUDA if there)"
    )
    if dtype:
        parser.add_argument(
            "--dtype",
            choices=("float32", "bfloat16", "float16"),
            help="(default: float32 on the CPU, bfloat16 on CUDA)",
        )
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads")
    parser.add_argument("--repeats", type=positive, metavar="N", help="timed passes of each way")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument("--small", action="store_true", help="tiny sizes: prove the command")


def prepare(options: argparse.Namespace) -> None:
    """Fill in what was left open. Raises ConfigError if the device is not there."""
    import torch

    from stars_fast.base.errors import ConfigError

    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected a CUDA device, none is there")
    if getattr(options, "dtype", "") is None:
        options.dtype = "bfloat16" if options.device == "cuda" else "float32"
    if options.threads:
        torch.set_num_threads(options.threads)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "python -m benchmarks"))

"""`python -m benchmarks LEVEL [options]`: the options that all levels share, and the hand-over.

A level is a module with `add_options(parser)` and `run(options) -> exit code`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import torch

from benchmarks.machine import usual_dtype
from stars_fast import ops
from stars_fast.base.errors import ConfigError
from stars_fast.base.exit_code import exit_code
from stars_fast.base.options import Parser, positive
from stars_fast.ops import BACKENDS

LEVELS = {
    "op": "one op: its dual against PyTorch's plain one, by backend",
    "block": "a block: plain, and every way to its Jacobian penalty",
    "step": "whole training steps by method, the published way and ours",
    "scaling": "cost and memory of a block against length, depth, batch and width",
}
REPEATS = {"op": 30, "block": 10, "step": 10, "scaling": 10}
OF_BLOCKS = ("block", "scaling")


def main(words: Sequence[str]) -> int:
    """Run a level; returns its exit code.

    Raises:
        SystemExit, ConfigError: a mistake in the options.
    """
    options = options_of(words)
    prepare(options)
    return import_module(f"benchmarks.{options.level}").run(options)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options as they are given.

    Raises:
        SystemExit: a mistake, or --help.
    """
    parser = Parser(
        "python -m benchmarks", description="What the Jacobian penalty costs, against other ways."
    )
    levels = parser.add_subparsers(title="levels", required=True, metavar="LEVEL", dest="level")
    for name, summary in LEVELS.items():
        level = levels.add_parser(name, help=summary, description=summary)
        if words and words[0] == name:  # the others need not load
            add_common(level, name)
            import_module(f"benchmarks.{name}").add_options(level)
    return parser.parse_args(words)


def add_common(parser: argparse.ArgumentParser, level: str) -> None:
    """The options that levels share."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: CUDA if there)"
    )
    if level != "step":
        parser.add_argument(
            "--dtype",
            choices=("float32", "bfloat16", "float16"),
            help="(default: float32 on the CPU, bfloat16 on CUDA)",
        )
        parser.add_argument(
            "--backend", choices=BACKENDS, help="force one for our ops (default: the best; op: all)"
        )
    if level in OF_BLOCKS:
        parser.add_argument(
            "--memory-limit",
            type=float,
            metavar="MIB",
            help="of a pass (default: 80 %% of what is free)",
        )
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads")
    parser.add_argument("--repeats", type=positive, metavar="N", help="timed passes of each way")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument(
        "--small",
        action="store_true",
        help="tiny sizes, and nothing compiled that is not named: prove the command",
    )


def prepare(options: argparse.Namespace) -> None:
    """Fill in what was left open.

    Raises:
        ConfigError: the device or backend is not there.
    """
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected a CUDA device, none is there")
    if getattr(options, "dtype", "") is None:
        options.dtype = usual_dtype(options.device)
    if options.repeats is None:
        options.repeats = 2 if options.small else REPEATS[options.level]
    if options.level in OF_BLOCKS:
        check_backend(options.backend)
    if options.threads:
        torch.set_num_threads(options.threads)


def check_backend(name: str | None) -> None:
    """Raise ConfigError if the backend that is forced is not here."""
    try:
        with ops.backend(name):
            pass
    except RuntimeError as error:
        raise ConfigError(f"--{error}") from error


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "python -m benchmarks"))

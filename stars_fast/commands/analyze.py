"""`stars-fast analyze`: how the state of a looped model moves over the turns, and its Jacobian."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stars_fast.base.options import Parser, number_list, positive

if TYPE_CHECKING:
    from stars_fast.analysis.measure import Measured

JACOBIAN_AT = (1, 2, 4, 8, 16, 32, 64)


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        SystemExit, ConfigError: a mistake in the options.
    """
    return _analyze(options_of(words))


def parser() -> Parser:
    """The parser of the command's options."""
    parser = Parser(
        "stars-fast analyze",
        description="How the state moves from turn to turn, its Jacobian at some of them, and the "
        "paths of the states, for one run or several beside each other: analysis.html to read, "
        "analysis.json with all numbers, analysis.png and paths.png.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder, Ouro checkpoint in the public layout, or hub id of one",
    )
    add = parser.add_argument
    add("--turns", type=positive, default=64, metavar="N", help="turns to run (default 64)")
    add("--samples", type=positive, default=32, metavar="N", help="samples (default 32)")
    add(
        "--jacobian-at",
        type=number_list,
        metavar="1,2,4",
        help="turns after which the Jacobian is taken, besides --turns (default "
        f"{','.join(map(str, JACOBIAN_AT))})",
    )
    add(
        "--text",
        metavar="FILE",
        help="samples for Ouro: a text file, whose paragraphs they are, or JSONL or a data set "
        "with a column text, or chats (default: the validation data of the run)",
    )
    add("--length", type=positive, default=256, metavar="N", help="tokens of a text (default 256)")
    add("--place", choices=("first", "middle", "last"), default="middle",
        help="token whose path is drawn, among those to be predicted (default middle)")  # fmt: skip
    add("--tol", type=_tolerance, default=1e-3, metavar="X",
        help="residual of a state at rest (default 0.001)")  # fmt: skip
    add("--batch", type=positive, default=16, metavar="N", help="samples at once (default 16)")
    add("--step", type=positive, metavar="N", help="checkpoint of a run (default: the newest)")
    add("--seed", type=int, default=0, metavar="N", help="of random directions (default 0)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: the first GPU, or the CPU)")
    add("--out", metavar="DIR", help="folder for the files (default: the first run, or analysis)")
    return parser


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options as they are given.

    Raises:
        SystemExit: a mistake, or --help.
    """
    return parser().parse_args(words)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1), got {text!r}")
    return value


def _analyze(options: argparse.Namespace) -> int:
    from stars_fast.analysis.measure import Plan, measure
    from stars_fast.analysis.report.writing import write_analysis
    from stars_fast.analysis.subjects import Request, find_subject
    from stars_fast.base.optional import need
    from stars_fast.evaluation.loading import device_for, make_folder
    from stars_fast.evaluation.report import labels_of

    plan = Plan(
        turns=options.turns,
        jacobian_at=_jacobian_at(options),
        place=options.place,
        seed=options.seed,
    )
    request = Request(
        samples=options.samples,
        length=options.length,
        batch=options.batch,
        text=options.text,
        step=options.step,
        device=device_for(options.device),
    )
    need("matplotlib.figure", "figures")
    subjects = [find_subject(run, request) for run in dict.fromkeys(options.runs)]
    out = Path(options.out or _default_out(options.runs[0]))
    make_folder(out)
    names = labels_of({subject.source: subject.name for subject in subjects})
    runs: dict[str, Measured] = {}
    for subject in subjects:
        label = names[subject.source]
        print(f"{label}: {subject.what}", file=sys.stderr)
        runs[label] = measure(subject, plan, lambda text: print(f"  {text}", file=sys.stderr))
    found = write_analysis(runs, out, plan, request, options.tol)
    for label, run in found.items():
        print(f"{label}: {run['verdict']}")
    print(f"written: {out / 'analysis.html'}, and with it analysis.json, analysis.png, paths.png")
    return 0


def _jacobian_at(options: argparse.Namespace) -> tuple[int, ...]:
    """In rising order.

    Raises:
        ConfigError: a turn that is not run.
    """
    from stars_fast.base.errors import ConfigError

    if options.turns < 2:
        raise ConfigError(f"--turns: expected at least 2, got {options.turns}")
    asked = options.jacobian_at or [t for t in JACOBIAN_AT if t <= options.turns]
    if max(asked) > options.turns:
        raise ConfigError(
            f"--jacobian-at: expected at most --turns, {options.turns}, got "
            f"{','.join(map(str, asked))}"
        )
    return tuple(sorted({*asked, options.turns}))


def _default_out(run: str) -> Path:
    return Path(run) if (Path(run) / "config.yaml").exists() else Path("analysis")

"""`stars-fast eval`: accuracy against turns of trained runs."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from stars_fast.options import numbers, positive


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises SystemExit or ConfigError for a mistake in the options.
    """
    return _eval(options_of(words))


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options as they are given. Raises SystemExit for a mistake, or for --help."""
    parser = argparse.ArgumentParser(
        "stars-fast eval",
        description="Exact match on unseen samples at each number of turns, for each run: a "
        "table, a JSON file and a figure.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument(
        "--turns",
        type=numbers,
        default=[1, 2, 4, 8, 16, 32, 64, 100],
        metavar="1,2,4",
        help="numbers of turns (default 1,2,4,8,16,32,64,100)",
    )
    parser.add_argument(
        "--limit", type=positive, default=1000, metavar="N", help="unseen samples (default 1000)"
    )
    parser.add_argument(
        "--step", type=positive, metavar="N", help="checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for evaluation.json and evaluation.png (default: the first run)",
    )
    return parser.parse_args(words)


def _eval(args: argparse.Namespace) -> int:
    from stars_fast.data.addition import AdditionData
    from stars_fast.evaluation.addition import evaluate
    from stars_fast.training.addition import load_model
    from stars_fast.training.tree import ConfigError

    loaded = {str(run): load_model(run, args.step) for run in args.runs}
    accuracy, samples = {}, {}
    for run, (model, config) in loaded.items():
        try:
            data = AdditionData(config.data)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{run}: data: {error}") from error
        accuracy[run] = evaluate(model, data, args.turns, limit=args.limit)
        samples[run] = min(args.limit, len(data.test))
    labels = _labels({run: config.name for run, (_, config) in loaded.items()})
    print(_table({labels[run]: values for run, values in accuracy.items()}))

    from stars_fast.analysis.plots import accuracy_against_turns

    out = Path(args.out or args.runs[0])
    out.mkdir(parents=True, exist_ok=True)
    written = {"samples": samples, "accuracy": accuracy}
    (out / "evaluation.json").write_text(json.dumps(written, indent=2) + "\n")
    accuracy_against_turns(
        {labels[run]: values for run, values in accuracy.items()},
        out / "evaluation.png",
        title="Exact match on unseen sums",
        trained_depth={labels[run]: config.trained_turns for run, (_, config) in loaded.items()},
    )
    print(f"written: {out / 'evaluation.json'}, {out / 'evaluation.png'}")
    return 0


def _labels(names: dict[str, str]) -> dict[str, str]:
    """A label for each run: its name, or its folder where two runs have one name."""
    count = list(names.values()).count
    return {run: name if count(name) == 1 else run for run, name in names.items()}


def _table(accuracy: dict[str, dict[int, float]]) -> str:
    """Turns down, runs across, exact match in percent."""
    turns = next(iter(accuracy.values()))
    rows = [["turns", *accuracy]]
    rows += [
        [str(turn), *(f"{100 * values[turn]:.1f} %" for values in accuracy.values())]
        for turn in turns
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )

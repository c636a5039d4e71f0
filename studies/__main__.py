"""`python -m studies`: the paper's studies by name."""

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from stars_fast.base.errors import ConfigError
from stars_fast.base.exit_code import exit_code
from stars_fast.base.options import Parser
from stars_fast.training.scale.distributed import processes
from studies.definition import (
    SCALES,
    StudyRun,
    label_of,
    read_study,
    study_names,
    study_runs,
)
from studies.outcome import write_outcome
from studies.plain import plain
from studies.records import Records
from studies.runner import MAY_DIFFER, check_folders, note_of, run_entry, status, train_runs

_EXAMPLES = """\
examples:
  python -m studies
  python -m studies methods
  python -m studies norms --seeds 0,1,2
  python -m studies norms --only "pre*" --train.steps 200 --out runs/try
  torchrun --nproc-per-node 4 -m studies ouro --scale paper
"""


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0, 1 if not all runs were trained, 128 + signal if
    stopped.

    Raises:
        SystemExit, ConfigError: a mistake in the options.
    """
    options, overrides = options_of(words)
    if options.name is None or options.list:
        if overrides:
            rule = "--list takes no fields"
            if options.name is None:
                rule = "a study's name must come before its fields"
            raise ConfigError(f"{rule}, got {overrides[0]}")
        print(listing([options.name] if options.name else study_names(), options.scale))
        return 0
    return _study(options, overrides)


def options_of(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the words that set fields of all runs.

    Raises:
        SystemExit: a mistake, or --help.
    """
    parser = Parser(
        "python -m studies",
        description="Train the runs of a study that are not done yet, judge them, and write a "
        "table, a figure and study.json. Without a name, or with --list: what there is. "
        "--field value, as of stars-fast train, holds for all runs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is not known here is a field of the runs
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a study")
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="quick",
        help="quick: small models, for a CPU; paper: the paper's sizes (default quick)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder (default runs/study-NAME-SCALE)"
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FILE",
        help="records of finished runs, lines of JSON: runs in it count as done, others are added",
    )
    parser.add_argument(
        "--only", metavar="PATTERN", help='runs to train, by label: "pre, *"; others stay as found'
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=[0], metavar="0,1,2", help="a run for each (default 0)"
    )
    parser.add_argument("--list", action="store_true", help="list the studies, or a study's runs")
    return parser.parse_known_args(words)


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected seeds like 0,1,2, got {text!r}")
    return list(dict.fromkeys(map(int, parts)))


def listing(names: Sequence[str], scale: str) -> str:
    """Questions of the studies, and their runs at a scale; of those that have it."""
    lines = []
    for study in map(read_study, names):
        if scale not in study.scales:
            lines += [f"{study.name}: {study.title}", f"  not at scale {scale}", ""]
            continue
        part = study.at(scale)
        lines += [f"{study.name}: {study.title}", f"  {study.asks}"]
        lines += [f"  {len(part.cells)} runs of {part.base}:"]
        lines += [f"    {label_of(cell.levels)}" for cell in part.cells]
        lines.append("")
    return "\n".join(lines).rstrip()


def _study(options: argparse.Namespace, overrides: list[str]) -> int:
    study = read_study(options.name)
    out = options.out or Path("runs") / f"study-{study.name}-{options.scale}"
    runs = study_runs(study, options.scale, out, options.seeds, overrides)
    chosen = [run for run in runs if options.only is None or fnmatch(run.label, options.only)]
    if not chosen:
        labels = "; ".join(dict.fromkeys(run.label for run in runs))
        raise ConfigError(f"--only {options.only!r} fits no run of {study.name}: {labels}")
    records = Records(options.records, MAY_DIFFER)
    with processes(runs[0].config.train.device) as world:
        world.together(lambda: check_folders(runs) if world.first else None)
        stopped = train_runs(chosen, world, records)
        if world.first:
            entries = [run_entry(run, world, records) for run in runs]
            print("\n" + plain(write_outcome(study, options.scale, out, entries, overrides)))
            print(f"written: study.json, table.md and, of finished runs, figure.png in {out}")
            if stopped:
                print(f"stopped; the same command goes on: {_left(chosen, records)} runs are left")
            for run in chosen:
                where = f"{run.label}, seed {run.seed}"
                if status(run, records) == "failed":
                    print(
                        f"failed: {where}; remove {note_of(run)} to go on from its last "
                        f"checkpoint, or {run.folder} to start anew"
                    )
                elif status(run, records) == "missing" and not stopped:
                    print(f"not trained: {where}, for the reason given above")
        world.wait()
        left = world.from_first(any(status(run, records) != "done" for run in chosen))
    return 128 + stopped if stopped else int(left)


def _left(runs: Sequence[StudyRun], records: Records) -> int:
    return sum(status(run, records) == "missing" for run in runs)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "python -m studies"))

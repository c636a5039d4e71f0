"""`stars-fast runs`: runs with their settings and results, and their curves in one figure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stars_fast.base import tree
from stars_fast.base.checkpoints import latest
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import read_text
from stars_fast.base.options import Parser
from stars_fast.base.run_folder import RunFolder
from stars_fast.base.tables import right_aligned
from stars_fast.base.unique_keys import parse_json

_ASIDE = ("name", "description", "out", "train.threads", "train.report_to", "data.cache")
"""Fields that tell nothing about what came out."""

_SETTINGS = 4
"""Settings that differ, shown at most."""


class Run(NamedTuple):
    """A run as it lies on the disk.

    name: for people. settings: by dotted path. state: done, or how far it is. loss: of the last
    line of metrics. results: by name and number of turns.
    """

    name: str
    folder: RunFolder
    settings: dict[str, Any]
    state: str
    loss: float | None
    results: dict[str, dict[int, float]]


def main(words: Sequence[str]) -> int:
    """Print the table, and draw the curves if asked; returns 0. A run that can't be read is left
    out with a warning.

    Raises:
        ConfigError: there are no runs that can be read, or the figure can't be written.
    """
    options = parser().parse_args(words)
    runs, unread = [], []
    for name, folder in find_runs(options.paths):
        try:
            runs.append(read_run(folder, name))
        except ConfigError as error:
            unread.append(error)
    if not runs:
        raise unread[0]
    print(table(runs))
    for each in unread:
        print(f"stars-fast: warning: {each}", file=sys.stderr)
    if options.figure:
        _draw(runs, Path(options.figure))
        print(f"written: {options.figure}")
    return 0


def parser() -> Parser:
    """The options."""
    found = Parser(
        "stars-fast runs",
        description="List runs: how far they are, the settings in which they differ, the loss of "
        "the last line of metrics, and results by number of turns.",
    )
    found.add_argument(
        "paths",
        nargs="*",
        default=["runs"],
        metavar="DIR",
        help="run folders, or folders of them (default: runs)",
    )
    found.add_argument("--figure", metavar="FILE", help="draw their training curves as PNG")
    return found


def find_runs(paths: Sequence[str]) -> list[tuple[str, RunFolder]]:
    """Run folders, with their names for people: the path below the folder that was named.

    Raises:
        ConfigError: there is none in a path.
    """
    found: dict[Path, str] = {}
    for path in map(Path, paths):
        if (path / "config.yaml").exists():
            inside = {path: path.name or str(path)}
        else:
            files = [*path.glob("*/config.yaml"), *path.glob("*/*/config.yaml")]
            inside = {file.parent: str(file.parent.relative_to(path)) for file in sorted(files)}
        if not inside:
            raise ConfigError(f"{path}: expected a run folder, or a folder of some, got neither")
        found |= {folder: name for folder, name in inside.items() if folder not in found}
    double = len(set(found.values())) < len(found)
    return [(str(folder) if double else name, RunFolder(folder)) for folder, name in found.items()]


def read_run(folder: RunFolder, name: str) -> Run:
    """Read a run.

    Raises:
        ConfigError: its configuration or its results can't be read.
    """
    settings = tree.flat_mapping(folder.settings())
    rows, (ended, results) = metrics_of(folder), _results(folder)
    total, step = settings.get("train.steps"), rows[-1]["step"] if rows else 0
    total = total if isinstance(total, int) else None
    step = max(step, ended or 0)
    if ended is not None and ended >= max(step, total or 0):
        state = "done"
    else:
        state = f"step {step:,}" + (f" of {total:,}" if total is not None else "")
        state += "" if latest(folder.checkpoints) else ", nothing saved"
        state += "" if ended is None else f", results of step {ended:,}"
    loss = next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None)
    return Run(name, folder, settings, state, loss, results)


def _results(folder: RunFolder) -> tuple[int | None, dict[str, dict[int, float]]]:
    """The step that a run ended with, and its results; None and none before its end. It may have
    gone on since."""
    if not folder.results.exists():
        return None, {}
    try:
        kept = parse_json(read_text(folder.results))
        return int(kept["step"]), {
            measure: {int(turns): float(value) for turns, value in by_turns.items()}
            for measure, by_turns in kept.items()
            if isinstance(by_turns, Mapping)
        }
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{folder.results} can't be read: {error}") from error


def metrics_of(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of a run's metrics; none before its first.

    Raises:
        ConfigError: they can't be read.
    """
    if not folder.metrics.exists():
        return []
    from stars_fast.training.run.metrics import read_metrics

    try:
        rows = read_metrics(folder.metrics)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder.metrics} can't be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        step, loss = (row.get("step"), row.get("loss")) if isinstance(row, dict) else (None, None)
        if not isinstance(step, int) or not isinstance(loss, int | float | None):
            raise ConfigError(f"{folder.metrics}, line {number}: expected metrics, got {row!r:.80}")
    return rows


def differing(runs: Sequence[Run]) -> list[str]:
    """Settings in which the runs differ, by dotted path: those that differ most first."""
    if len(runs) == 1:
        return [path for path in ("method", "train.steps", "seed") if path in runs[0].settings]
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    kinds = {path: len({str(run.settings.get(path)) for run in runs}) for path in paths}
    found = [path for path, number in kinds.items() if number > 1 and path not in _ASIDE]
    return sorted(found, key=lambda path: (path != "method", -kinds[path]))[:_SETTINGS]


def table(runs: Sequence[Run]) -> str:
    """The runs as a table of text: measures of different runs in columns of their own."""
    settings = differing(runs)
    columns = [
        (measure, turns)
        for measure in dict.fromkeys(name for run in runs for name in run.results)
        for turns in _shown_turns([run.results[measure] for run in runs if measure in run.results])
    ]
    head = ["run", "state", *(path.rpartition(".")[2] for path in settings), "loss"]
    rows = [head + [f"{measure.replace('_', ' ')} at {turns}" for measure, turns in columns]]
    for run in runs:
        given = (run.settings.get(path) for path in settings)
        values = [_value(name, run.results.get(name, {}).get(turns)) for name, turns in columns]
        loss = "" if run.loss is None else f"{run.loss:.4g}"
        rows.append([run.name, run.state, *map(_setting, given), loss, *values])
    width = max(len(row[0]) for row in rows)
    return right_aligned([[row[0].ljust(width), *row[1:]] for row in rows])


def _shown_turns(results: Sequence[Mapping[int, float]]) -> list[int]:
    """Numbers of turns that all have: 4 or more, a middle one, the largest."""
    common = sorted(set.intersection(*(set(each) for each in results)))
    if not common:
        return []
    from_four = [turns for turns in common if turns >= 4] or common[-1:]
    return sorted({from_four[0], from_four[len(from_four) // 2], from_four[-1]})


def _value(measure: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if measure.startswith("accuracy") else f"{value:.4g}"


def _setting(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _draw(runs: Sequence[Run], path: Path) -> None:
    from stars_fast.base.plots import training_curves

    by_name = {run.name: rows for run in runs if (rows := metrics_of(run.folder))}
    try:
        training_curves(by_name, path, title="Training")
    except ValueError as error:
        raise ConfigError(f"--figure: {error}") from error
    except OSError as error:
        raise ConfigError(f"--figure: can't write {path}: {error.strerror}") from error

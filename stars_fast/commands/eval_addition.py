"""`stars-fast eval RUN...`: exact match of runs on sums and parities, at each number of turns and,
with `--tol`, where turns end at rest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.base.tables import right_aligned
from stars_fast.evaluation.adaptive import Point, evaluate_adaptive
from stars_fast.evaluation.addition import evaluate, judged_on
from stars_fast.evaluation.loading import make_folder
from stars_fast.evaluation.report import labels_of
from stars_fast.evaluation.run_data import data_of, open_data
from stars_fast.models.adapter_folder import adapter_base
from stars_fast.models.adaptive import Per
from stars_fast.models.folders import check_exists, check_folder
from stars_fast.models.saved import find_model, load_model

Curve = dict[int, float]
Curves = dict[Per, dict[float, Point]]
"""Points of adaptive depth, by what rests and by tolerance."""


def run_addition(
    runs: Sequence[str],
    turns: Sequence[int],
    limit: int,
    step: int | None,
    out: Path,
    tols: Sequence[float] = (),
    per: Sequence[Per] = ("sequence", "token"),
) -> None:
    """Evaluate, print tables, and write evaluation.json, evaluation.png and, with tolerances,
    compute.png to `out`.

    Raises:
        ConfigError: a run that is not there, or whose data can't be made, a tolerance out of range,
            or `out` can't be made.
    """
    from stars_fast.base.plots import accuracy_against_compute, accuracy_against_turns

    if any(not 0 <= tol < 1 for tol in tols):
        raise ConfigError(f"--tol: expected a value in [0, 1), got {','.join(map(str, tols))}")
    for run in runs:
        if not (Path(run) / "config.yaml").exists():
            raise ConfigError(_no_run(run))
    sources = {str(run): find_model(run, step) for run in runs}
    for run, source in sources.items():
        if not data_of(source)[0].exact_match:
            how = "its validation loss is in results.json"
            if source.family.causal_lm:
                how = "it is evaluated with --tasks or --text"
            raise ConfigError(
                f"{run} is a run of {source.family.title} on {data_of(source)[0].name}, not on "
                f"sums or parities: {how}"
            )
    make_folder(out)
    accuracy: dict[str, Curve] = {}
    further: dict[str, dict[str, Curve]] = {}
    adaptive: dict[str, Curves] = {}
    samples, units = {}, set()
    for run, source in sources.items():
        data = open_data(source)
        units.add(data.unit)
        loop = source.family.loop(load_model(source))
        found = {
            name: evaluate(loop, each, turns, limit=limit) for name, each in judged_on(data).items()
        }
        accuracy[run] = found.pop("accuracy")
        if found:
            further[run] = found
        sums = judged_on(data)["accuracy"]
        samples[run] = min(limit, len(sums))
        if tols:
            adaptive[run] = {
                each: evaluate_adaptive(loop, sums, tols, max(turns), each, limit) for each in per
            }
    labels = labels_of({run: source.label for run, source in sources.items()})
    shown = {}
    for run, values in accuracy.items():
        shown[labels[run]] = values
        for name, longer in further.get(run, {}).items():
            shown[name.replace("accuracy", labels[run])] = longer
    print(_table(shown))

    written: dict[str, Any] = {"samples": samples, "accuracy": accuracy}
    if further:
        written["further"] = further
    if tols:
        written["adaptive"] = {
            run: {each: {t: p._asdict() for t, p in points.items()} for each, points in by.items()}
            for run, by in adaptive.items()
        }
    write_text(out / "evaluation.json", json.dumps(written, indent=2) + "\n")
    title = f"Exact match on unseen {units.pop() if len(units) == 1 else 'samples'}"
    accuracy_against_turns(
        shown,
        out / "evaluation.png",
        title=title,
        ylabel="answered exactly",
        trained_depth={labels[run]: source.trained or 0 for run, source in sources.items()},
    )
    made = [out / "evaluation.json", out / "evaluation.png"]
    if tols:
        for run, by in adaptive.items():
            print(f"\n{labels[run]}, at most {max(turns)} turns\n{_adaptive_table(by)}")
        accuracy_against_compute(
            _lines(labels, accuracy, adaptive),
            out / "compute.png",
            title=title,
            ylabel="answered exactly",
        )
        made.append(out / "compute.png")
    print(f"written: {', '.join(map(str, made))}")


def _lines(
    labels: Mapping[str, str], accuracy: Mapping[str, Curve], adaptive: Mapping[str, Curves]
) -> dict[str, list[tuple[float, float]]]:
    """(mean turns, accuracy) at fixed depths and by tolerance, for the figure."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for run, label in labels.items():
        lines[f"{label}, fixed"] = [(float(t), value) for t, value in accuracy[run].items()]
        for per, points in adaptive[run].items():
            lines[f"{label}, rest per {per}"] = [(p.turns, p.accuracy) for p in points.values()]
    return lines


def _adaptive_table(found: Curves) -> str:
    """A row for each tolerance; for what rests the mean turns, the accuracy, and the share of
    tokens that was still moving."""
    rows = [["tol", *(f"per {each}: {w}" for each in found for w in ("turns", "right", "moving"))]]
    for tol in next(iter(found.values())):
        row = [f"{tol:g}"]
        for points in found.values():
            point = points[tol]
            row += [f"{point.turns:.1f}", f"{point.accuracy:.1%}", f"{point.at_limit:.1%}"]
        rows.append(row)
    return right_aligned(rows)


def _no_run(path: str) -> str:
    """An error for a path that is no run folder."""
    try:
        check_exists(path)
        if adapter_base(path) is None:
            check_folder(path)
    except ValueError as error:
        return str(error)
    why = "it has no config.yaml" if Path(path).exists() else "there is no such folder"
    return f"{path} is not a run folder: {why} (a checkpoint is evaluated with --tasks or --text)"


def _table(accuracy: dict[str, dict[int, float]]) -> str:
    """Turns down, runs across, exact match in percent."""
    turns = next(iter(accuracy.values()))
    rows = [["turns", *accuracy]]
    rows += [
        [str(turn), *(f"{100 * values[turn]:.1f} %" for values in accuracy.values())]
        for turn in turns
    ]
    return right_aligned(rows)

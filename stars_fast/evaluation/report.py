"""The report of a sweep over benchmarks: results.json, the table, the figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stars_fast.base.files import write_text
from stars_fast.evaluation.loading import device_for
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.models.saved import ModelSource

PACKAGES = ("stars-fast", "torch", "transformers", "lm-eval", "math-verify", "datasets")


@dataclass(frozen=True)
class Result:
    """The score of a model on a task at a number of turns.

    tol: of adaptive depth; none for all turns. metric: which of lm-eval's is the accuracy.
    accuracy, stderr: of `metric`. n: samples judged. samples: of the full set; none if not known.
    metrics, stderrs: all of lm-eval's. tokens: mean of a response. cut: share of the generations
    that the cap ended. mean_turns: executed, a token that was read (prompt and response).
    """

    model: str
    task: str
    turns: int
    tol: float | None
    metric: str
    accuracy: float
    stderr: float | None
    n: int
    samples: int | None
    metrics: dict[str, float]
    stderrs: dict[str, float | None]
    tokens: float | None
    cut: float | None
    mean_turns: float | None

    @property
    def summary(self) -> str:
        return f"{self.metric} {_score(self.accuracy, self.stderr)} (n = {self.n})"


Row = tuple[str, int, float | None]
"""Model, turns, tolerance."""


def labels_of(names: dict[str, str]) -> dict[str, str]:
    """A label for each path: its name, or the path itself where two have one name."""
    count = list(names.values()).count
    return {path: name if count(name) == 1 else path for path, name in names.items()}


def write_sweep(
    out: Path,
    results: Sequence[Result],
    sources: Sequence[ModelSource],
    names: dict[str, str],
    options: SweepOptions,
    final: bool,
) -> None:
    """Write results.json; with `final` also the table, which is printed, and the figures."""
    from stars_fast.base.machine import describe, version_of

    written = {
        "versions": {name: version_of(name) for name in PACKAGES},
        "machine": describe(device_for(options.device)),
        "options": asdict(options),
        "models": {names[s.path]: {"path": s.path, "step": s.step, **s.identity} for s in sources},
        "results": [asdict(result) for result in results],
    }
    write_text(out / "results.json", json.dumps(written, indent=2) + "\n")
    if not final:
        return
    text = markdown_table(results)
    write_text(out / "results.md", text + "\n")
    print(text)
    trained = {names[source.path]: source.trained for source in sources}
    figures = _draw(out, results, trained)
    print("written:", ", ".join(map(str, [out / "results.json", out / "results.md", *figures])))


def markdown_table(results: Sequence[Result]) -> str:
    """In markdown, as the paper's: a row a model and number of turns, a column a task and their
    average; accuracy in percent with its standard error."""
    tasks = _tasks(results)
    rows = _rows(results)
    tols = any(tol is not None for _, _, tol in rows)
    mean = len(tasks) > 1
    heads = ["model", "turns", *(["tol", "mean turns"] if tols else [])]
    counts = {task: _count(next(r for r in results if r.task == task)) for task in tasks}
    heads += [f"{task} (n = {counts[task]})" for task in tasks] + ["average"] * mean
    lines = [heads, ["---"] * (2 + 2 * tols) + ["---:"] * (len(tasks) + mean)]
    for (model, turns, tol), found in rows.items():
        cells = [model, str(turns)]
        if tols:
            taken = _mean_turns(list(found.values()))
            cells += ["-" if tol is None else f"{tol:g}", "-" if taken is None else f"{taken:.2f}"]
        cells += [
            _score(found[task].accuracy, found[task].stderr) if task in found else "-"
            for task in tasks
        ]
        if mean:
            whole = _average(found, tasks)
            cells.append("-" if whole is None else _score(*whole))
        lines.append(cells)
    return _aligned(lines)


def _count(result: Result) -> str:
    part = result.samples is not None and result.n != result.samples
    return f"{result.n:,}" + (f" of {result.samples:,}" if part else "")


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = lines[1]
    shown = []
    for line in lines:
        cells = []
        for cell, width, kind in zip(line, widths, rule, strict=True):
            right = kind.endswith(":")
            if line is rule:
                cells.append("-" * (width - right) + ":" * right)
            else:
                cells.append(cell.rjust(width) if right else cell.ljust(width))
        shown.append("| " + " | ".join(cells) + " |")
    return "\n".join(shown)


def _draw(out: Path, results: Sequence[Result], trained: dict[str, Any]) -> list[Path]:
    """Accuracy against turns, and where some were adaptive against the mean turns. Of one model a
    line a task; of several a figure a task and one of the average, with a line a model."""
    from stars_fast.base.plots import accuracy_against_compute, accuracy_against_turns

    tasks = _tasks(results)
    rows = _rows(results)
    models = list(dict.fromkeys(model for model, _, _ in rows))
    views = [*tasks, *(["average"] if len(tasks) > 1 else [])]
    turns: dict[str, dict[str, dict[int, float]]] = {}
    for (model, number, tol), found in rows.items():
        for view in views if tol is None else ():
            whole = _average(found, tasks if view == "average" else [view])
            if whole is not None:
                panel, label = ("", view) if len(models) == 1 else (view, model)
                turns.setdefault(panel, {}).setdefault(label, {})[number] = whole[0]
    drawn = []
    for panel, lines in turns.items():
        depths = {model: trained[model] for model in models if trained[model] is not None}
        known: Any = (depths or None) if panel else trained[models[0]]
        path = out / (f"accuracy-{panel}.png" if panel else "accuracy.png")
        title = panel or models[0]
        accuracy_against_turns(lines, path, title=title, ylabel="accuracy", trained_depth=known)
        drawn.append(path)
    if any(tol is not None for _, _, tol in rows):
        curves = _compute_curves(rows, tasks, len(models) > 1)
        if curves:
            drawn.append(out / "compute.png")
            title = tasks[0] if len(tasks) == 1 else f"Average of {', '.join(tasks)}"
            accuracy_against_compute(curves, drawn[-1], title=title)
    return drawn


def _compute_curves(
    rows: Mapping[Row, dict[str, Result]], tasks: Sequence[str], name_models: bool
) -> dict[str, list[tuple[float, float]]]:
    """Mean turns and average accuracy, a line a tolerance or a line a largest number of turns:
    what there are fewer of, so that lines are few and long."""
    tols = {tol for _, _, tol in rows if tol is not None}
    by_tol = len(tols) < len({number for _, number, _ in rows})
    curves: dict[str, list[tuple[float, float]]] = {}
    for (model, number, tol), found in rows.items():
        whole, taken = _average(found, tasks), _mean_turns(list(found.values()))
        if whole is None or taken is None:
            continue
        if tol is None:
            kind = "all turns"
        else:
            kind = f"tol {tol:g}" if by_tol else f"at most {number} turns"
        label = f"{model}, {kind}" if name_models else kind
        curves.setdefault(label, []).append((taken, whole[0]))
    return curves


def _rows(results: Sequence[Result]) -> dict[Row, dict[str, Result]]:
    """By model, turns and tolerance, the results by task, in the order in which they came."""
    models = list(dict.fromkeys(result.model for result in results))
    rows: dict[Row, dict[str, Result]] = {}
    for result in results:
        rows.setdefault((result.model, result.turns, result.tol), {})[result.task] = result
    return {row: rows[row] for model in models for row in rows if row[0] == model}


def _tasks(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result.task for result in results))


def _average(found: dict[str, Result], tasks: Sequence[str]) -> tuple[float, float | None] | None:
    """Over tasks, each counted once whatever its size, and its standard error; None if one of
    them is missing."""
    if any(task not in found for task in tasks):
        return None
    chosen = [found[task] for task in tasks]
    errors = [result.stderr for result in chosen if result.stderr is not None]
    error = math.hypot(*errors) / len(chosen) if len(errors) == len(chosen) else None
    return sum(result.accuracy for result in chosen) / len(chosen), error


def _mean_turns(results: Sequence[Result]) -> float | None:
    """Over tasks, each counted once."""
    taken = [result.mean_turns for result in results if result.mean_turns is not None]
    return sum(taken) / len(taken) if taken else None


def _score(value: float, error: float | None) -> str:
    return f"{100 * value:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")

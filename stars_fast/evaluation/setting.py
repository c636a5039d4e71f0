"""One setting of a sweep: a task at a number of turns with a tolerance, and its folder.

setting.json         what its generations depend on; anything else is refused
generations.jsonl    the generations, as they are made (`recording`)
samples.jsonl        in the end: document, prompt, response, target, metrics and more of each
metrics.json         in the end: the scores and their rules, read back when the sweep is run again
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.base.machine import version_of
from stars_fast.evaluation import answers
from stars_fast.evaluation.benchmarks import OpenTask
from stars_fast.evaluation.harness import RESAMPLES, SEED, figures, judge
from stars_fast.evaluation.recording import Journal
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.models.adaptive import Per
from stars_fast.models.saved import ModelSource

SCORING = ("process_results", "metric_list", "filter_list", "doc_to_target", "should_decontaminate")
"""Fields of a task that its requests do not depend on."""
PLACES = ("metadata", "dataset_kwargs")
"""Fields that say where files lie."""


class Setting(NamedTuple):
    task: OpenTask
    turns: int
    tol: float
    tol_per: Per

    @property
    def name(self) -> str:
        name = f"{self.task.name}-turns{self.turns}"
        if not self.tol:
            return name
        return f"{name}-tol{self.tol:g}" + ("-token" if self.tol_per == "token" else "")

    @property
    def generates(self) -> bool:
        """Whether the task is answered by generation, and not by likelihoods of given answers."""
        return self.task.task.OUTPUT_TYPE == "generate_until"


def evaluate_setting(
    model: Any, setting: Setting, folder: Path, source: ModelSource,
    options: SweepOptions,
) -> dict[str, Any] | None:  # fmt: skip
    """The fields of a `Result` that are measured; None on processes other than the first."""
    first = _rank() == 0
    _claim(folder, _fingerprint(setting, source, options, model.tokenizer), write=first)
    metrics = folder / "metrics.json"
    if metrics.exists():
        held = json.loads(metrics.read_text(encoding="utf-8"))
        if held.pop("limit") == options.limit and held.pop("scored_by", None) == _scored_by(
            setting.task
        ):
            return held if first else None
    _check_samples(setting, options)
    lm = model.at(setting.turns, setting.tol)
    if setting.generates and options.cap >= lm.max_length:
        raise ConfigError(
            f"--max-new-tokens: expected less than the {lm.max_length} tokens that the model was "
            f"made for, got {options.cap}"
        )
    lm.journal = Journal(folder, _rank())
    torch.manual_seed(SEED)  # for a task that samples; resumed, it samples otherwise
    judged = judge(
        lm,
        setting.task.task,
        options.limit,
        RESAMPLES,
        apply_chat_template=options.chat,
        fewshot_as_multiturn=options.chat,
        system_instruction=options.system,
    )
    if judged is None or not first:
        return None
    name = setting.task.task.task_name
    samples = _samples(judged["samples"][name], Journal(folder))
    lines = "".join(json.dumps(sample, default=str) + "\n" for sample in samples)
    write_text(folder / "samples.jsonl", lines)
    made = _measures(judged["results"][name], samples, setting.task)
    held = {"limit": options.limit, "scored_by": _scored_by(setting.task), **made}
    write_text(metrics, json.dumps(held, indent=2) + "\n")
    return made


def _samples(logged: Sequence[dict[str, Any]], journal: Journal) -> list[dict[str, Any]]:
    """One a document, in their order: lm-eval logs one a document and filter."""
    samples: dict[int, dict[str, Any]] = {}
    for row in sorted(logged, key=lambda row: row["doc_id"]):
        sample = samples.setdefault(
            row["doc_id"],
            {
                "doc_id": row["doc_id"],
                "doc": row["doc"],
                "prompt": _one([given[0] for given in row["arguments"]]),
                "response": _one([response for response, *_ in row["resps"]]),
                "target": row["target"],
                "metrics": {},
            },
        )
        sample["metrics"] |= {f"{m},{row['filter']}": row[m] for m in row["metrics"]}
    ordered = list(samples.values())
    prompts = [s["prompt"] if isinstance(s["prompt"], str) else "" for s in ordered]
    for sample, record in zip(ordered, journal.find(prompts), strict=True):
        if record is not None:
            sample |= {k: v for k, v in record.items() if k not in ("prompt", "response")}
            if record.get("read"):
                sample["mean_turns"] = record["turns"] / record["read"]
    return ordered


def _one(values: list[Any]) -> Any:
    """The value, or all where a document has several requests, as a choice between answers has."""
    return values[0] if len(values) == 1 else values


def _measures(
    metrics: dict[str, Any], samples: Sequence[dict[str, Any]], task: OpenTask
) -> dict[str, Any]:
    values = figures(metrics)
    metric = task.metric or next(iter(values), None)
    if metric not in values:
        raise ConfigError(f"{task.name}: lm-eval gave no metric {metric}, but {sorted(values)}")
    errors = {m: _stderr(metrics, m) for m in values}
    generated = [sample for sample in samples if "tokens" in sample]
    read = sum(sample.get("read") or 0 for sample in generated)
    return {
        "metric": metric,
        "accuracy": values[metric],
        "stderr": errors[metric],
        "n": len(samples),
        "metrics": values,
        "stderrs": errors,
        "tokens": _mean([sample["tokens"] for sample in generated]),
        "cut": _mean([float(sample["cut"]) for sample in generated]),
        "mean_turns": sum(sample["turns"] for sample in generated) / read if read else None,
    }


def _stderr(metrics: dict[str, Any], metric: str) -> float | None:
    name, _, how = metric.partition(",")
    value = metrics.get(f"{name}_stderr,{how}")
    return value if isinstance(value, float) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _fingerprint(
    setting: Setting, source: ModelSource, options: SweepOptions, tokenizer: Any
) -> dict[str, Any]:
    """All that the generations of a setting depend on. Not the batch size or number of samples: a
    larger one goes on where a smaller one ended."""
    rows = None
    if options.data is not None:
        rows = (Path(options.data) / f"{setting.task.name}.jsonl").read_bytes()
    return {
        **{f"model.{name}": value for name, value in source.identity.items()},
        "dtype": options.dtype or "the checkpoint's",
        "backend": options.backend,
        "cap": options.cap,
        "task": setting.task.task.task_name,
        "definition of the task": definition(setting.task),
        "rows": None if rows is None else hashlib.sha256(rows).hexdigest()[:16],
        "shots": setting.task.task.get_config("num_fewshot"),
        "chat template": _hash(tokenizer.get_chat_template()) if options.chat else None,
        "system": options.system,
        "turns": setting.turns,
        "tol": f"{setting.tol} per {setting.tol_per}" if setting.tol else None,
    }


def definition(task: OpenTask, scoring: bool = False) -> str:
    """A hash of what a task's file says of its requests, or of their scoring; the same in every
    process."""
    fields = {
        name: value
        for name, value in task.task.dump_config().items()
        if (name in SCORING) == scoring and name not in PLACES
    }
    by_source = task.task.config.serialize_function  # a function's address differs
    return _hash(json.dumps(fields, default=by_source, sort_keys=True))


def _scored_by(task: OpenTask) -> dict[str, str | None]:
    """A mark of the rules that score generations: where it changes they are scored again."""
    rules = Path(answers.__file__).read_text(encoding="utf-8")
    packages = {name: version_of(name) for name in ("lm-eval", "math-verify")}
    return {**packages, "task": definition(task, scoring=True), "rules": _hash(rules)}


def _check_samples(setting: Setting, options: SweepOptions) -> None:
    """Raise ConfigError if a process would have no sample, which lm-eval can't do."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    there = len(setting.task.task.eval_docs)
    count = min(options.limit or there, there)
    if count < processes:
        raise ConfigError(
            f"--limit: {setting.task.name} has {count} samples, fewer than the {processes} "
            "processes that share them"
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _claim(folder: Path, fingerprint: dict[str, Any], write: bool) -> None:
    """Make the folder of a setting, or see that it is of the same one."""
    file = folder / "setting.json"
    if any(folder.glob("generations*.jsonl")) or (folder / "metrics.json").exists():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file} does not say of which setting the generations beside it are ({error}); "
                "remove the folder"
            ) from error
        changed = [
            f"{name} was {before.get(name)} and is {fingerprint.get(name)}"
            for name in {**before, **fingerprint}
            if before.get(name) != fingerprint.get(name)
        ]
        if changed:
            raise ConfigError(
                f"{folder} holds generations of another setting: {'; '.join(changed)}. Choose "
                "another folder with --out, or remove that one"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if write:
        write_text(file, json.dumps(fingerprint, indent=2) + "\n")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))

"""One setting of a sweep: a task at a number of turns with a tolerance, and its folder.

setting.json         what its generations depend on, rows and prompts included; anything else is
                     refused
generations.jsonl    the generations, as they are made (`recording`)
samples.jsonl        in the end: document, prompt, response, target, metrics and more of each
metrics.json         in the end: the scores and their rules, read back when the sweep is run again
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.base.machine import version_of
from stars_fast.evaluation import answers
from stars_fast.evaluation.benchmarks import OpenTask
from stars_fast.evaluation.harness import RESAMPLES, SEED, figures, judge
from stars_fast.evaluation.kv_memory import KeyValues
from stars_fast.evaluation.pass_at import Score, sample_scores
from stars_fast.evaluation.recording import Journal, Key, Sampling
from stars_fast.evaluation.subjects import Subject
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.evaluation.verifier import TIMED_OUT
from stars_fast.models.adaptive import Per

SCORING = ("process_results", "metric_list", "filter_list", "doc_to_target", "should_decontaminate")
"""Fields of a task that its requests do not depend on."""
PLACES = ("metadata", "dataset_kwargs")
"""Fields that say where files lie; what is in them is looked at (`task_content`)."""


class Setting(NamedTuple):
    """A task at a depth. turns: None for a model without."""

    task: OpenTask
    turns: int | None
    tol: float
    tol_per: Per
    sampling: Sampling | None = None

    @property
    def name(self) -> str:
        name = self.task.name
        if self.turns is not None:
            name += f"-turns{self.turns}"
        if self.tol:
            name += f"-tol{self.tol:g}" + ("-token" if self.tol_per == "token" else "")
        return name if self.sampling is None else f"{name}-temp{self.sampling.temperature:g}"

    @property
    def generates(self) -> bool:
        """Whether the task is answered by generation, and not by likelihoods of given answers."""
        return self.task.task.OUTPUT_TYPE == "generate_until"


def evaluate_setting(
    model: Any, setting: Setting, folder: Path, source: Subject,
    options: SweepOptions,
) -> dict[str, Any] | None:  # fmt: skip
    """The fields of a `Result` that are measured; None on processes other than the first."""
    first = _rank() == 0
    _claim(folder, _fingerprint(setting, source, options, model), write=first)
    metrics = folder / "metrics.json"
    asked = {
        "limit": options.limit,
        "samples_each": options.samples,
        "scored_by": _scored_by(setting.task),
        "likelihoods": None if setting.generates else "fp32",
    }
    if metrics.exists():
        held = json.loads(metrics.read_text(encoding="utf-8"))
        if {name: held.pop(name, None) for name in asked} == asked:
            return held if first else None
    _check_samples(setting, options)
    lm = model.at(setting.turns, setting.tol)
    if setting.generates and options.cap >= lm.max_length:
        raise ConfigError(
            f"--max-new-tokens: expected less than the {lm.max_length} tokens that the model was "
            f"made for, got {options.cap}"
        )
    lm.journal, lm.sampling = Journal(folder, _rank()), setting.sampling
    torch.manual_seed(SEED)  # for a task that samples by itself; resumed, it samples otherwise
    judged = []
    for number in range(options.samples or 1):
        lm.sample = number
        found = judge(
            lm,
            setting.task.task,
            options.limit,
            RESAMPLES,
            apply_chat_template=options.chat,
            fewshot_as_multiturn=options.chat,
            system_instruction=options.system,
        )
        if found is not None:
            judged.append(found)
    memory = model.key_values(setting.turns)
    if not judged or not first:
        return None
    name, journal = setting.task.task.task_name, Journal(folder)
    samples = [
        sample
        for number, found in enumerate(judged)
        for sample in _samples(found["samples"][name], journal, number)
    ]
    lines = "".join(json.dumps(sample, default=str) + "\n" for sample in samples)
    write_text(folder / "samples.jsonl", lines)
    merged = {key: value for found in judged for key, value in found["results"][name].items()}
    made = _measures(merged, samples, setting, memory)
    write_text(metrics, json.dumps({**asked, **made}, indent=2) + "\n")
    return made


def _samples(
    logged: Sequence[dict[str, Any]], journal: Journal, number: int
) -> list[dict[str, Any]]:
    """One a document, in their order: lm-eval logs one a document and filter."""
    samples: dict[int, dict[str, Any]] = {}
    for row in sorted(logged, key=lambda row: row["doc_id"]):
        sample = samples.setdefault(
            row["doc_id"],
            {
                "doc_id": row["doc_id"],
                "sample": number,
                "doc": row["doc"],
                "prompt": _one([given[0] for given in row["arguments"]]),
                "response": _one([response for response, *_ in row["resps"]]),
                "target": row["target"],
                "timed_out": False,
                "metrics": {},
            },
        )
        sample["timed_out"] |= bool(row[TIMED_OUT])
        names = (name for name in row["metrics"] if name != TIMED_OUT)
        sample["metrics"] |= {f"{name},{row['filter']}": row[name] for name in names}
    for sample in samples.values():
        prompt = sample["prompt"]
        key = Key.of(prompt, sample["doc_id"], number) if isinstance(prompt, str) else None
        record = None if key is None else journal.find(key)
        if record is not None:
            sample |= {k: v for k, v in record.items() if k not in (*Key._fields, "response")}
            if record.get("read"):
                sample["mean_turns"] = record["turns"] / record["read"]
    return list(samples.values())


def _one(values: list[Any]) -> Any:
    """The value, or all where a document has several requests, as a choice between answers has."""
    return values[0] if len(values) == 1 else values


def _measures(
    metrics: dict[str, Any],
    samples: Sequence[dict[str, Any]],
    setting: Setting,
    memory: KeyValues | None,
) -> dict[str, Any]:
    task, values = setting.task, figures(metrics)
    errors = {name: _stderr(metrics, name) for name in values}
    metric = task.metric or next(iter(values), None)
    timeouts = sum(sample["timed_out"] for sample in samples)
    if metric not in values:
        why = f", as the verifier ran out of time {timeouts} times" if timeouts else ""
        raise ConfigError(
            f"{task.name}: lm-eval gave no metric {metric}, but {sorted(values)}{why}"
        )
    passed: dict[int, Score] = {}
    if setting.sampling is not None:
        scores = _sample_scores(samples, values, setting.sampling.count)
        if metric not in scores:
            raise ConfigError(
                f"--samples: expected a metric that is a number a sample, got {metric} of "
                f"{task.name}"
            )
        values = {name: average.value for name, (average, _) in scores.items()}
        errors = {name: average.stderr for name, (average, _) in scores.items()}
        passed = scores[metric][1]
    generated = [sample for sample in samples if "tokens" in sample]
    read = sum(sample.get("read") or 0 for sample in generated)
    seconds = sum(sample["seconds"] for sample in generated)
    return {
        "metric": metric,
        "accuracy": values[metric],
        "stderr": errors[metric],
        "n": len({sample["doc_id"] for sample in samples if not sample["timed_out"]}),
        "timeouts": timeouts,
        "metrics": values,
        "stderrs": errors,
        "pass_at": {str(k): score._asdict() for k, score in passed.items()},
        "tokens": _mean([sample["tokens"] for sample in generated]),
        "cut": _mean([float(sample["cut"]) for sample in generated]),
        "mean_turns": sum(sample["turns"] for sample in generated) / read if read else None,
        "seconds": seconds or None,
        "tokens_per_second": sum(s["tokens"] for s in generated) / seconds if seconds else None,
        "kv_bytes_per_token": memory and memory.token,
        "kv_bytes_at_context": memory and memory.context,
        "context_length": memory and memory.length,
    }


def _sample_scores(
    samples: Sequence[dict[str, Any]], metrics: Iterable[str], count: int
) -> dict[str, tuple[Score, dict[int, Score]]]:
    """avg@count and pass@k of those metrics that are a number a sample."""
    scores = {}
    for metric in metrics:
        verdicts: dict[int, list[Any]] = {}
        for sample in samples:
            given = verdicts.setdefault(sample["doc_id"], [])
            given += [sample["metrics"][metric]] if metric in sample["metrics"] else []
        values = [value for given in verdicts.values() for value in given]
        if values and all(isinstance(value, (int, float)) for value in values):
            scores[metric] = sample_scores(verdicts, count)
    return scores


def _stderr(metrics: dict[str, Any], metric: str) -> float | None:
    name, _, how = metric.partition(",")
    value = metrics.get(f"{name}_stderr,{how}")
    return value if isinstance(value, float) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _fingerprint(
    setting: Setting, source: Subject, options: SweepOptions, model: Any
) -> dict[str, Any]:
    """All that the generations of a setting depend on. Not the batch size or number of samples: a
    larger one goes on where a smaller one ended."""
    template = _hash(model.tokenizer.get_chat_template()) if options.chat else None
    return {
        **{f"model.{name}": value for name, value in source.identity.items()},
        "dtype": options.dtype or "the checkpoint's",
        "backend": model.backend,
        "cap": options.cap,
        "task": setting.task.task.task_name,
        "definition of the task": definition(setting.task),
        "rows": setting.task.content.rows,
        "prompts": setting.task.content.prompts,
        "shots": setting.task.task.get_config("num_fewshot"),
        "chat template": template,
        "system": options.system,
        "turns": setting.turns,
        "tol": f"{setting.tol} per {setting.tol_per}" if setting.tol else None,
        "temperature": setting.sampling and setting.sampling.temperature,
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
    own = {"task": definition(task, scoring=True), "code": task.content.code}
    return {**packages, **own, "rules": _hash(rules)}


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

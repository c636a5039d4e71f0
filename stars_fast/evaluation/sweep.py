"""`stars-fast eval DIR --tasks ...`: benchmarks against the number of turns and the tolerance, and
of standard models beside them.

Every setting (`setting`) has a folder. What is there is not made again, and what was made by
another model, dtype, cap or prompt is refused.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.evaluation.backend_check import compare_backends
from stars_fast.evaluation.benchmarks import OpenTask, open_tasks
from stars_fast.evaluation.loading import make_folder
from stars_fast.evaluation.native_model import NativeModel
from stars_fast.evaluation.report import Report, Result, labels_of
from stars_fast.evaluation.setting import Setting, evaluate_setting
from stars_fast.evaluation.subjects import Subject, find_subject
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.evaluation.vllm_model import VllmModel, why_not
from stars_fast.models.standard import StandardModel

CUT_WARNING = 0.05
"""Share of generations ended by the cap above which a score is not to be trusted."""


def run_sweep(options: SweepOptions) -> list[Result]:
    """Evaluate, print the table, and write the report; returns what was found.

    Under torchrun the processes share the samples, and the first one writes and returns all.

    Raises:
        ConfigError: a mistake in the options, or a folder of other generations.
    """
    _check(options)
    sources = [find_subject(path, options.step, "--tasks") for path in options.models]
    names = labels_of({source.path: source.label for source in sources})
    models = [_model(source, options) for source in sources]
    for model in models:
        _check_prompt(model.tokenizer, model.source, options)
    tasks = open_tasks(
        options.tasks, options.data, options.cap, options.shots, sampling=options.sampling
    )
    out = Path(options.out) if options.out else default_out(options.models[0])
    make_folder(out)
    report = Report(out, sources, names, options)
    for model in models:
        label, place = names[model.source.path], out / _folder_name(model.source)
        settings = list(_settings(model.source, options, tasks))
        if len(options.backends) > 1 and isinstance(model, VllmModel):
            report.backends[label] = _compared(model, settings, place, options)
        for setting in settings:
            made = evaluate_setting(model, setting, place / setting.name, model.source, options)
            if made is None:  # not the first process
                continue
            result = Result(
                model=label,
                task=setting.task.name,
                turns=setting.turns,
                tol=setting.tol or None,
                samples=setting.task.samples,
                samples_each=options.samples,
                temperature=None if options.sampling is None else options.sampling.temperature,
                **made,
            )
            report.add(result)
            _warn(result, options.cap)
            _say(f"{result.model} {setting.name}: {result.summary}")
        model.close()
    report.finish()
    return report.results


def default_out(first: str) -> Path:
    """Where results go by default: beside the first model, or here for one of the hub."""
    local = Path(first)
    return (local if local.is_dir() else Path(_file_name(local.name))) / "evaluation"


def _model(source: Subject, options: SweepOptions) -> NativeModel | VllmModel:
    """The model in its backend: of two, vLLM where it can."""
    if options.backends == ["native"]:
        return NativeModel(source, options)
    if len(options.backends) > 1 and why_not(source):
        return NativeModel(source, options)
    return VllmModel(source, options)


def _compared(
    model: VllmModel, settings: Sequence[Setting], folder: Path, options: SweepOptions
) -> str | None:
    """How greedy answers of vLLM and ours differ, in words; None without a task that generates.
    A sweep that goes on does not ask again."""
    file = folder / "backends.txt"
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    setting = next((setting for setting in settings if setting.generates), None)
    if setting is None:
        return None
    found = compare_backends(NativeModel(model.source, options), model, setting, options)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, f"{found}\n")
    _say(f"{'warning: ' if found.differences else ''}{setting.name}: {found}")
    return str(found)


def _settings(
    source: Subject, options: SweepOptions, tasks: Sequence[OpenTask]
) -> Iterator[Setting]:
    """The turns change least often: vLLM loads a model for each number of them. A standard model
    has none."""
    standard = isinstance(source, StandardModel)
    for turns in [None] if standard else options.turns:
        for tol in [0.0] if standard else options.tols:
            for task in tasks:
                yield Setting(task, turns, tol, options.tol_per, options.sampling)


def _check(options: SweepOptions) -> None:
    for tol in options.tols:
        if not 0 <= tol < 1:
            raise ConfigError(f"--tol: expected a value in [0, 1), got {tol}")
    if options.shots is not None and options.shots < 0:
        raise ConfigError(f"--num-fewshot: expected 0 or more, got {options.shots}")
    if options.samples is None and options.temperature is not None:
        raise ConfigError("--temperature: expected none without --samples, whose it is")
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        raise ConfigError(
            f"--temperature: expected a value above 0, got {options.temperature:g}; without "
            "--samples the answers are greedy"
        )
    if "vllm" in options.backends and any(options.tols):
        raise ConfigError("--tol: expected none with --backend vllm, which runs all turns")
    if options.system is not None and not options.chat:
        raise ConfigError("--system: expected none with --no-chat-template, which has no roles")


def _check_prompt(tokenizer: Any, source: Subject, options: SweepOptions) -> None:
    if options.chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{source.path}: its tokenizer has no chat template; evaluate it with "
            "--no-chat-template"
        )


def _warn(result: Result, cap: int) -> None:
    where = result.task + ("" if result.turns is None else f" at {result.turns} turns")
    if result.cut is not None and result.cut > CUT_WARNING:
        _say(
            f"warning: {result.cut:.0%} of the generations of {where} were cut at {cap} tokens, "
            "before their answer may have come; raise --max-new-tokens"
        )
    if result.timeouts:
        _say(
            f"warning: math-verify ran out of time on {result.timeouts} responses of {where}, "
            "which are left out of the score"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _folder_name(source: Subject) -> str:
    """The same whatever else is evaluated, and however the path is written."""
    place = str(Path(source.path).resolve()) if Path(source.path).is_dir() else source.path
    return f"{_file_name(source.label)}-{hashlib.sha256(place.encode()).hexdigest()[:6]}"


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.-]+", "-", label).strip("-") or "model"

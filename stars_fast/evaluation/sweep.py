"""`stars-fast eval DIR --tasks ...`: benchmarks against the number of turns and the tolerance.

Every setting (`setting`) has a folder. What is there is not made again, and what was made by
another model, dtype, cap or prompt is refused.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stars_fast.base.errors import ConfigError
from stars_fast.evaluation.benchmarks import OpenTask, open_tasks
from stars_fast.evaluation.loading import make_folder
from stars_fast.evaluation.native_model import NativeModel
from stars_fast.evaluation.report import Result, labels_of, write_sweep
from stars_fast.evaluation.setting import Setting, evaluate_setting
from stars_fast.evaluation.sweep_options import SweepOptions
from stars_fast.evaluation.vllm_model import VllmModel
from stars_fast.models.saved import ModelSource, find_model

CUT_WARNING = 0.05
"""Share of generations ended by the cap above which a score is not to be trusted."""


def run_sweep(options: SweepOptions) -> list[Result]:
    """Evaluate, print the table, and write the report; returns what was found.

    Under torchrun the processes share the samples, and the first one writes and returns all.

    Raises:
        ConfigError: a mistake in the options, or a folder of other generations.
    """
    _check(options)
    sources = [find_model(path, options.step).need_causal_lm("--tasks") for path in options.models]
    if options.backend == "vllm" and (other := [s for s in sources if s.family.name != "ouro"]):
        raise ConfigError(
            f"--backend: expected native for {other[0].path}, a model of "
            f"{other[0].family.title}: vLLM knows Ouro alone"
        )
    names = labels_of({source.path: source.label for source in sources})
    tasks = open_tasks(options.tasks, options.data, options.cap, options.shots)
    out = Path(options.out) if options.out else default_out(options.models[0])
    make_folder(out)
    found: list[Result] = []
    for source in sources:
        model = _MODELS[options.backend](source, options)
        _check_prompt(model.tokenizer, source, options)
        for setting in _settings(options, tasks):
            folder = out / _folder_name(source) / setting.name
            made = evaluate_setting(model, setting, folder, source, options)
            if made is None:  # not the first process
                continue
            result = Result(
                model=names[source.path],
                task=setting.task.name,
                turns=setting.turns,
                tol=setting.tol or None,
                samples=setting.task.samples,
                **made,
            )
            found.append(result)
            _warn(result, options.cap)
            _say(f"{result.model} {setting.name}: {result.summary}")
            write_sweep(out, found, sources, names, options, final=False)
        model.close()
    if found:
        write_sweep(out, found, sources, names, options, final=True)
    return found


def default_out(first: str) -> Path:
    """Where results go by default: beside the first model, or here for one of the hub."""
    local = Path(first)
    return (local if local.is_dir() else Path(_file_name(local.name))) / "evaluation"


_MODELS: dict[str, type[NativeModel] | type[VllmModel]] = {
    "native": NativeModel,
    "vllm": VllmModel,
}


def _settings(options: SweepOptions, tasks: Sequence[OpenTask]) -> Iterator[Setting]:
    """The turns change least often: vLLM loads a model for each number of them."""
    for turns in options.turns:
        for tol in options.tols:
            for task in tasks:
                yield Setting(task, turns, tol, options.tol_per)


def _check(options: SweepOptions) -> None:
    for tol in options.tols:
        if not 0 <= tol < 1:
            raise ConfigError(f"--tol: expected a value in [0, 1), got {tol}")
    if options.shots is not None and options.shots < 0:
        raise ConfigError(f"--num-fewshot: expected 0 or more, got {options.shots}")
    if options.backend == "vllm" and any(options.tols):
        raise ConfigError("--tol: expected none with --backend vllm, which runs all turns")
    if options.system is not None and not options.chat:
        raise ConfigError("--system: expected none with --no-chat-template, which has no roles")


def _check_prompt(tokenizer: Any, source: ModelSource, options: SweepOptions) -> None:
    if options.chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{source.path}: its tokenizer has no chat template; evaluate it with "
            "--no-chat-template"
        )


def _warn(result: Result, cap: int) -> None:
    if result.cut is not None and result.cut > CUT_WARNING:
        _say(
            f"warning: {result.cut:.0%} of the generations of {result.task} at {result.turns} "
            f"turns were cut at {cap} tokens, before their answer may have come; raise "
            "--max-new-tokens"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _folder_name(source: ModelSource) -> str:
    """The same whatever else is evaluated, and however the path is written."""
    place = str(Path(source.path).resolve()) if Path(source.path).is_dir() else source.path
    return f"{_file_name(source.label)}-{hashlib.sha256(place.encode()).hexdigest()[:6]}"


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.-]+", "-", label).strip("-") or "model"

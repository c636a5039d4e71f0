"""The mathematical benchmarks of the paper as tasks of lm-eval, zero-shot."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import check_utf8
from stars_fast.data.chat import MESSAGE_END
from stars_fast.evaluation.harness import index_tasks, is_yaml, process_once, seeded, uncached_maps
from stars_fast.evaluation.recording import Sampling
from stars_fast.evaluation.task_content import Content, content_of


class Benchmark(NamedTuple):
    """task: lm-eval's name. metric: what is reported, with lm-eval's filter. samples: of the full
    set."""

    task: str
    metric: str
    samples: int


BENCHMARKS = {
    "gsm8k": Benchmark("gsm8k", "exact_match,flexible-extract", 1319),
    "gsm8k-value": Benchmark("stars_fast_gsm8k", "exact_match,none", 1319),
    "math500": Benchmark("minerva_math500", "math_verify,none", 500),
    "asdiv": Benchmark("stars_fast_asdiv", "exact_match,none", 2305),
    "svamp": Benchmark("stars_fast_svamp", "exact_match,none", 300),
    "amc23": Benchmark("stars_fast_amc23", "math_verify,none", 40),
}
"""By the names that `stars-fast eval --tasks` takes, besides those of lm-eval's other tasks.
gsm8k-value is gsm8k with the answer compared by value, as those of ASDiv and SVAMP are."""


@dataclass
class OpenTask:
    """A task that lm-eval loaded, with its data.

    name: in tables and folders. metric: what is reported; none for the task's first.
    samples: of the full set; none if not known.
    """

    name: str
    task: Any
    metric: str | None
    samples: int | None

    @cached_property
    def content(self) -> Content:
        """Hashes of what it asks and is judged by."""
        return content_of(self.task)


def check_tasks(names: Sequence[str], option: str) -> Any:
    """lm-eval's index, which has the tasks of those names.

    Raises:
        ConfigError: it names `option` as `harness.index_tasks`.
    """
    return index_tasks([_lm_eval_name(name) for name in names], option)


def open_tasks(
    names: Sequence[str],
    data: str | None,
    cap: int,
    shots: int | None,
    option: str = "--tasks",
    sampling: Sampling | None = None,
) -> list[OpenTask]:
    """The tasks, loaded.

    Args:
        names: of `BENCHMARKS`, of lm-eval's other tasks, or YAML files.
        data: folder of `NAME.jsonl` files with the columns of the data set, which take its place.
        cap: tokens of a generation at most.
        shots: examples in the prompt; by default none for a benchmark, else the task's own number.
        sampling: instead of how a task has its answers generated; none for that.

    Raises:
        ConfigError: it names the option: lm-eval is not installed, a task does not exist, is a
            group of tasks, its data can't be loaded, or it can't be sampled.
    """
    index = check_tasks(names, option)
    opened = []
    for name in names:
        task = _load(index, name, data, option)
        known = BENCHMARKS.get(name)
        if shots is not None or known:
            task.set_config("num_fewshot", shots or 0)
        _keep_asked_out(task)
        if task.OUTPUT_TYPE == "generate_until":
            given = task.get_config("generation_kwargs") or {}
            until = given.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            changes = {"max_gen_toks": cap, "until": list(dict.fromkeys([*until, MESSAGE_END]))}
            if sampling is not None:
                given, drawn = {}, {"do_sample": True, "temperature": sampling.temperature}
                changes |= drawn
            task.set_config("generation_kwargs", {**given, **changes})
        if sampling is not None:
            _check_sampled(task, name)
        label = Path(name).stem if is_yaml(name) else name
        full = None if known is None else known.samples
        opened.append(OpenTask(label, task, None if known is None else known.metric, full))
    return opened


def _check_sampled(task: Any, name: str) -> None:
    if task.OUTPUT_TYPE != "generate_until":
        raise ConfigError(
            f"--samples: expected tasks answered by generation, got {name}, which is answered by "
            f"{task.OUTPUT_TYPE}"
        )
    if (repeats := task.get_config("repeats") or 1) > 1:
        raise ConfigError(
            f"--samples: expected tasks that take one sample, got {name}, which takes {repeats}"
        )


def _lm_eval_name(name: str) -> str:
    return BENCHMARKS[name].task if name in BENCHMARKS else name


def _load(index: Any, name: str, data: str | None, option: str) -> Any:
    spec = _lm_eval_name(name)
    if spec in (*index.all_groups, *index.all_tags):
        raise ConfigError(f"{option}: expected single tasks, got {name}, which stands for several")
    with tempfile.TemporaryDirectory() as folder:
        if data is not None:
            spec = _with_local_data(index, name, Path(data), Path(folder))
        try:
            with seeded(), uncached_maps():
                tasks = list(index.load([spec])["tasks"].values())
        except Exception as error:  # of the hub, of datasets, of the task's own code
            raise ConfigError(
                f"{option} {name}: can't load it: {type(error).__name__}: {error}"
            ) from error
    if len(tasks) != 1:
        raise ConfigError(f"{option}: expected single tasks, got {name}, which stands for several")
    process_once(tasks[0])
    return tasks[0]


def _keep_asked_out(task: Any) -> None:
    """Where examples come from the documents that are asked, lm-eval leaves the asked one out only
    if it is told that both are one split."""
    config, examples = task.config, task.fewshot_cfg
    own = (examples.split, examples.samples, config.training_split)
    if own == (None, None, None) and None in (config.validation_split, config.test_split):
        config.test_split = config.test_split or config.validation_split
        examples.split = config.test_split


def _with_local_data(index: Any, name: str, data: Path, folder: Path) -> str:
    """A task file, in `folder`, that takes all from the task's own but the data."""
    label = Path(name).stem if is_yaml(name) else name
    rows = data / f"{label}.jsonl"
    if not rows.is_file():
        raise ConfigError(f"--data: expected {rows.name} for the task {name}, got {data}")
    try:
        check_utf8(rows)
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from error
    entry = None if is_yaml(name) else index.task_index[_lm_eval_name(name)]
    own = Path(name).resolve() if entry is None else entry.yaml_path
    if own is None:
        raise ConfigError(f"--data: {name} is no task of a YAML file, whose data can be replaced")
    changes = {
        "include": str(own),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(rows.resolve())}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": None,
    }
    if entry is not None:
        changes["task"] = entry.name
    file = folder / "task.yaml"
    file.write_text(json.dumps(changes), encoding="utf-8")  # which is YAML
    return str(file)

"""lm-eval (EleutherAI's evaluation harness): its index of tasks, and its evaluation of a model."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np

from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.evaluation.verifier import timeouts_told

TASK_FOLDER = Path(__file__).parent / "tasks"
"""Our tasks, as lm-eval's YAML files."""

SEED = 1234
"""lm-eval's own, of the examples in a prompt."""

RESAMPLES = 1000
"""Resamples of the bootstrap, for metrics whose standard error has no formula; a mean's has one."""


def index_tasks(tasks: Sequence[str], option: str) -> Any:
    """lm-eval's index of the tasks that there are, which takes seconds to make the first time; of
    ours alone if they are all that is asked for.

    Raises:
        ConfigError: it names `option` if lm-eval is not installed, or one of `tasks` is neither in
            the index nor a YAML file.
    """
    manager = need("lm_eval.tasks", option).TaskManager
    ours = _index(manager, whole=False)
    if tasks and set(tasks) <= set(ours.all_tasks):
        return ours
    index = _index(manager, whole=True)
    known = set(index.all_tasks)
    unknown = [task for task in tasks if task not in known and not is_yaml(task)]
    if unknown:
        raise ConfigError(
            f"{option}: expected names of lm-eval's tasks (stars-fast lm-eval ls tasks lists them) "
            f"or YAML files of tasks, got {', '.join(unknown)}"
        )
    return index


@cache
def _index(manager: Any, whole: bool) -> Any:
    return manager(include_path=str(TASK_FOLDER), include_defaults=whole)


def is_yaml(task: str) -> bool:
    """Whether a task is named by its file."""
    return Path(task).suffix == ".yaml" and Path(task).is_file()


@contextmanager
def seeded() -> Iterator[None]:
    """Random numbers that code of tasks draws, as to put answers in an order, are lm-eval's own
    inside, whatever was drawn before."""
    before, arrays = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(arrays)


@contextmanager
def uncached_maps() -> Iterator[None]:
    """Inside, `datasets` maps rows anew. It knows functions of modules by their names alone, so
    that from its cache come the rows that an older version of a task's code made."""
    datasets = need("datasets", "benchmarks")
    caching = datasets.is_caching_enabled()
    datasets.disable_caching()
    try:
        yield
    finally:
        if caching:
            datasets.enable_caching()


def process_once(task: Any) -> None:
    """Have the documents of a task made from its rows once, by its code as it is now. lm-eval makes
    them anew each time it looks at them, and relies on the cache of `datasets` for their being the
    same."""
    for settings in (task.config, task.fewshot_cfg):
        if settings.process_docs is not None:
            settings.process_docs = _once(settings.process_docs)


def _once(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    held: list[tuple[Any, Any]] = []

    @wraps(process)
    def once(rows: Any) -> Any:
        for given, made in held:
            if given is rows:
                return made
        with seeded(), uncached_maps():
            held.append((rows, process(rows)))
        return held[-1][1]

    return once


def prepare(task: Any) -> None:
    """Make a task of lm-eval ready for its requests to be built, as lm_eval.simple_evaluate."""
    task.set_fewshot_seed(SEED)
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)


def judge(
    model: Any, task: Any, limit: int | None = None, resamples: int = 0, **options: Any
) -> dict[str, Any] | None:
    """The results of `lm_eval.evaluate`; None on processes other than the first.

    Samples for which math-verify ran out of time are left out of the scores, and their number is
    the task's metric `verifier.TIMED_OUT`.

    Args:
        model: one of lm-eval's models, as deep as it is to think.
        task: one of lm-eval's, loaded.
        limit: samples; none for all.
        resamples: for the standard errors that need a bootstrap; 0 for no standard errors at all.
        options: others of `lm_eval.evaluate`.
    """
    prepare(task)
    loaded = {"tasks": {task.task_name: task}, "groups": {}}
    with seeded(), timeouts_told(task):
        return need("lm_eval", "benchmarks").evaluate(
            model, loaded, limit=limit, bootstrap_iters=resamples, **options
        )


def figures(metrics: dict[str, Any]) -> dict[str, float]:
    """The values of lm-eval's metrics of a task, without their standard errors."""
    return {
        metric: value
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }

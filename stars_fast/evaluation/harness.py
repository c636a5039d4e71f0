"""lm-eval (EleutherAI's evaluation harness) on a model in memory, at a number of turns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stars_fast.training.optional import need
from stars_fast.training.tree import ConfigError

TASKS = Path(__file__).parent / "tasks"
"""Our tasks, as lm-eval's YAML files."""

SEED = 1234
"""lm-eval's own, of the examples in a prompt."""

RESAMPLES = 1000
"""Of the bootstrap, for metrics whose standard error has no formula; a mean's has one."""


def index_tasks(tasks: Sequence[str], option: str = "eval.tasks") -> Any:
    """lm-eval's index of the tasks that there are, ours included. The first takes seconds to make.

    Raises ConfigError that names `option` if lm-eval is not installed, or one of `tasks` is neither
    in the index nor a YAML file.
    """
    index = _index(need("lm_eval.tasks", option).TaskManager)
    known = set(index.all_tasks)
    unknown = [task for task in tasks if task not in known and not is_yaml(task)]
    if unknown:
        raise ConfigError(
            f"{option} must be names of lm-eval's tasks (stars-fast lm-eval ls tasks lists them) "
            f"or YAML files of tasks, got {', '.join(unknown)}"
        )
    return index


@cache
def _index(manager: Any) -> Any:
    return manager(include_path=str(TASKS))


def is_yaml(task: str) -> bool:
    """Whether a task is named by its file."""
    return Path(task).suffix == ".yaml" and Path(task).is_file()


def judge(
    model: Any, loaded: dict[str, Any], limit: int | None = None, resamples: int = 0, **options: Any
) -> dict[str, Any] | None:
    """What `lm_eval.evaluate` finds; None on processes other than the first.

    Args:
        model: one of lm-eval's models, as deep as it is to think.
        loaded: tasks, as the index loads them.
        limit: samples of each task; none for all.
        resamples: for the standard errors that need a bootstrap; 0 for no standard errors at all.
        options: others of `lm_eval.evaluate`.
    """
    for task in loaded["tasks"].values():  # as lm_eval.simple_evaluate prepares them
        task.set_fewshot_seed(SEED)
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
    return need("lm_eval", "benchmarks").evaluate(
        model, loaded, limit=limit, bootstrap_iters=resamples, **options
    )


@contextmanager
def kept_depth(model: Any) -> Iterator[None]:
    """Leave a model with the depth and in the mode that it had; inside it is in evaluation mode."""
    names = ("total_ut_steps", "early_exit_step", "convergence_tol")
    before = {name: getattr(model.config, name) for name in names}
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model.config, name, value)
        model.train(was_training)


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    turns: Sequence[int],
    limit: int | None = None,
    batch_size: int = 8,
    index: Any = None,
) -> dict[str, dict[int, float]]:
    """Every metric of every task by number of turns: {"gsm8k/exact_match,strict-match": {4: 0.7}}.

    It computes in the dtype of the `torch.autocast` that it is called in, if any.

    Args:
        model: an `OuroForCausalLM`; it is left with its own number of turns, in its own mode.
        tokenizer: its tokenizer.
        tasks: names of lm-eval's tasks, or YAML files of tasks.
        turns: numbers of turns.
        limit: samples of each task; none for all.
        batch_size: sequences in a forward pass.
        index: what `index_tasks` gave, which is called here without one.

    Raises ConfigError as `index_tasks`.
    """
    index = index or index_tasks(tasks)
    lm_model = need("stars_fast.evaluation.lm_model", "eval.tasks")
    found: dict[str, dict[int, float]] = {}
    with kept_depth(model):
        judged = lm_model.StarsFastLM(
            model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            mixed_precision_dtype=_autocast_dtype(model.device.type),
        )
        loaded = index.load(list(tasks))
        for number in turns:
            lm_model.set_turns(model.config, number, None)
            result = judge(judged, loaded, limit)
            assert result is not None
            for task, metrics in result["results"].items():
                for metric, value in figures(metrics).items():
                    found.setdefault(f"{task}/{metric}", {})[number] = value
    return found


def figures(metrics: dict[str, Any]) -> dict[str, float]:
    """The values of lm-eval's metrics of a task, without their standard errors."""
    return {
        metric: value
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def _autocast_dtype(device: str) -> torch.dtype | None:
    """That of the autocast around; lm-eval sets its own, which would end it."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

"""lm-eval (EleutherAI's evaluation harness) on a model in memory, at each number of turns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stars_fast.training.optional import need
from stars_fast.training.tree import ConfigError


def index_tasks(tasks: Sequence[str]) -> Any:
    """lm-eval's index of the tasks that there are, which takes seconds to make.

    Raises ConfigError if lm-eval is not installed, or one of `tasks` is neither in the index nor a
    YAML file.
    """
    index = need("lm_eval.tasks", "eval.tasks").TaskManager()
    known = set(index.all_tasks)
    unknown = [task for task in tasks if task not in known and not _is_yaml(task)]
    if unknown:
        raise ConfigError(
            "eval.tasks must be names of lm-eval's tasks (lm-eval ls tasks lists them) or YAML "
            f"files of tasks, got {', '.join(unknown)}"
        )
    return index


def _is_yaml(task: str) -> bool:
    return Path(task).suffix == ".yaml" and Path(task).is_file()


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
    lm_eval = need("lm_eval", "eval.tasks")
    hf = need("lm_eval.models.huggingface", "eval.tasks")
    index = index or index_tasks(tasks)
    before, was_training = model.config.turns, model.training
    model.eval()
    found: dict[str, dict[int, float]] = {}
    try:
        for number in turns:
            model.config.turns = number
            wrapped = hf.HFLM(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=batch_size,
                mixed_precision_dtype=_autocast_dtype(model.device.type),
            )
            result = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=list(tasks),
                limit=limit,
                bootstrap_iters=0,
                task_manager=index,
            )
            for task, metrics in result["results"].items():
                for metric, value in metrics.items():
                    if isinstance(value, float) and "stderr" not in metric:
                        found.setdefault(f"{task}/{metric}", {})[number] = value
    finally:
        model.config.turns = before
        model.train(was_training)
    return found


def _autocast_dtype(device: str) -> torch.dtype | None:
    """That of the autocast around; HFLM sets its own, which would end it."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

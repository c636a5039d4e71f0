"""The benchmarks on a model in training, asked as `stars-fast eval --tasks` asks them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stars_fast.base.optional import need
from stars_fast.evaluation.benchmarks import open_tasks
from stars_fast.evaluation.harness import figures, judge

CAP = 2048
"""Tokens of a generation at most, as of `stars-fast eval`; half of a small model's."""


@contextmanager
def kept_depth(model: Any) -> Iterator[None]:
    """Leave a model with the depth and in the mode that it had; inside it is in evaluation mode."""
    names = ("total_ut_steps", "early_exit_step", "mean_recurrence", "convergence_tol")
    before = {name: getattr(model.config, name) for name in names if hasattr(model.config, name)}
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
) -> dict[str, dict[int, float]]:
    """Every metric of every task by number of turns: {"gsm8k/exact_match,strict-match": {4: 0.7}}.

    Prompts go through the tokenizer's chat template, if it has one. It computes in the dtype of the
    `torch.autocast` that it is called in, if any.

    Args:
        model: a causal language model of a family; it is left with its own number of turns, in its
            own mode.
        tokenizer: its tokenizer.
        tasks: as `benchmarks.open_tasks`.
        turns: numbers of turns.
        limit: samples of each task; none for all.
        batch_size: sequences in a forward pass.

    Raises:
        ConfigError: as `benchmarks.open_tasks`.
    """
    cap = min(CAP, model.config.max_position_embeddings // 2)
    opened = open_tasks(tasks, None, cap, None, "eval.tasks")
    chat = bool(tokenizer.chat_template)
    lm_model = need("stars_fast.evaluation.lm_model", "eval.tasks")
    found: dict[str, dict[int, float]] = {}
    lm_model.adopt_depth(model)  # and keep it, as the judge would not
    with kept_depth(model):
        judged = lm_model.StarsFastLM(
            model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            mixed_precision_dtype=_autocast_dtype(model.device.type),
        )
        for number in turns:
            lm_model.set_turns(model.config, number, None)
            for each in opened:
                result = judge(
                    judged, each.task, limit, apply_chat_template=chat, fewshot_as_multiturn=chat
                )
                assert result is not None
                for metric, value in figures(result["results"][each.task.task_name]).items():
                    found.setdefault(f"{each.name}/{metric}", {})[number] = value
    return found


def _autocast_dtype(device: str) -> torch.dtype | None:
    """That of the autocast around; lm-eval sets its own, which would end it."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

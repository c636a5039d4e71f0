"""lm-eval (EleutherAI's evaluation harness) on a model in memory, at each number of turns."""

from collections.abc import Sequence
from typing import Any

from stars_fast.training.optional import need


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    turns: Sequence[int],
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[int, float]]:
    """Every metric of every task by number of turns: {"gsm8k/exact_match,strict-match": {4: 0.7}}.

    Args:
        model: an `OuroForCausalLM`; it is left with its own number of turns, in its own mode.
        tokenizer: its tokenizer.
        tasks: names of lm-eval's tasks.
        turns: numbers of turns.
        limit: samples of each task; none for all.
        batch_size: sequences in a forward pass.

    Raises ConfigError if lm-eval is not installed.
    """
    lm_eval = need("lm_eval", "eval.tasks")
    hf = need("lm_eval.models.huggingface", "eval.tasks")
    before, was_training = model.config.turns, model.training
    model.eval()
    found: dict[str, dict[int, float]] = {}
    try:
        for number in turns:
            model.config.turns = number
            wrapped = hf.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            result = lm_eval.simple_evaluate(
                model=wrapped, tasks=list(tasks), limit=limit, bootstrap_iters=0
            )
            for task, metrics in result["results"].items():
                for metric, value in metrics.items():
                    if isinstance(value, float) and "stderr" not in metric:
                        found.setdefault(f"{task}/{metric}", {})[number] = value
    finally:
        model.config.turns = before
        model.train(was_training)
    return found

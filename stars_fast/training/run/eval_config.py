"""How a run judges its model: the section `eval`, by kind of data."""

from dataclasses import dataclass

from stars_fast.base.checks import check_integer


@dataclass
class EvalConfig:
    """Judging the model, during the run and at its end.

    turns: numbers of turns to evaluate at; empty for no evaluation.
    every: steps between evaluations; 0 for the end alone.
    """

    turns: tuple[int, ...] = (2, 4, 8)
    every: int = 0

    def __post_init__(self) -> None:
        if any(turns < 1 for turns in self.turns):
            raise ValueError(f"turns: expected a positive number, got {list(self.turns)}")
        check_integer("every", self.every, 0)


@dataclass
class SumsEvalConfig(EvalConfig):
    """Accuracy on unseen samples, during the run and at its end.

    limit: unseen samples to evaluate on.
    """

    turns: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 100)
    limit: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("limit", self.limit, 1)


@dataclass
class TextEvalConfig(EvalConfig):
    """Loss on what is held out and lm-eval's tasks, during the run and at its end.

    rows: samples in a forward pass.
    tasks: benchmarks and other tasks of lm-eval, as `stars-fast eval --tasks`; empty for none.
    tasks_limit: samples of each task; none for all.
    """

    rows: int = 8
    tasks: tuple[str, ...] = ()
    tasks_limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("rows", self.rows, 1)
        if self.tasks_limit is not None:
            check_integer("tasks_limit", self.tasks_limit, 1)

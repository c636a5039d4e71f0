"""Fine-tuning of Ouro on chats as a task of the trainer."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from stars_fast.base import tree
from stars_fast.base.checks import check_integer
from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.base.run_folder import RunFolder
from stars_fast.base.seeds import derive
from stars_fast.data.batches import Source
from stars_fast.data.chat import ChatDataConfig
from stars_fast.data.documents import PackedChats, PaddedChats
from stars_fast.data.packing import efficiency
from stars_fast.data.tokenised import TokenisedChats, load_chats
from stars_fast.models.families import family_named
from stars_fast.models.families.ouro import FAMILY, OuroSection
from stars_fast.training.config import EvalConfig, RunConfig
from stars_fast.training.run.task import Results
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.precision import autocast, parameter_dtype
from stars_fast.training.step.train_step import root_of


@dataclass
class OuroEvalConfig(EvalConfig):
    """Loss on the validation rows and lm-eval's tasks, during the run and at its end.

    rows: chats in a forward pass.
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


@dataclass(kw_only=True)
class Config(RunConfig):
    """A run that trains Ouro."""

    model: OuroSection = field(default_factory=OuroSection)
    data: ChatDataConfig
    eval: OuroEvalConfig = field(default_factory=OuroEvalConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval.tasks and not self.eval.turns:
            raise ConfigError("eval.turns must hold a number of turns for eval.tasks, got none")
        if self.eval.tasks and self.parallel.sharded:
            raise ConfigError(
                f"eval.tasks must be empty with parallel.kind {self.parallel.kind}: no process "
                "holds the whole model; export the run and evaluate that"
            )


def config_from(mapping: Mapping[str, Any]) -> Config:
    """The configuration from nested mappings. Raises ConfigError as `tree.build`."""
    return tree.build(Config, mapping)


class Task:
    """What a run trains, on what, and how it is judged."""

    def __init__(self, config: Config, world: World) -> None:
        need("transformers", "Ouro models")
        self.config = config
        self.world = world
        if config.eval.tasks:
            self._check_tasks()
        model, self.tokenizer = world.together(lambda: load(config))
        self.source, self.validation = self._data()
        self.loop = family_named(config.model.family).loop(model.to(world.device).train())
        self.guessing = math.log(model.config.vocab_size)

    def _check_tasks(self) -> None:
        """lm-eval and its tasks are looked for by the first process, which runs them."""
        from stars_fast.evaluation.benchmarks import check_tasks

        tasks, first = self.config.eval.tasks, self.world.first
        self.world.together(lambda: check_tasks(tasks, "eval.tasks") if first else None)

    def _data(self) -> tuple[Source, Source | None]:
        """The training data, tokenised by the first process of each machine, and the held-out."""
        data, world = self.config.data, self.world
        made = world.together(lambda: self._chats() if world.local_first else None)
        train, validation = world.together(lambda: made or self._chats())
        self.info = str(train.info)
        pad = self.tokenizer.pad_token_id or 0
        if data.packing:
            seed = derive(self.config.seed, "packing") % 2**32
            source: Source = PackedChats(train, data.row_length or data.max_length, seed)
        else:
            source = PaddedChats(train, pad)
        return source, None if validation is None else PaddedChats(validation, pad)

    def _chats(self) -> tuple[TokenisedChats, TokenisedChats | None]:
        seed = derive(self.config.seed, "data") % 2**32
        try:
            return load_chats(self.config.data, self.tokenizer, seed, quiet=not self.world.first)
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error

    @property
    def title(self) -> str:
        return f"Ouro ({self.config.model.path})"

    def describe(self, samples: int, tokens: int) -> str:
        rows = self.config.train.batch_size
        packed = f" in {rows} rows" if self.config.data.packing else ""
        return f"{samples} chats{packed} = {tokens:,} tokens"

    def notes(self) -> list[str]:
        notes = [f"data: {self.info}"]
        if isinstance(self.source, PackedChats):
            full = efficiency(self.source.rows, self.source.chats.lengths, self.source.longest)
            notes.append(
                f"packed in {len(self.source):,} rows of {self.source.longest:,} tokens, "
                f"{full:.1%} full"
            )
        return notes

    def write(self, folder: RunFolder) -> None:
        """What makes weights a model: configuration and tokenizer."""
        FAMILY.keep(self.loop.model, self.tokenizer, folder.model)

    def evaluate(self, step_loss: nn.Module, say: Callable[[str], None]) -> Results:
        """The validation loss, and lm-eval's metrics, by number of turns."""
        from stars_fast.training.run.in_training import run_tasks
        from stars_fast.training.run.validation import validation_losses

        config, world = self.config, self.world
        results: Results = {}
        if not config.eval.turns:
            return results
        computing = autocast(config.precision, world.device, config.parallel.sharded)
        if self.validation is not None:
            root, rows = root_of(step_loss), config.eval.rows
            results["validation_loss"] = validation_losses(
                root, self.validation, config.eval.turns, world, rows, computing
            )
        if config.eval.tasks and world.first:
            asked = config.eval
            try:
                with computing:
                    results |= run_tasks(
                        self.loop.model,
                        self.tokenizer,
                        asked.tasks,
                        asked.turns,
                        asked.tasks_limit,
                    )
            except Exception as error:  # what a task downloads or computes must not end the run
                say(f"warning: lm-eval failed, the run goes on: {type(error).__name__}: {error}")
        return results

    def tell(self, results: Results) -> list[str]:
        return [
            f"{name.replace('_', ' ')} by turns  "
            + "  ".join(f"{turns}: {value:.4g}" for turns, value in values.items())
            for name, values in results.items()
        ]

    def draw(self, results: Results, folder: Path) -> None:
        from stars_fast.base.plots import loss_against_turns

        if "validation_loss" in results:
            loss_against_turns(
                {self.config.name: results["validation_loss"]},
                folder / "validation.png",
                trained_depth=self.config.trained_turns,
            )


def load(config: Config) -> tuple[Any, Any]:
    """The model in the dtype of its parameters, on the CPU, and its tokenizer."""
    return FAMILY.start(config.model, parameter_dtype(config.precision), config.seed)

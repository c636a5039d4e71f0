"""Task of a run: a model of some family, data of some kind, and how the answers are judged."""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.kinds import OpenData, kind_named
from stars_fast.evaluation.addition import evaluate, judged_on
from stars_fast.models.families import family_named
from stars_fast.models.freeze import freeze
from stars_fast.models.loop import Loop
from stars_fast.models.lora import adapt, base_dtype, fingerprint
from stars_fast.training.run.eval_config import SumsEvalConfig, TextEvalConfig
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.precision import autocast, parameter_dtype
from stars_fast.training.step.train_step import root_of

if TYPE_CHECKING:
    from stars_fast.training.config import RunConfig

Results = dict[str, dict[int, float]]
"""Figures by number of turns, by name: {"accuracy": {4: 0.98, 8: 0.97}}."""


class Task:
    """A model and the data it is trained on.

    Attributes:
        family: of the model.
        base: the `lora.fingerprint` of the weights that stay as they are; None without adapters.
        loop: the model.
        tokenizer: of transformers; None for a model without one.
        data: opened; `data.source` is the training data.
        judge: of its answers.
        guessing: the token loss of a uniform guess, in nats.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config = config
        self.world = world
        self.judge = judge_of(config, world)
        self.family = family_named(config.model.family)
        self.loop, self.tokenizer = world.together(self._start)
        # What is kept on disk is made by the first process of each machine
        made = world.together(lambda: self._open() if world.local_first else None)
        self.data: OpenData = world.together(lambda: made or self._open())
        self._check_tokens()
        self.loop.to(world.device).train()
        self.base = fingerprint(self.loop.model) if config.lora.wanted else None
        self.guessing = math.log(self.loop.vocabulary)

    def _start(self) -> tuple[Loop, Any]:
        """The model and its tokenizer, on the CPU."""
        config, dtype = self.config, parameter_dtype(self.config.precision)
        if not config.lora.wanted:
            model, tokenizer = self.family.start(config.model, dtype, config.seed)
            freeze(model, config.train.freeze)
            return self.family.loop(model), tokenizer
        need("peft", "LoRA adapters")  # before a model is loaded in vain
        frozen = base_dtype(config.precision)
        model, tokenizer = self.family.start(config.model, frozen, config.seed)
        loop = self.family.loop(model)
        adapt(loop, config.lora, dtype, config.seed)
        return loop, tokenizer

    def _open(self) -> OpenData:
        kind, data = kind_named(self.config.data.kind), self.config.data
        try:
            return kind.open(data, self.tokenizer, self.config.seed, not self.world.first)
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error

    def _check_tokens(self) -> None:
        """Refuse data with tokens that the model has no embedding for, which a GPU would not name.

        Raises:
            ConfigError: there is one.
        """
        size = self.loop.vocabulary
        if self.tokenizer is None or max(self.tokenizer.get_vocab().values()) < size:
            return
        sources = [each for each in (self.data.source, self.data.held_out) if each is not None]
        largest = max(source.largest_token() for source in sources)
        if largest >= size:
            raise ConfigError(
                f"data: token {largest}, {self.tokenizer.convert_ids_to_tokens(largest)!r}, is "
                f"beyond the {size} that the model has embeddings for: its tokenizer is that of "
                "another model"
            )

    @property
    def title(self) -> str:
        """The model, for the banner."""
        return self.family.describe(self.config.model)

    @property
    def packs(self) -> bool:
        """Whether a unit of the data is a row of several samples."""
        return kind_named(self.config.data.kind).packs(self.config.data)

    def describe(self, samples: int, tokens: int) -> str:
        """A step's batch, for the banner."""
        packed = f" in {self.config.train.batch_size} rows" if self.packs else ""
        return f"{samples} {self.data.unit}{packed} = {tokens:,} tokens"

    def warnings(self) -> list[str]:
        """Lines on a batch that the data are too few for."""
        size, units = self.config.train.batch_size, len(self.data.source)
        if size <= units:
            return []
        what = f"packed rows of {self.data.unit}" if self.packs else self.data.unit
        return [
            f"train.batch_size ({size:,}) is more than the {units:,} {what} to train on: a step "
            f"takes the same ones {size / units:.3g} times on average"
        ]

    def next_commands(self, path: Path) -> list[str]:
        """Commands that one gives when a run in this folder is done."""
        run = shlex.quote(str(path))
        commands = [f"stars-fast analyze {run}"]
        if kind_named(self.config.data.kind).exact_match:
            return [f"stars-fast eval {run} --turns 1,2,4,8,16,32,64,100", *commands]
        return [*commands, f"stars-fast export {run} {shlex.quote(f'{path.name}-model')}"]

    def write(self, folder: RunFolder) -> None:
        """Write to the run folder what is needed beside weights; the first process calls it."""
        self.family.keep(self.loop.model, self.tokenizer, folder.model)

    def evaluate(self, step_loss: nn.Module, say: Callable[[str], None]) -> Results:
        """Judge the model; every process calls it, and the first gets the results. `step_loss` is
        the `StepLoss` of the loop, perhaps made parallel; `say` tells people what went wrong."""
        if not self.config.eval.turns:
            return {}
        return self.judge.results(self, step_loss, say)


class Judge(ABC):
    """How answers on a kind of data are judged."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config = config
        self.world = world

    @abstractmethod
    def results(self, task: Task, step_loss: nn.Module, say: Callable[[str], None]) -> Results:
        """As `Task.evaluate`."""

    @abstractmethod
    def tell(self, results: Results) -> list[str]:
        """The results at the end of the run, for people."""

    @abstractmethod
    def draw(self, results: Results, folder: Path, unit: str) -> list[str]:
        """Draw figures of the results on samples of that name, in the plural; names of the
        files."""


class SumsJudge(Judge):
    """Accuracy on unseen samples, evaluated on the first process."""

    def results(self, task: Task, step_loss: nn.Module, say: Callable[[str], None]) -> Results:
        asked = self.config.eval
        assert isinstance(asked, SumsEvalConfig)
        if not self.world.first:
            return {}
        turns = list(asked.turns)
        # Adapters may be in another dtype than the weights they adapt
        adapted = self.config.lora.wanted
        casts = autocast(self.config.precision, self.world.device, False)
        with casts if adapted else nullcontext():
            return {
                name: evaluate(task.loop, source, turns, asked.limit)
                for name, source in judged_on(task.data).items()
            }

    def tell(self, results: Results) -> list[str]:
        lines = []
        for name, values in results.items():
            shown = "  ".join(f"{turns}: {value:.1%}" for turns, value in values.items())
            lines.append(f"{name.replace('accuracy', 'exact match')} by turns  {shown}")
        return lines

    def draw(self, results: Results, folder: Path, unit: str) -> list[str]:
        from stars_fast.base.plots import accuracy_against_turns

        name = self.config.name
        accuracy_against_turns(
            {key.replace("accuracy", name): values for key, values in results.items()},
            folder / "accuracy.png",
            title=f"{name}: exact match on unseen {unit}",
            ylabel="answered exactly",
            trained_depth=self.config.trained_turns,
        )
        return ["accuracy.png"]


class TextJudge(Judge):
    """The loss on what is held out, and lm-eval's metrics."""

    def __init__(self, config: RunConfig, world: World) -> None:
        super().__init__(config, world)
        assert isinstance(config.eval, TextEvalConfig)
        self.asked = config.eval
        if self.asked.tasks:  # looked for by the first process, which runs them
            from stars_fast.evaluation.benchmarks import check_tasks

            tasks = self.asked.tasks
            world.together(lambda: check_tasks(tasks, "eval.tasks") if world.first else None)

    def results(self, task: Task, step_loss: nn.Module, say: Callable[[str], None]) -> Results:
        from stars_fast.training.run.in_training import run_tasks
        from stars_fast.training.run.validation import validation_losses

        config, world, asked = self.config, self.world, self.asked
        results: Results = {}
        computing = autocast(config.precision, world.device, config.parallel.sharded)
        if task.data.held_out is not None:
            results["validation_loss"] = validation_losses(
                root_of(step_loss), task.data.held_out, asked.turns, world, asked.rows, computing
            )
        if asked.tasks and world.first:
            try:
                with computing:
                    results |= run_tasks(
                        task.loop.model,
                        task.tokenizer,
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

    def draw(self, results: Results, folder: Path, unit: str) -> list[str]:
        from stars_fast.base.plots import loss_against_turns

        if "validation_loss" not in results:
            return []
        loss_against_turns(
            {self.config.name: results["validation_loss"]},
            folder / "validation.png",
            title=f"{self.config.name}: validation loss",
            trained_depth=self.config.trained_turns,
        )
        return ["validation.png"]


def judge_of(config: RunConfig, world: World) -> Judge:
    """The judge of a run, by its section `eval`."""
    return (SumsJudge if isinstance(config.eval, SumsEvalConfig) else TextJudge)(config, world)

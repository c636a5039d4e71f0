"""The paper's addition study as a task of the trainer."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from stars_fast.base import tree
from stars_fast.base.checkpoints import load_weights
from stars_fast.base.checks import check_integer
from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.addition import AdditionConfig, AdditionData, AdditionTokenizer
from stars_fast.data.batches import HostBatch
from stars_fast.evaluation.addition import evaluate
from stars_fast.models.families import family_named
from stars_fast.models.families.looped_lm import FAMILY, LoopedSection
from stars_fast.models.looped import LoopedLM
from stars_fast.tokens import padded_tokens
from stars_fast.training.config import EvalConfig, RunConfig, load_config
from stars_fast.training.run.task import Results
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.precision import parameter_dtype

FROM_DATA = ("model.vocab_size", "model.max_length")
"""Fields that follow from the data where a recipe does not give them."""


@dataclass
class AdditionEvalConfig(EvalConfig):
    """Accuracy on unseen samples, during the run and at its end.

    limit: unseen samples to evaluate on.
    """

    turns: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 100)
    limit: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("limit", self.limit, 1)


@dataclass(kw_only=True)
class Config(RunConfig):
    """A run of the addition study.

    precision: mixed (fp32 weights, bf16 compute), float32, or bfloat16 (weights and all).
    """

    precision: Literal["mixed", "float32", "bfloat16"] = "float32"
    model: LoopedSection
    data: AdditionConfig = field(default_factory=AdditionConfig)
    eval: AdditionEvalConfig = field(default_factory=AdditionEvalConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel.sharded:
            raise ConfigError(
                f"parallel.kind must be auto or ddp for the addition task, got {self.parallel.kind}"
            )


def config_from(mapping: Mapping[str, Any]) -> Config:
    """The configuration from nested mappings; the model's vocabulary and length from the data.

    Raises ConfigError as `tree.build`.
    """
    data = tree.build(AdditionConfig, mapping.get("data", {}), "data")
    needed = {"vocab_size": AdditionTokenizer.vocab_size, "max_length": 3 * data.digits + 3}
    config = tree.build(Config, tree.merge({"model": needed}, mapping))
    for name, low in needed.items():
        if getattr(config.model, name) < low:
            raise ConfigError(
                f"model.{name} must be at least {low} for the data, got "
                f"{getattr(config.model, name)}"
            )
    return config


class Sums:
    """The training sums as a source of batches; a unit is a sum."""

    def __init__(self, data: AdditionData) -> None:
        self.data = data

    @property
    def longest(self) -> int:
        return self.data.max_length

    def __len__(self) -> int:
        return len(self.data.train)

    def count(self, units: np.ndarray) -> np.ndarray:
        return np.ones_like(units)

    def fingerprint(self) -> int:
        return zlib.crc32(self.data.train.numpy().data)

    def batch(self, units: np.ndarray) -> HostBatch:
        tokens, targets, mask = self.data.batch("train", torch.from_numpy(units))
        return HostBatch(tokens, targets, padded_tokens(mask))


class Task:
    """What a run of the addition study trains, on what, and how it is judged."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        try:
            self.data = AdditionData(config.data)
        except (ValueError, OSError) as error:
            raise ConfigError(f"data: {error}") from error
        self.source = Sums(self.data)
        self.loop = family_named(config.model.family).loop(make_model(config).to(world.device))
        self.guessing = math.log(config.model.vocab_size)

    @property
    def title(self) -> str:
        return type(self.loop.model).__name__

    def describe(self, samples: int, tokens: int) -> str:
        return f"{samples} {self.config.data.digits}-digit sums = {tokens:,} tokens"

    def notes(self) -> list[str]:
        return []

    def write(self, folder: RunFolder) -> None:
        """The configuration says all of the model."""

    def evaluate(self, step_loss: nn.Module, say: Callable[[str], None]) -> Results:
        """Accuracy on unseen samples by number of turns, evaluated on the first process."""
        if not self.world.first or not self.config.eval.turns:
            return {}
        turns, limit = list(self.config.eval.turns), self.config.eval.limit
        model: Any = self.loop.model
        return {"accuracy": evaluate(model, self.data, turns, limit)}

    def tell(self, results: Results) -> list[str]:
        shown = "  ".join(f"{turns}: {value:.1%}" for turns, value in results["accuracy"].items())
        return [f"exact match by turns  {shown}"]

    def draw(self, results: Results, folder: Path) -> None:
        from stars_fast.base.plots import accuracy_against_turns

        accuracy_against_turns(
            {self.config.name: results["accuracy"]},
            folder / "accuracy.png",
            title=f"{self.config.name}: exact match on unseen sums",
            trained_depth=self.config.trained_turns,
        )


def make_model(config: Config) -> LoopedLM:
    """The model of `config` with its initial weights, a function of the seed, in the dtype that its
    precision keeps weights in."""
    return FAMILY.start(config.model, parameter_dtype(config.precision), config.seed)[0]


def load_model(path: str | Path, step: int | None = None) -> tuple[LoopedLM, Config]:
    """The model of a run, at `step` or its newest checkpoint, in the dtype that the run keeps its
    weights in, and the run's configuration.

    Raises ConfigError if the run or the checkpoint is not there, or is of another task.
    """
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ConfigError(f"{path} is not a run folder: it has no config.yaml")
    config = load_config(str(folder.config))
    if not isinstance(config, Config):
        raise ConfigError(f"{path} is a run of the task {config.task}, not of the addition study")
    model = FAMILY.outline(folder)
    load_weights(folder.checkpoint(step), model)
    return model, config

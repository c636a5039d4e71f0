"""The configuration of a run: one tree of dataclasses, read from recipes and the command line.

A recipe is YAML with the sections of `TrainConfig`. `base: NAME` starts from another recipe.
The full tree is written to the run folder and is itself a recipe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stars_fast.data.addition import AdditionConfig, AdditionTokenizer
from stars_fast.models.looped import LoopedConfig
from stars_fast.training import tree
from stars_fast.training.depth import DepthLaw
from stars_fast.training.durable import write_text
from stars_fast.training.methods import METHODS
from stars_fast.training.optim import OptimConfig
from stars_fast.training.optional import need
from stars_fast.training.penalty import PenaltyConfig
from stars_fast.training.recipes import read_recipe
from stars_fast.training.tree import ConfigError

ALIASES = {
    "reg_weight": "penalty.weight",
    "random_loop_mu": "depth.mu",
    "random_loop_sigma": "depth.sigma",
}
"""Names of the published code's options that mean one field here."""

FROM_DATA = ("model.vocab_size", "model.max_length")
"""Fields that follow from the data where a recipe does not give them."""


@dataclass
class LoopConfig:
    """The training loop.

    steps: optimiser steps.
    batch_size: samples per optimiser step, over all ranks and micro-batches.
    accumulation: micro-batches per optimiser step on each rank, each with a depth of its own; at
        a fixed depth it does not change the loss.
    backprop_turns: gradient through the last so many turns only; none for all.
    log_every: steps between lines of metrics.
    save_every: steps between checkpoints; 0 for the last step alone.
    keep: newest checkpoints kept; 0 for all.
    max_nonfinite: stop after so many non-finite steps in a row.
    reference_turns: the cost in the banner is relative to SFT at so many turns.
    device: auto is CUDA where there is one.
    threads: CPU threads per process; none for PyTorch's choice.
    tensorboard: also write TensorBoard events, if it is installed.
    """

    steps: int = 1000
    batch_size: int = 256
    accumulation: int = 1
    backprop_turns: int | None = None
    log_every: int = 10
    save_every: int = 500
    keep: int = 2
    max_nonfinite: int = 20
    reference_turns: int = 4
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name, low in (
            ("steps", 1),
            ("batch_size", 1),
            ("accumulation", 1),
            ("log_every", 1),
            ("save_every", 0),
            ("keep", 0),
            ("max_nonfinite", 1),
            ("reference_turns", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("backprop_turns", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 or none, got {getattr(self, name)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}")


@dataclass
class EvalConfig:
    """Accuracy on unseen samples, during the run and at its end.

    turns: numbers of turns to evaluate at; empty for no evaluation.
    limit: unseen samples to evaluate on.
    every: steps between evaluations; 0 for the end alone.
    """

    turns: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 100)
    limit: int = 1000
    every: int = 0

    def __post_init__(self) -> None:
        if any(turns < 1 for turns in self.turns):
            raise ValueError(f"turns must be positive, got {list(self.turns)}")
        if self.limit < 1 or self.every < 0:
            raise ValueError(
                f"limit must be at least 1 and every at least 0, got {self.limit} and {self.every}"
            )


@dataclass
class TrainConfig:
    """A run.

    method: sft, random-loop, jsrr, stars or l2.
    name: of the run, in figures and for its folder; the recipe's name by default.
    description: one line for the list of recipes.
    seed: of initial weights, data order, depths, noise and dropout.
    out: the run folder; runs/NAME by default.
    """

    method: str
    model: LoopedConfig
    name: str = "run"
    description: str = ""
    seed: int = 0
    out: str | None = None
    data: AdditionConfig = field(default_factory=AdditionConfig)
    depth: DepthLaw = field(default_factory=DepthLaw)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        fixed = METHODS[self.method].fixed_depth
        if fixed is True and self.depth.law != "fixed":
            raise ConfigError(
                f"method {self.method} trains at a fixed number of turns but depth.law is "
                f"{self.depth.law}; set depth.law to fixed and depth.value to the number"
            )
        if fixed is False and self.depth.law == "fixed":
            raise ConfigError(
                f"method {self.method} draws the number of turns but depth.law is fixed; "
                f"set depth.law to lognormal, poisson or uniform, or choose sft or jsrr"
            )
        if self.out is None:
            self.out = str(Path("runs") / self.name)

    @property
    def penalised(self) -> str | None:
        """The kind of penalty, "jacobian" or "l2"; None without one."""
        return METHODS[self.method].penalty if self.penalty.weight > 0 else None

    @property
    def trained_turns(self) -> int | tuple[int, int]:
        """The fixed number of turns, or the fewest and most of 98 % of the depth law."""
        if self.depth.law == "fixed":
            return self.depth.value
        return self.depth.quantile(0.01), self.depth.quantile(0.99)

    def penalty_weight(self, step: int) -> float:
        """lambda at `step`, 0 for a method without a penalty."""
        return self.penalty.weight_at(step) if self.penalised else 0.0


def load_config(recipe: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration of `recipe` with `overrides` in their places.

    `recipe` is the name of a recipe of the package, a YAML file, or a run folder. `overrides` are
    command-line words: "--penalty.weight", "0.05", "--steps=100".

    Raises ConfigError for a recipe that does not exist or does not parse, and as `tree.build`.
    """
    mapping = read_recipe(recipe)
    if Path(recipe).is_dir():  # a run, wherever it lies now
        mapping["out"] = recipe
    mapping = tree.merge(mapping, parse_overrides(overrides))
    mapping.setdefault("name", Path(recipe).stem)
    return config_from(mapping)


def config_from(mapping: Mapping[str, Any]) -> TrainConfig:
    """The configuration from nested mappings; the model's vocabulary and length from the data.

    Raises ConfigError as `tree.build`.
    """
    data = tree.build(AdditionConfig, mapping.get("data", {}), "data")
    needed = {"vocab_size": AdditionTokenizer.vocab_size, "max_length": 3 * data.digits + 3}
    config = tree.build(TrainConfig, tree.merge({"model": needed}, mapping))
    for name, low in needed.items():
        if getattr(config.model, name) < low:
            raise ConfigError(
                f"model.{name} must be at least {low} for the data, got "
                f"{getattr(config.model, name)}"
            )
    return config


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Command-line words "--field value" or "--field=value" as nested mappings.

    A field is its dotted path or its last name where that is unique; hyphens and underscores are
    alike. Raises ConfigError for an unknown or ambiguous field, a missing value, a stray word.
    """
    known = list(tree.leaves(TrainConfig))
    mapping: dict[str, Any] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected --field value, got {word!r}")
        name, has_value, value = word[2:].partition("=")
        if not has_value:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value")
            value = words.pop(0)
        path = resolve(name.replace("-", "_"), known)
        nested: Any = value
        for part in reversed(path.split(".")):
            nested = {part: nested}
        mapping = tree.merge(mapping, nested)
    return mapping


def resolve(name: str, known: Sequence[str]) -> str:
    """The dotted path among `known` that `name` stands for; ConfigError if none or several do."""
    name = ALIASES.get(name, name)
    if name in known:
        return name
    matches = [path for path in known if path.rpartition(".")[2] == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"--{name} is ambiguous: " + " or ".join(f"--{m}" for m in matches))
    names = {*known, *(path.rpartition(".")[2] for path in known), *ALIASES}
    raise ConfigError(tree.unknown(name, names))


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the full tree as YAML; `load_config` reads it back equal."""
    yaml = need("yaml", "recipes")
    write_text(path, yaml.safe_dump(tree.to_dict(config), sort_keys=False, allow_unicode=True))

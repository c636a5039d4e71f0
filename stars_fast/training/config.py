"""The configuration of a run: one tree of dataclasses, read from recipes and the command line.

A recipe is YAML with the sections of a `RunConfig`. `base: NAME` starts from another recipe.
The full tree is written to the run folder and is itself a recipe. The sections `model` and `data`
are those of the model's family and of the kind of data; this file has those that all runs share.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stars_fast.base import tree
from stars_fast.base.choices import CHOICES, check_task, merge_settings, names_of
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import write_text
from stars_fast.base.optional import need
from stars_fast.data.kinds import kind_named
from stars_fast.models.depth import DepthLaw
from stars_fast.models.families import family_named
from stars_fast.models.lora import LoraConfig
from stars_fast.training.graphs.reasons import reason_against
from stars_fast.training.recipes import read_recipe
from stars_fast.training.run.eval_config import (
    EvalConfig,
    SumsEvalConfig,
    TextEvalConfig,
)
from stars_fast.training.run.trackers import TRACKERS
from stars_fast.training.scale.memory import MemoryConfig
from stars_fast.training.scale.parallel import ParallelConfig
from stars_fast.training.step.loop_config import LoopChange
from stars_fast.training.step.methods import METHODS
from stars_fast.training.step.optim import OptimConfig
from stars_fast.training.step.penalty import PenaltyConfig

ALIASES = {
    "kind": "parallel.kind",
    "dropout": "model.dropout",
    "reg_weight": "penalty.weight",
    "random_loop_mu": "depth.mu",
    "random_loop_sigma": "depth.sigma",
}
"""Names that mean one field: the published code's options, and last names of several fields."""

FLAGS = ("resume", "dry_run", "help", "help_all")
"""Options of `stars-fast train` that are no fields."""


@dataclass
class LoopConfig:
    """The training loop.

    steps: optimiser steps; none for those that epochs takes, or 1000.
    epochs: passes over the training data, in place of steps.
    batch_size: samples (packed: rows) per optimiser step, over all ranks and micro-batches.
    micro_batch_size: samples (packed: rows) that a rank takes at once; accumulation follows from
        it and from the number of ranks. None for accumulation.
    accumulation: micro-batches per optimiser step on each rank, each with a depth of its own; at
        a fixed depth it does not change the loss.
    backprop_turns: gradient through the last so many turns only; none for all.
    freeze: parts of the model that stay as they are: names of modules or parameters, or stretches
        of the paths to them, such as embed_tokens,lm_head or layers.0.
    log_every: steps between lines of metrics.
    save_every: steps between checkpoints; 0 for the last step alone.
    keep: newest checkpoints kept; 0 for all.
    max_nonfinite: stop after so many non-finite steps in a row.
    reference_turns: the cost in the banner is relative to SFT at so many turns.
    device: auto is CUDA where there is one.
    threads: CPU threads per process; none for one with a small model on a CPU, else PyTorch's
        choice, at most the cores that a container lends.
    compile: run the layers through torch.compile.
    deterministic: on a GPU too, the same bits each time, by kernels that add in a fixed order; an
        op that has none is an error. Slower, above all PyTorch's attention backward.
    graphs: turns and penalty as CUDA graphs, one pair for each number of turns, in rows of one
        length: where a run can have them (auto), or else an error (on), or never (off, until
        they have run on a GPU).
    report_to: where metrics go besides metrics.jsonl: tensorboard (if it is installed), wandb,
        trackio; or none.
    project: of wandb and trackio.
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 256
    micro_batch_size: int | None = None
    accumulation: int = 1
    backprop_turns: int | None = None
    freeze: tuple[str, ...] = ()
    log_every: int = 10
    save_every: int = 500
    keep: int = 2
    max_nonfinite: int = 20
    reference_turns: int = 4
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    compile: bool = False
    deterministic: bool = False
    graphs: Literal["auto", "on", "off"] = "off"
    report_to: tuple[str, ...] = ("tensorboard",)
    project: str = "stars-fast"

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"epochs: expected none beside steps, {self.steps}, got {self.epochs:g}"
            )
        if self.steps is None and self.epochs is None:
            self.steps = 1000
        if self.report_to == ("none",):
            self.report_to = ()
        if self.epochs is not None and self.epochs <= 0:
            raise ValueError(f"epochs: expected a positive number, got {self.epochs}")
        for name, low in (
            ("batch_size", 1),
            ("accumulation", 1),
            ("log_every", 1),
            ("save_every", 0),
            ("keep", 0),
            ("max_nonfinite", 1),
            ("reference_turns", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name}: expected at least {low}, got {getattr(self, name)}")
        for name in ("steps", "micro_batch_size", "backprop_turns", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1 or none, got {getattr(self, name)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device: expected auto, cpu or cuda, got {self.device!r}")
        if self.graphs not in ("auto", "on", "off"):
            raise ValueError(f"graphs: expected auto, on or off, got {self.graphs!r}")
        if unknown := sorted(set(self.report_to) - set(TRACKERS)):
            raise ValueError(f"report_to: expected some of {', '.join(TRACKERS)}, got {unknown}")

    @property
    def total_steps(self) -> int:
        """The steps of the run, once they are known."""
        assert self.steps is not None
        return self.steps

    def on(self, processes: int) -> "LoopConfig":
        """The same with the accumulation for so many processes.

        Raises:
            ValueError: batch_size does not divide evenly, or accumulation says otherwise.
        """
        size, what = self.accumulation, "accumulation"
        if self.micro_batch_size is not None:
            size, what = self.micro_batch_size, "micro_batch_size"
        number, rest = divmod(self.batch_size, size * processes)
        if rest or not number:
            raise ValueError(
                f"batch_size: expected a multiple of {what} x processes = {size} x {processes}, "
                f"got {self.batch_size}"
            )
        if self.micro_batch_size is None:
            return self
        if self.accumulation not in (1, number):
            raise ValueError(
                f"accumulation: expected none beside micro_batch_size, or {number} for "
                f"{processes} processes, got {self.accumulation}"
            )
        return replace(self, accumulation=number)

    def over(self, units: int) -> "LoopConfig":
        """The same with its steps, for data of so many units."""
        if self.steps is not None:
            return self
        assert self.epochs is not None
        steps = math.ceil(self.epochs * units / self.batch_size)
        return replace(self, steps=steps, epochs=None)


@dataclass(kw_only=True)
class RunConfig:
    """A run, but for its `model` and `data`, which `config_class` adds.

    method: sft, random-loop, one-step, fixed-point, jsrr, stars or l2.
    name: of the run, in figures and for its folder; the recipe's name by default.
    description: one line for the list of recipes.
    seed: of initial weights, data order, depths, noise and dropout.
    out: the run folder; runs/NAME by default.
    precision: mixed (fp32 weights, bf16 compute), float32, or bfloat16 (weights and all).
    """

    method: str
    name: str = "run"
    description: str = ""
    seed: int = 0
    out: str | None = None
    precision: Literal["mixed", "float32", "bfloat16"] = "mixed"
    depth: DepthLaw = field(default_factory=DepthLaw)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    loop: LoopChange = field(default_factory=LoopChange)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    if TYPE_CHECKING:
        model: Any
        data: Any

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {self.method!r}")
        fixed = METHODS[self.method].fixed_depth
        if fixed is True and self.depth.law != "fixed":
            raise ConfigError(
                f"method {self.method} trains at a fixed number of turns but depth.law is "
                f"{self.depth.law}; set depth.law to fixed and depth.value to the number"
            )
        if fixed is False and self.depth.law == "fixed":
            raise ConfigError(
                f"method {self.method} draws the number of turns but depth.law is fixed; "
                f"set depth.law to lognormal, poisson, poisson-lognormal or uniform, or choose sft "
                "or jsrr"
            )
        meant = METHODS[self.method].backprop_turns
        if meant is not None and self.train.backprop_turns not in (None, meant):
            raise ConfigError(
                f"train.backprop_turns: expected none or {meant} with method {self.method}, got "
                f"{self.train.backprop_turns}"
            )
        if meant is not None:
            self.train = replace(self.train, backprop_turns=meant)
        if self.optim.stochastic_rounding and self.precision != "bfloat16":
            raise ConfigError(
                f"optim.stochastic_rounding is for precision bfloat16, got {self.precision}"
            )
        if self.train.compile and self.parallel.sharded:
            raise ConfigError(
                f"train.compile: expected false with parallel.kind {self.parallel.kind}"
            )
        if self.lora.wanted and self.train.freeze:
            raise ConfigError(
                "train.freeze: expected none with lora.rank, which freezes all but the adapters, "
                f"got {','.join(self.train.freeze)}"
            )
        penalty = self.penalty
        for name in ("margin", "fixed_point"):
            if getattr(penalty, name) > 0 and not METHODS[self.method].penalty(self).needs_dual:
                raise ConfigError(
                    f"penalty.{name}: expected 0 with method {self.method}, which takes no "
                    f"Jacobian, got {getattr(penalty, name):g}"
                )
        kept = self.train.backprop_turns
        if penalty.direction == "step" and penalty.at == "last" and kept == 1:
            raise ConfigError(
                "train.backprop_turns: expected at least 2 with penalty.direction step and "
                "penalty.at last: the step before the last turn is needed"
            )
        splits = penalty.draw == "samples" and penalty.fraction < 1.0
        if self.parallel.reshard and penalty.at == "last" and splits:
            raise ConfigError(
                "parallel.reshard: expected false with penalty.at last and penalty.fraction below "
                "1: a micro-batch of few samples runs fewer turns, and gathers its layers less "
                "often"
            )
        for name, value, empty in (("name", self.name, " ."), ("out", self.out, " ")):
            if value is not None and not (value.strip(empty) and value.isprintable()):
                raise ConfigError(f"{name}: expected the name of a folder, got {value!r}")
        if self.out is None:
            self.out = str(Path("runs") / self.name)
        self.out = os.path.expanduser(self.out)  # not the shell's business in --out=~/run or YAML

    @property
    def penalised(self) -> bool:
        """Whether the run has a penalty."""
        return METHODS[self.method].penalised and self.penalty.weight > 0

    @property
    def trained_turns(self) -> int | tuple[int, int]:
        """The fixed number of turns, or the fewest and most of 98 % of the depth law."""
        return self.depth.span

    def penalty_weight(self, step: int) -> float:
        """lambda at `step`, 0 for a method without a penalty."""
        return self.penalty.weight_at(step) if self.penalised else 0.0


@cache
def config_class(family: str, kind: str) -> type[RunConfig]:
    """The `RunConfig` of a family of models on a kind of data.

    Raises:
        ConfigError: there is no such family or kind.
    """
    model, data = family_named(family), kind_named(kind).section
    judged = SumsEvalConfig if kind_named(kind).exact_match else TextEvalConfig
    precision = field(default=model.precision)
    return make_dataclass(
        "Run",
        [
            ("precision", Literal["mixed", "float32", "bfloat16"], precision),
            ("model", model.section, *_default(model.section)),
            ("data", data, *_default(data)),
            ("eval", judged, field(default_factory=judged)),
        ],
        bases=(RunConfig,),
        namespace={"__doc__": "A run.", "__post_init__": _check_together},
        kw_only=True,
    )


def _default(section: type) -> list[Any]:
    """The default of a section, where all its fields have one."""
    needed = [f for f in fields(section) if f.default is f.default_factory is MISSING]
    return [] if needed else [field(default_factory=section)]


def _check_together(config: Any) -> None:
    """Refuse a model and data that don't go together."""
    RunConfig.__post_init__(config)
    family, kind = family_named(config.model.family), kind_named(config.data.kind)
    sharded = config.parallel.sharded
    if config.train.graphs == "on" and (why := reason_against(config)):
        raise ConfigError(f"train.graphs: expected auto or off, got on: {why}")
    if config.method == "one-step" and not family.injects(config.model):
        raise ConfigError(
            "method: expected another than one-step for turns that take in nothing but the state: "
            "the tokens then reach no turn that carries a gradient; give model.injection add or "
            "adapter where the family has it"
        )
    if kind.packs(config.data) and not family.packs:
        raise ConfigError(
            f"data.packing: expected false with model.family {family.name}, whose turns don't keep "
            "the documents of a row apart"
        )
    if sharded and not family.shards:
        raise ConfigError(
            f"parallel.kind: expected auto or ddp with model.family {family.name}, got "
            f"{config.parallel.kind}"
        )
    if sharded and isinstance(config.eval, SumsEvalConfig):
        raise ConfigError(
            f"parallel.kind: expected auto or ddp with data.kind {kind.name}, got "
            f"{config.parallel.kind}: no process holds the whole model, to judge it"
        )
    if not isinstance(config.eval, TextEvalConfig) or not config.eval.tasks:
        return
    if not family.causal_lm:
        raise ConfigError(f"eval.tasks: expected none with model.family {family.name}")
    if not config.eval.turns:
        raise ConfigError("eval.turns: expected a number of turns for eval.tasks, got none")
    if sharded:
        raise ConfigError(
            f"eval.tasks: expected none with parallel.kind {config.parallel.kind}: no process "
            "holds the whole model; export the run and evaluate that"
        )


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Any:
    """The configuration of `recipe` with `overrides` in their places: a `RunConfig`.

    `recipe` is the name of a recipe of the package, a YAML file, or a run folder. `overrides` are
    command-line words: "--penalty.weight", "0.05", "--steps=100".

    Raises:
        ConfigError: a recipe does not exist or does not parse, and as `tree.build`.
    """
    mapping = read_recipe(recipe)
    if Path(recipe).is_dir():  # a run, wherever it lies now
        mapping["out"] = recipe
    mapping = merge_settings(mapping, parse_overrides(overrides, mapping))
    mapping.setdefault("name", Path(recipe).stem)
    return config_from(mapping)


def config_from(mapping: Mapping[str, Any]) -> Any:
    """The configuration from nested mappings: a `RunConfig`.

    What the family needs to know of the data, such as a vocabulary, it is told.

    Raises:
        ConfigError: as `tree.build`, and for a model and data that don't go together.
    """
    names = names_of(mapping)
    family, kind = family_named(names[0]), kind_named(names[1])
    given = {name: value for name, value in mapping.items() if name != "task"}
    model = given.get("model", {})
    if isinstance(model, Mapping):
        data = tree.build(kind.section, given.get("data", {}), "data")
        given["model"] = family.fitted(dict(model), kind.own_tokens, kind.longest(data))
    return tree.build(config_class(*names), given)


def parse_overrides(words: Sequence[str], base: Mapping[str, Any]) -> dict[str, Any]:
    """Command-line words "--field value" or "--field=value", as nested mappings.

    A field is its dotted path or its last name where that is unique; hyphens and underscores are
    alike. The fields are those of the family and kind that the words name, or else `base`.

    Raises:
        ConfigError: an unknown or ambiguous field, one that comes twice, a missing value, a stray
            word.
    """
    values = _values(words)
    chosen = {path: value for path, value in values if value and path in ("task", *CHOICES)}
    mapping = _nested(chosen)
    check_task(mapping)
    known = [*tree.leaves(config_class(*names_of(merge_settings(base, mapping)))), "task"]
    found: dict[str, tuple[str, str]] = {}
    for name, value in values:
        path = resolve(name, known)
        if value is None:
            raise ConfigError(f"--{name} needs a value")
        if path in found:
            before = " and ".join(f"--{each} {said}" for each, said in (found[path], (name, value)))
            raise ConfigError(f"{path} is given twice: {before}")
        found[path] = name, value
    return _nested({path: value for path, (_, value) in found.items()})


def _nested(values: Mapping[str, str]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for path, value in values.items():
        nested: Any = value
        for part in reversed(path.split(".")):
            nested = {part: nested}
        mapping = tree.merge(mapping, nested)
    return mapping


def _values(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """Names and values in their order; None where none follows."""
    found: list[tuple[str, str | None]] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected --field value, got {word!r}")
        name, has_value, said = word[2:].partition("=")
        value: str | None = said
        if not has_value:
            value = words.pop(0) if words and not words[0].startswith("--") else None
        found.append(("model.family" if name == "family" else name.replace("-", "_"), value))
    return found


def resolve(name: str, known: Sequence[str]) -> str:
    """The dotted path among `known` that `name` stands for; ConfigError if none or several do."""
    for each in (ALIASES.get(name, name), name):
        if each in known:
            return each
    matches = [path for path in known if path.rpartition(".")[2] == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"--{name} is ambiguous: " + " or ".join(f"--{m}" for m in matches))
    names = {*known, *(path.rpartition(".")[2] for path in known), *ALIASES, *FLAGS} - {name}
    raise ConfigError(tree.unknown(name, names))


def save_config(config: RunConfig, path: Path) -> None:
    """Write the full tree as YAML; `load_config` reads it back equal."""
    yaml = need("yaml", "recipes")
    write_text(path, yaml.safe_dump(tree.to_dict(config), sort_keys=False, allow_unicode=True))

"""Settings that a run does not read, its other settings being what they are."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stars_fast.base import tree
from stars_fast.base.choices import names_of
from stars_fast.base.errors import ConfigError
from stars_fast.data.kinds import kind_named
from stars_fast.models.families import family_named
from stars_fast.training.config import RunConfig, config_class, load_config, parse_overrides
from stars_fast.training.recipes import own_settings, read_recipe
from stars_fast.training.run.eval_config import TextEvalConfig

_OF_LAWS = {
    "lognormal": ("mu", "sigma", "low", "high", "stratified"),
    "poisson": ("rate", "low", "high", "stratified"),
    "poisson-lognormal": ("rate", "sigma", "low", "high", "stratified"),
    "uniform": ("low", "high", "stratified"),
    "fixed": ("value",),
}
"""Fields that a depth law reads."""

_OF_ANY_PENALTY = ("weight", "weighting", "start_step", "ramp_steps")
"""Fields of a penalty that is not the Jacobian's."""

_READ_BY = {"l2": (), "fixed-point": ("at", "detach")}
"""Those that methods without a Jacobian read besides."""


def without_effect(recipe: str, words: Iterable[str], config: RunConfig) -> list[str]:
    """Lines on the settings that a recipe or the command line gives in vain.

    A recipe is held against itself, not against what the command line changes in it. What it
    inherits counts as given by none, and so does a full configuration, as runs write it.

    Args:
        recipe: as `load_config` takes it.
        words: of the command line.
        config: what they give together.
    """
    spoken = tree.flat_mapping(parse_overrides(list(words), read_recipe(recipe)))
    lines = _in_vain(spoken, unread(config))
    written = tree.flat_mapping(own_settings(recipe))
    every = set(tree.leaves(config_class(*names_of(tree.to_dict(config)))))
    if Path(recipe).is_dir() or every <= set(written):  # a run's folder may be of an older version
        return lines
    try:
        alone = load_config(recipe)
    except ConfigError:  # a recipe that leaves something to the command line
        return lines
    return [*_in_vain(written, unread(alone)), *lines]


def _in_vain(given: Mapping[str, Any], found: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {value} is without effect: {found[name]}"
        for name, value in given.items()
        if name in found
    ]


def unread(config: RunConfig) -> dict[str, str]:
    """The fields that a run does not read, by dotted path, and why."""
    family, kind = family_named(config.model.family), kind_named(config.data.kind)
    return {
        **_named("model", family.unread(config.model)),
        **_named("data", kind.unread(config.data)),
        **_named("depth", _depth(config)),
        **_named("penalty", _penalty(config)),
        **_named("loop", _loop(config)),
        **_named("optim", _optim(config)),
        **_named(
            "lora", {} if config.lora.wanted else _all(config.lora, "rank", "lora.rank is none")
        ),
        **_named("train", _train(config)),
        **_named("memory", _memory(config)),
        **_named("eval", _eval(config)),
    }


def _named(section: str, fields: Mapping[str, str]) -> dict[str, str]:
    return {f"{section}.{name}": why for name, why in fields.items()}


def _all(section: Any, but: str, why: str) -> dict[str, str]:
    return {name: why for name in tree.to_dict(section) if name != but}


def _depth(config: RunConfig) -> dict[str, str]:
    law, depth = config.depth.law, config.depth
    read = (*_OF_LAWS[law], "law", "curriculum_steps", "curriculum_start")
    found = {name: f"depth.law is {law}" for name in tree.to_dict(depth) if name not in read}
    if not depth.curriculum_steps:
        found["curriculum_start"] = "depth.curriculum_steps is 0"
    return found


def _penalty(config: RunConfig) -> dict[str, str]:
    penalty = config.penalty
    if not config.penalised:
        if penalty.weight == 0:
            return _all(penalty, "weight", "penalty.weight is 0")
        return _all(penalty, "", f"method {config.method} has no penalty")
    if config.method in _READ_BY:
        read = (*_OF_ANY_PENALTY, *_READ_BY[config.method])
        names = [name for name in tree.to_dict(penalty) if name not in read]
        return dict.fromkeys(names, f"method {config.method} takes no Jacobian")
    return {"draw": "penalty.fraction is 1"} if penalty.fraction == 1 else {}


def _loop(config: RunConfig) -> dict[str, str]:
    if config.loop.progressive:
        return {}
    return dict.fromkeys(("free_turns", "graph_turns"), "loop.progressive is 0")


def _optim(config: RunConfig) -> dict[str, str]:
    if config.optim.schedule == "cosine":
        return {"decay_steps": "optim.schedule is cosine, which decays all along"}
    return {} if config.optim.decay_steps else {"min_lr_ratio": "optim.decay_steps is 0"}


def _train(config: RunConfig) -> dict[str, str]:
    if {"wandb", "trackio"} & set(config.train.report_to):
        return {}
    return {"project": "train.report_to names neither wandb nor trackio"}


def _memory(config: RunConfig) -> dict[str, str]:
    recompute = config.memory.recompute
    return {} if recompute == "auto" else {"budget": f"memory.recompute is {recompute}"}


def _eval(config: RunConfig) -> dict[str, str]:
    judged = config.eval
    if not judged.turns:
        return _all(judged, "turns", "eval.turns is empty")
    if not isinstance(judged, TextEvalConfig):
        return {}
    found = {} if judged.tasks else {"tasks_limit": "there are no eval.tasks"}
    if config.data.validation:
        return found
    why = "data.validation is 0"
    if judged.tasks:
        return {**found, "rows": why}
    return _all(judged, "tasks", f"{why} and there are no eval.tasks")

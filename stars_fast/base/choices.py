"""Settings of a run that choose the others: the family of its model and the kind of its data."""

from collections.abc import Mapping
from typing import Any

from stars_fast.base import tree
from stars_fast.base.errors import ConfigError

TASKS = {"addition": ("looped_lm", "sums"), "ouro": ("ouro", "chats")}
"""`model.family` and `data.kind` that a recipe's `task` stands for."""


def names_of(settings: Mapping[str, Any]) -> tuple[str, str]:
    """The names of the family and of the kind of data of a run's settings: `model.family` and
    `data.kind`, or else those of `task`.

    Raises:
        ConfigError: there is no such task.
    """
    task = settings.get("task", "addition")
    if task not in TASKS:
        raise ConfigError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    sections = (settings.get("model"), "family"), (settings.get("data"), "kind")
    family, kind = (
        section.get(key, name) if isinstance(section, Mapping) else name
        for (section, key), name in zip(sections, TASKS[task], strict=True)
    )
    return str(family), str(kind)


CHOICES = ("model.family", "data.kind")
"""Fields that choose which other fields their section has."""


EXCLUSIVE = (
    (("train.steps",), ("train.epochs",)),
    (("train.micro_batch_size",), ("train.accumulation",)),
    (("data.messages",), ("data.prompt", "data.answer")),
)
"""Fields, in two groups, of which a run can follow one group alone."""


def check_task(settings: Mapping[str, Any]) -> None:
    """Refuse a `task` that one recipe, or one command line, gives beside all that it stands for.

    Raises:
        ConfigError: it does.
    """
    given = _given(settings)
    if "task" in given and all(name in given for name in CHOICES):
        raise ConfigError(
            f"task: expected none beside {' and '.join(CHOICES)}, which say all that it stands "
            f"for, got {given['task']!r}"
        )


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run with those of `over` in their places: what is said last wins.

    A section whose family or kind is another than that of `base` begins anew. A field of
    `EXCLUSIVE` in `over` puts those of the other group out of force, and a task the family and the
    kind.

    Raises:
        ConfigError: as `names_of`.
    """
    before, base = names_of(base), _without_excluded(base, over)
    after, kept = names_of(tree.merge(base, over)), dict(base)
    if before[0] != after[0]:
        kept.pop("model", None)
    if before[1] != after[1]:
        kept.pop("data", None)
        judged = kept.get("eval")
        if isinstance(judged, Mapping):
            kept["eval"] = {name: judged[name] for name in ("turns", "every") if name in judged}
    return tree.merge(kept, over)


def _without_excluded(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` without the fields that those of `over` put out of force."""
    given = _given(over)
    dropped = set(CHOICES) if "task" in given else set()
    for one, other in EXCLUSIVE:
        if any(name in given for name in one):
            dropped |= set(other)
        if any(name in given for name in other):
            dropped |= set(one)
    kept = {}
    for name, value in base.items():
        if isinstance(value, Mapping):
            value = {key: each for key, each in value.items() if f"{name}.{key}" not in dropped}
        kept[name] = value
    return kept


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are not none, by dotted path."""
    flat = tree.flat_mapping(settings)
    return {name: value for name, value in flat.items() if not tree.is_none(value)}

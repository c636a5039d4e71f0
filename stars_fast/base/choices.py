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


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run with those of `over` in their places. A section whose family or kind is
    another than that of `base` begins anew.

    Raises:
        ConfigError: as `names_of`.
    """
    before, merged = names_of(base), tree.merge(base, over)
    after, kept = names_of(merged), dict(base)
    if before[0] != after[0]:
        kept.pop("model", None)
    if before[1] != after[1]:
        kept.pop("data", None)
        judged = kept.get("eval")
        if isinstance(judged, Mapping):
            kept["eval"] = {name: judged[name] for name in ("turns", "every") if name in judged}
    return tree.merge(kept, over)

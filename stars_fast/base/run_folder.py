"""The folder of a run, as everything that reads one finds its way in it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stars_fast.base import tree
from stars_fast.base.checkpoints import checkpoints, latest
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import read_text
from stars_fast.base.optional import need


class RunFolder:
    """The paths of a run.

    config: its full configuration, in YAML. metrics: a line of JSON now and then. results: figures
    of its end. model: what its checkpoints of weights lack to be a model, such as a tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / "results.json"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"

    def checkpoint(self, step: int | None = None) -> Path:
        """The newest complete checkpoint, or that of `step`.

        Raises:
            ConfigError: it is not there.
        """
        if step is None:
            found = latest(self.checkpoints)
            if found is None:
                raise ConfigError(f"{self.path} has no checkpoint yet")
            return found
        known = checkpoints(self.checkpoints)
        if step not in known:
            raise ConfigError(
                f"{self.path} has no checkpoint of step {step}; it has {sorted(known)}"
            )
        return known[step]

    def settings(self) -> dict[str, Any]:
        """The configuration as nested mappings, as it was written.

        Raises:
            ConfigError: there is none, or it can't be read.
        """
        if not self.config.exists():
            raise ConfigError(f"{self.path} is not a run folder: it has no config.yaml")
        yaml = need("yaml", "recipes")
        try:
            found = yaml.safe_load(read_text(self.config))
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{self.config} can't be read: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{self.config} must be a mapping of settings, got {found!r}")
        return found


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
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
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

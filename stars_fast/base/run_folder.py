"""The folder of a run, as everything that reads one finds its way in it."""

from pathlib import Path
from typing import Any

from stars_fast.base.checkpoints import checkpoints, damaged, fault_of, step_folders
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import read_text
from stars_fast.base.unique_keys import parse_yaml


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
            ConfigError: it is not there, or has lost a file since.
        """
        known = checkpoints(self.checkpoints)
        there = step_folders(self.checkpoints)
        if step is None:
            if not there:
                raise ConfigError(f"{self.path} has no checkpoint yet")
            step = max(there)
        if step in known:
            return known[step]
        if step in there:
            raise damaged(there[step], fault_of(there[step]) or "it was incomplete")
        raise ConfigError(f"{self.path} has no checkpoint of step {step}; it has {sorted(known)}")

    def settings(self) -> dict[str, Any]:
        """The configuration as nested mappings, as it was written.

        Raises:
            ConfigError: there is none, or it can't be read.
        """
        if not self.config.exists():
            raise ConfigError(f"{self.path} is not a run folder: it has no config.yaml")
        try:
            found = parse_yaml(read_text(self.config))
        except ValueError as error:
            raise ConfigError(f"{self.config} can't be read: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{self.config}: expected a mapping of settings, got {found!r}")
        return found

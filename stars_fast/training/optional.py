"""Libraries that only some runs need, asked for where they are used."""

from importlib import import_module
from types import ModuleType

from stars_fast.quiet import quiet_import
from stars_fast.training.tree import ConfigError

_NAMES = {"yaml": "pyyaml", "lm_eval": "lm-eval"}
_ALONE = ("wandb", "trackio")
_EXTRAS = {"transformers": "ouro", "datasets": "ouro", "lm_eval": "eval", "torchao": "rounding"}
"""Extras of this package that bring a library; \"train\" brings the others."""


def need(module: str, purpose: str) -> ModuleType:
    """The module, or a ConfigError that says what needs it and how to install it."""
    try:
        with quiet_import():
            return import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        package = _NAMES.get(top, top)
        extra = f'"stars-fast[{_EXTRAS.get(top, "train")}]"'
        raise ConfigError(
            f"{purpose} need {package}: pip install {package if top in _ALONE else extra} ({error})"
        ) from error

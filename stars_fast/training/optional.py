"""Libraries that only training needs, asked for where they are used."""

from importlib import import_module
from types import ModuleType

from stars_fast.training.tree import ConfigError


def need(module: str, purpose: str) -> ModuleType:
    """The module, or a ConfigError that says what needs it and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = {"yaml": "pyyaml"}.get(module, module).partition(".")[0]
        raise ConfigError(
            f'{purpose} need {package}: pip install "stars-fast[train]" ({error})'
        ) from error

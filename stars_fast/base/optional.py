"""Libraries that only some runs need, asked for where they are used."""

from importlib import import_module
from types import ModuleType

from stars_fast.base.errors import ConfigError
from stars_fast.base.quiet import quiet_import

_PACKAGES = {"yaml": "pyyaml", "lm_eval": "lm-eval"}
"""Names on the package index, where they are not those of the modules."""

_EXTRAS = {
    "jinja2": "train",
    "matplotlib": "train",
    "safetensors": "train",
    "shtab": "train",
    "tqdm": "train",
    "yaml": "train",
    "accelerate": "ouro",
    "datasets": "ouro",
    "tokenizers": "ouro",
    "transformers": "ouro",
    "lm_eval": "eval",
    "peft": "lora",
    "torchao": "rounding",
    "pytest": "bench",
}
"""Extras of this package that bring a module."""

_ALONE = ("tensorboard", "trackio", "trl", "vllm", "wandb")
"""Modules that no extra brings."""


class MissingPackageError(ImportError, ConfigError):
    """A library that is needed is not installed, or does not load; the message says what needs it
    and how to install it."""


def need(module: str, purpose: str) -> ModuleType:
    """The module.

    Raises:
        MissingPackageError: it is not there; `purpose`, in the plural, is what needs it.
    """
    try:
        with quiet_import():
            return import_module(module)
    except ImportError as error:
        raise _missing(module.partition(".")[0], f"{purpose} need", error) from error


def explained(error: ImportError, purpose: str) -> MissingPackageError | None:
    """An error of an import by a library or of ours as `need` would put it; `purpose`, in the
    singular, needs it. None for what no extra brings."""
    module = (error.name or "").partition(".")[0]
    return _missing(module, f"{purpose} needs", error) if module in (*_EXTRAS, *_ALONE) else None


def _missing(module: str, needs: str, error: ImportError) -> MissingPackageError:
    package = _PACKAGES.get(module, module)
    extra = f'"stars-fast[{_EXTRAS[module]}]"' if module in _EXTRAS else package
    return MissingPackageError(f"{needs} {package}: pip install {extra} ({error})", name=module)

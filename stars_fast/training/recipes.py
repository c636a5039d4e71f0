"""Recipes: YAML files by name, by path or in a run folder, each perhaps on top of another."""

from importlib import resources
from pathlib import Path
from typing import Any

from stars_fast.base.choices import check_task, merge_settings
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import read_text
from stars_fast.base.unique_keys import parse_yaml


def read_recipe(recipe: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The mapping of a recipe by name, file or run folder, on top of its `base`.

    Raises:
        ConfigError: it does not exist, does not parse, or is its own base.
    """
    if recipe in seen:
        raise ConfigError(f"recipe {recipe} is its own base: {' -> '.join((*seen, recipe))}")
    mapping = _parse_yaml(_recipe_text(recipe), recipe)
    check_task(mapping)
    base = mapping.pop("base", None)
    if base is None:
        return mapping
    if not isinstance(base, str):
        raise ConfigError(f"recipe {recipe}: base: expected the name of a recipe, got {base!r}")
    beside = Path(base).suffix and Path(recipe).suffix  # one file names another: relative to it
    base = str(Path(recipe).parent / base) if beside else base
    inherited = read_recipe(base, (*seen, recipe))
    inherited.pop("name", None)
    return merge_settings(inherited, mapping)


def own_settings(recipe: str) -> dict[str, Any]:
    """The mapping of a recipe without what it takes from its `base`.

    Raises:
        ConfigError: as `read_recipe`.
    """
    mapping = _parse_yaml(_recipe_text(recipe), recipe)
    mapping.pop("base", None)
    return mapping


def recipe_names() -> list[str]:
    """Names of the recipes of the package, sorted."""
    files = (resources.files("stars_fast") / "recipes").iterdir()
    return sorted(file.name[:-5] for file in files if file.name.endswith(".yaml"))


def _recipe_text(recipe: str) -> str:
    path = Path(recipe)
    if path.is_dir():
        path = path / "config.yaml"
    if path.suffix in (".yaml", ".yml"):
        try:
            return read_text(path)
        except ValueError as error:
            raise ConfigError(f"cannot read the recipe {error}") from error
    names = recipe_names()
    if recipe not in names:
        raise ConfigError(
            f"no recipe, YAML file or run folder named {recipe!r}; recipes: {', '.join(names)}"
        )
    file = resources.files("stars_fast") / "recipes" / f"{recipe}.yaml"
    return file.read_text(encoding="utf-8")


def _parse_yaml(text: str, recipe: str) -> dict[str, Any]:
    try:
        mapping = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"recipe {recipe}: {error}") from error
    if mapping is None:
        raise ConfigError(f"recipe {recipe} is empty: expected a mapping of settings")
    if not isinstance(mapping, dict):
        raise ConfigError(f"recipe {recipe}: expected a mapping, got {type(mapping).__name__}")
    return mapping

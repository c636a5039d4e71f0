"""Recipes: YAML files by name, by path or in a run folder, each perhaps on top of another."""

import difflib
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
    base = _base(mapping, recipe)
    mapping.pop("base", None)
    if base is None:
        return mapping
    inherited = read_recipe(base, (*seen, recipe))
    inherited.pop("name", None)
    return merge_settings(inherited, mapping)


def base_of(recipe: str) -> str | None:
    """The recipe that a recipe builds on; None for one that stands alone.

    Raises:
        ConfigError: as `read_recipe`.
    """
    return _base(_parse_yaml(_recipe_text(recipe), recipe), recipe)


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


def _base(mapping: dict[str, Any], recipe: str) -> str | None:
    """The base that a recipe's mapping names."""
    base = mapping.get("base")
    if base is None:
        return None
    if not isinstance(base, str):
        raise ConfigError(f"recipe {recipe}: base: expected the name of a recipe, got {base!r}")
    beside = Path(base).suffix and Path(recipe).suffix  # one file names another: relative to it
    return str(Path(recipe).parent / base) if beside else base


def _recipe_text(recipe: str) -> str:
    if not recipe.strip():
        raise ConfigError(
            f"RECIPE: expected the name of a recipe, a YAML file or a run folder, got {recipe!r}; "
            "see stars-fast recipes"
        )
    path = Path(recipe)
    if path.is_dir():
        if not (path / "config.yaml").exists():
            raise ConfigError(
                f"{recipe} is a folder without config.yaml: expected a recipe, a YAML file or a "
                "run folder"
            )
        path = path / "config.yaml"
    if path.suffix in (".yaml", ".yml"):
        try:
            return read_text(path)
        except ValueError as error:
            raise ConfigError(f"cannot read the recipe {error}") from error
    names = recipe_names()
    if recipe not in names:
        near = difflib.get_close_matches(recipe, names, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(names)}"
        raise ConfigError(f"no recipe, YAML file or run folder named {recipe!r}; {hint}")
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

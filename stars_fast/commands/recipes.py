"""`stars-fast recipes`: the list of recipes, or one of them with all that it takes over."""

from __future__ import annotations

from collections.abc import Sequence

from stars_fast.base import tree
from stars_fast.base.optional import need
from stars_fast.base.options import Parser
from stars_fast.training.recipes import base_of, read_recipe, recipe_names


def main(words: Sequence[str]) -> int:
    """Print the list, or the recipe; returns 0.

    Raises:
        ConfigError: there is no such recipe, or it can't be used.
    """
    options = parser().parse_args(words)
    if options.recipe is None:
        print(_listing())
    else:
        print(resolved(options.recipe, options.all))
    return 0


def parser() -> Parser:
    """The options."""
    found = Parser(
        "stars-fast recipes",
        description="List the recipes of the package; or show one, with what it takes over from "
        "those it builds on, as YAML that is itself a recipe.",
    )
    found.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="a recipe, a YAML file, or a run folder"
    )
    found.add_argument("--all", action="store_true", help="every field, defaults included")
    return found


def _listing() -> str:
    names = recipe_names()
    width = max(map(len, names), default=0)
    rows = (f"{name:{width}}  {read_recipe(name).get('description', '')}" for name in names)
    return "\n".join(row.rstrip() for row in rows)


def resolved(recipe: str, every: bool = False) -> str:
    """A recipe as YAML: what it and those it builds on say, or with `every` the whole
    configuration.

    Raises:
        ConfigError: as `read_recipe` and, with `every`, `load_config`.
    """
    yaml = need("yaml", "recipes")
    if every:
        from stars_fast.training.config import load_config

        content = tree.to_dict(load_config(recipe))
    else:
        content = read_recipe(recipe)  # which refuses a recipe that is its own base
    chain, each = [recipe], base_of(recipe)
    while each is not None:
        chain, each = [*chain, each], base_of(each)
    said = "every field" if every else "what it says; every field: --all"
    head = f"# {' on '.join(chain)}: {said}\n"
    return (head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)).rstrip()

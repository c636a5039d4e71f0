"""`stars-fast recipes`: the list of recipes, or one of them with all that it takes over."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from stars_fast.base import tree
from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.base.options import Parser
from stars_fast.training.recipes import base_of, read_recipe, recipe_names

_NEXT = (
    "a first one      stars-fast train addition-quick",
    "what it says     stars-fast recipes addition-quick",
    "what it takes    stars-fast train addition-quick --dry-run",
)


def main(words: Sequence[str]) -> int:
    """Print the list, or the recipe; returns 0.

    Raises:
        ConfigError: there is no such recipe, or it can't be used.
    """
    options = parser().parse_args(words)
    if options.recipe is None:
        print(listing(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
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


def listing(width: int | None = None) -> str:
    """The recipes, a line each; for a terminal of so many columns broken into lines, with what one
    does next."""
    names = recipe_names()
    room = max(map(len, names), default=0) + 2
    rows = (f"{name:{room}}{read_recipe(name).get('description', '')}" for name in names)
    if width is None:
        return "\n".join(row.rstrip() for row in rows)
    width, moved = max(width, 2 * room), room * " "
    lines = [textwrap.fill(row, width, subsequent_indent=moved) for row in rows]
    return "\n".join([*lines, "", *_NEXT])


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
    if not every and (idle := _idle(recipe, content)):
        head += textwrap.fill(
            f"without effect, the other settings being what they are: {', '.join(idle)}",
            initial_indent="# ",
            subsequent_indent="# ",
        )
        head += "\n"
    return (head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)).rstrip()


def _idle(recipe: str, content: Mapping[str, Any]) -> list[str]:
    """Settings of a recipe that its runs do not read; none of one that leaves something open."""
    from stars_fast.training.config import load_config
    from stars_fast.training.unread import unread

    try:
        found = unread(load_config(recipe))
    except ConfigError:
        return []
    return [path for path in tree.flat_mapping(content) if path in found]

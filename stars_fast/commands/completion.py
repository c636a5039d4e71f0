"""`stars-fast completion`: the options of every command for a shell, by shtab."""

import argparse
from typing import Literal, get_args, get_origin

from stars_fast.base import tree
from stars_fast.base.optional import need
from stars_fast.base.options import Parser
from stars_fast.commands import analyze, eval, recipes, runs
from stars_fast.training.config import FLAGS, config_class
from stars_fast.training.recipes import recipe_names


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion of `parser` in the language of `shell`: bash, zsh or tcsh.

    Raises:
        MissingPackageError: shtab is not installed.
    """
    return str(need("shtab", "shell completions").complete(parser, shell))


def options() -> dict[str, Parser]:
    """Parsers of the commands that read their own words, by name."""
    plan = _fields("stars-fast plan")
    for name in ("--gpus", "--document"):
        plan.add_argument(name)
    for name in ("--table", "--json"):
        plan.add_argument(name, action="store_true")
    train = _fields("stars-fast train")
    train.add_argument("--resume", nargs="?", choices=("auto",))
    for name in FLAGS:
        if name not in ("resume", "help"):  # which a parser has
            train.add_argument("--" + name.replace("_", "-"), action="store_true")
    found = {"train": train, "plan": plan}
    for module in (eval, analyze, recipes, runs):
        found[module.__name__.rpartition(".")[2]] = module.parser()
    return found


def _fields(name: str) -> Parser:
    """A recipe, and every field of a configuration as an option."""
    from stars_fast.data.kinds import kinds
    from stars_fast.models.families import families

    parser = Parser(name)
    parser.add_argument("recipe", choices=recipe_names(), metavar="RECIPE")
    found: dict[str, tree.Field] = {}
    for kind in kinds():
        for family in families():
            found = tree.leaves(config_class(family, kind)) | found
    for path, field in found.items():
        choices = get_args(field.type) if get_origin(field.type) is Literal else None
        parser.add_argument(f"--{path}", choices=choices, help=field.help.replace("%", "%%"))
    return parser

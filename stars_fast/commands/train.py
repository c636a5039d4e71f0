"""`stars-fast train`: train a recipe, continue a run, or say what either would do."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stars_fast.base import tree
from stars_fast.base.errors import ConfigError

USAGE = "usage: stars-fast train RECIPE [--resume [auto]] [--dry-run] [--field value ...]"

_AUTO = "--resume=auto"
_FLAGS = ("--resume", _AUTO, "--dry-run")

_WORDS = """\

RECIPE      a recipe of the package (stars-fast recipes), a YAML file, or a run folder
--resume    continue the run in its folder from its newest checkpoint, bit for bit
            (on a GPU with --train.deterministic true)
--resume auto
            the same if there is a run in the folder, else start one: for jobs that are
            started again
--dry-run   say what the run would be, take and write; nothing is made or loaded
--help      after a recipe: with its values
--help-all  every field"""

_EXAMPLES = """\
examples:
  stars-fast train addition-quick --help
  stars-fast train addition-quick-stars --penalty.weight 0.05 --seed 1 --out runs/weak
  stars-fast train runs/weak --resume
  stars-fast train ouro-numina-fast --dry-run
  torchrun --nproc-per-node 4 -m stars_fast train ouro-numina-fast"""

FIRST = (
    "method", "data.source", "model.path", "out", "seed", "train.steps", "train.epochs",
    "train.batch_size", "optim.lr", "penalty.weight", "penalty.start_step", "depth.mu",
    "depth.rate", "depth.value", "depth.high", "eval.turns", "train.micro_batch_size",
    "precision", "train.threads", "train.log_every", "train.save_every",
)  # fmt: skip
"""Fields that people change first; of these the help shows the twelve first that a run reads."""

_SHOWN = 12


def main(words: Sequence[str]) -> int:
    """Train; returns the exit code: 0, 1 for a failed run, 128 + signal.

    Raises:
        ConfigError: the recipe, a field or the folder can't be used.
    """
    words = _plain_flags(words)
    if {"-h", "--help", "--help-all"} & set(words):
        print(_help(words))
        return 0
    overrides = [word for word in words if word not in _FLAGS]
    if not overrides or overrides[0].startswith("-"):
        raise ConfigError(f"{USAGE}; see stars-fast recipes and stars-fast train --help")
    from stars_fast.training.config import load_config
    from stars_fast.training.unread import without_effect

    recipe, must_resume = overrides.pop(0), "--resume" in words
    if must_resume and Path(recipe).parts[:-1] and not Path(recipe).exists():  # no recipe's name
        _check_resume(recipe)
    config = load_config(recipe, overrides)
    if must_resume:
        _check_resume(config.out)
    resume = must_resume or _AUTO in words
    if os.environ.get("RANK", "0") == "0":
        for line in without_effect(recipe, overrides, config):
            print(f"stars-fast: warning: {line}", file=sys.stderr)
    if "--dry-run" in words:
        from stars_fast.training.run.outlook import outlook

        print(outlook(config, resume))
        return 0
    return _run(config, resume)


def _plain_flags(words: Sequence[str]) -> list[str]:
    """Each flag as one word in its one spelling, `--dry_run` as `--dry-run` and `--resume auto` as
    `--resume=auto`; other words as they are.

    Raises:
        ConfigError: a flag with a value.
    """
    found = [_plain_flag(word) for word in words]
    if "--resume" in found:
        at = found.index("--resume")
        rest = [word for word in found[:at] + found[at + 2 :] if word not in _FLAGS]
        # Without a recipe elsewhere it is a folder of that name
        if found[at + 1 : at + 2] == ["auto"] and rest and not rest[0].startswith("-"):
            found[at : at + 2] = [_AUTO]
    return found


def _plain_flag(word: str) -> str:
    from stars_fast.training.config import FLAGS

    name, has_value, value = word.partition("=")
    flag = name.replace("_", "-")
    if flag not in {"--" + each.replace("_", "-") for each in FLAGS}:
        return word
    if flag == "--resume" and has_value:
        if value != "auto":
            raise ConfigError(f"--resume: expected auto or no value, got {value!r}")
        return _AUTO
    if has_value:
        raise ConfigError(f"{flag}: expected no value, got {value!r}; leave the flag out for no")
    return flag


def _run(config: Any, resume: bool) -> int:
    from stars_fast.training.run.trainer import TrainingFailure, train
    from stars_fast.training.scale.allocator import grow_segments

    grow_segments()
    try:
        outcome = train(config, resume=resume)
    except TrainingFailure as error:
        print(f"stars-fast: {error}", file=sys.stderr)
        return 1
    return 128 + outcome.signal if outcome.signal else 0


def _check_resume(path: str) -> None:
    """Raise ConfigError for a folder that holds nothing to continue."""
    from stars_fast.base.run_folder import RunFolder
    from stars_fast.training.run.folder import nothing_to_resume

    if reason := nothing_to_resume(RunFolder(path)):
        raise ConfigError(reason)


def _help(words: Sequence[str]) -> str:
    """The help: of all families, or of a recipe with its values; a few fields, or all."""
    overrides = [word for word in words if word not in (*_FLAGS, "-h", "--help", "--help-all")]
    every = "--help-all" in words
    if not overrides or overrides[0].startswith("-"):
        lines = [USAGE, _WORDS, "", "methods:", *_methods(), ""]
        lines += _all_families() if every else _first_of_default()
        return "\n".join([*lines, "", _EXAMPLES])
    from stars_fast.training.config import load_config

    config = load_config(overrides[0], overrides[1:])
    name = overrides[0]
    head = [f"{name}: {config.description}" if config.description else name, "", USAGE, ""]
    fields = tree.leaves(type(config))
    values = tree.flat_mapping(tree.to_dict(config))
    if every:
        lines = ["fields with this recipe's values:"]
        lines += _fields(fields, values, sections=True)
    else:
        lines = ["what people change first, with this recipe's values:", ""]
        lines += _fields({path: fields[path] for path in _first(config)}, values)
        lines += ["", f"all {len(fields)} fields: stars-fast train {name} --help-all"]
    return "\n".join([*head, *lines])


def _methods() -> list[str]:
    from stars_fast.training.step.methods import METHODS

    return [f"  {name:12} {method.summary}" for name, method in METHODS.items()]


def _first(config: Any) -> list[str]:
    """The fields of `FIRST` that a run reads, at most so many as are shown."""
    from stars_fast.training.unread import unread

    values, idle = tree.flat_mapping(tree.to_dict(config)), unread(config)
    found = [path for path in FIRST if path in values and path not in idle]
    for one, other in (("train.steps", "train.epochs"), ("train.epochs", "train.steps")):
        if values[one] is None and values[other] is not None:
            found.remove(one)
    return found[:_SHOWN]


def _first_of_default() -> list[str]:
    from stars_fast.training.config import config_from

    config = config_from({"method": "stars"})
    fields = tree.leaves(type(config))
    lines = ["what people change first, by dotted path or by its last name:", ""]
    lines += _fields({path: fields[path] for path in _first(config)}, None)
    lines += [
        "",
        "a recipe's own fields and values: stars-fast train RECIPE --help",
        "every field of every family and kind of data: stars-fast train --help-all",
    ]
    return lines


def _all_families() -> list[str]:
    from stars_fast.data.kinds import kinds
    from stars_fast.models.families import families
    from stars_fast.training.config import config_class

    lines = ["fields, by dotted path or by their last name where it is unique:"]
    from_data = {f"model.{name}" for each in families().values() for name in each.from_data}
    shown: set[tuple[str, str]] = set()
    for kind in kinds():
        for family in families():
            fields = tree.leaves(config_class(family, kind))
            new = {p: field for p, field in fields.items() if (p, field.help) not in shown}
            shown |= {(path, field.help) for path, field in new.items()}
            lines += _fields(new, None, from_data, sections=True)
    return lines


def _fields(
    fields: dict[str, tree.Field],
    values: dict[str, Any] | None,
    from_data: set[str] | frozenset[str] = frozenset(),
    sections: bool = False,
) -> list[str]:
    """Two lines a field: with its value where there are `values`, else its type and default."""
    lines: list[str] = []
    section = None
    for path, field in fields.items():
        if sections and path.rpartition(".")[0] != section:
            section = path.rpartition(".")[0]
            lines.append("")
        kind = tree.type_name(field.type)
        if values is not None:
            lines.append(f"  --{path} {_shown(values[path])}")
            lines += _wrapped(f"{field.help} ({kind})")
            continue
        default = "" if field.default is tree.REQUIRED else f" (default {_shown(field.default)})"
        default = " (default from the data)" if path in from_data else default
        lines.append(f"  --{path} {kind}")
        lines += _wrapped(f"{field.help}{default}".rstrip())
    return lines


def _wrapped(text: str) -> list[str]:
    """The text in lines that fit the terminal, moved in."""
    width, room = max(shutil.get_terminal_size().columns, 60), 6 * " "
    return textwrap.wrap(text, width, initial_indent=room, subsequent_indent=room) or [room]


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if value == "" or value == []:
        return "empty"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)

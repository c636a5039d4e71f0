"""The command line: `stars-fast train | plan | eval | lm-eval | analyze | study | export | bench |
recipes`, also `python -m stars_fast.cli`.

Modules load where they are used, so that the help and the list of recipes come at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from stars_fast.base.exit_code import exit_code
from stars_fast.base.options import Parser, positive

_EXAMPLES = """\
examples:
  stars-fast recipes
  stars-fast train addition-quick
  stars-fast train addition-quick --penalty.weight 0.05 --seed 1 --out runs/weak
  stars-fast train runs/weak --resume
  stars-fast eval runs/weak runs/addition-quick --turns 1,2,4,8,16,32,64,100
  stars-fast analyze runs/weak runs/addition-quick
  stars-fast train ouro-tiny
  stars-fast plan ouro-numina-fast --gpus 4xA800-80GB
  torchrun --nproc-per-node 4 -m stars_fast.cli train ouro-numina
  stars-fast eval runs/ouro-numina --tasks gsm8k,math500,asdiv,svamp,amc23 --turns 2,4,8
  stars-fast eval ByteDance/Ouro-1.4B --text wiki.txt --turns 1,2,4,8,16
  stars-fast export runs/ouro-numina ouro-stars --turns 8 --dtype bfloat16
  stars-fast export runs/ouro-numina-lora ouro-adapter --adapter keep
  stars-fast lm-eval --model stars_fast --model_args pretrained=ouro-stars,turns=8 --tasks gsm8k
"""

_OWN_OPTIONS = {"eval": "eval", "lm-eval": "lm_eval", "analyze": "analyze", "plan": "plan"}
"""Commands whose options are in a module of `stars_fast.commands`."""

_OF_A_CLONE = {"study": "studies", "bench": "benchmarks"}
"""Commands that hand over to what is beside the package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 a failed run, 2 a mistake, 128 + signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(words), " ".join(["stars-fast", *words[:1]]))


def _run(words: list[str]) -> int:
    if words[:1] == ["train"]:  # its options are the fields of the configuration
        return _train(words[1:])
    if words and words[0] in _OWN_OPTIONS:
        command = import_module(f"stars_fast.commands.{_OWN_OPTIONS[words[0]]}")
        return int(command.main(words[1:]))
    if words and words[0] in _OF_A_CLONE:
        return _of_a_clone(words[0], words[1:])
    args = _parser().parse_args(words)
    return args.command(args)


def _of_a_clone(name: str, words: list[str]) -> int:
    """Run a command that a clone of the repository has beside the package."""
    from stars_fast.base.errors import ConfigError

    module, clone = _OF_A_CLONE[name], Path(__file__).resolve().parents[1]
    if not (clone / module / "__main__.py").exists():
        raise ConfigError(f"{name}: run python -m {module} in a clone of the repository")
    sys.path.insert(0, str(clone))
    return int(import_module(f"{module}.__main__").main(words))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        "stars-fast",
        description="Train and evaluate looped language models with the STARS penalty.",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    commands.add_parser("train", help="train a recipe, or continue a run")
    commands.add_parser("plan", help="predict a run's time and memory on given GPUs, without one")

    commands.add_parser("eval", help="accuracy against turns: runs, checkpoints, lm-eval's tasks")
    commands.add_parser("lm-eval", help="lm-eval's own command line, with the model stars_fast")
    commands.add_parser("analyze", help="how the state moves over the turns, and its Jacobian")
    commands.add_parser("study", help="in a clone: the paper's studies (python -m studies)")

    export = commands.add_parser(
        "export",
        help="write a run as a checkpoint, of Ouro in the public layout",
        description="Weights, configuration, generation settings, tokenizer and chat template, as "
        "transformers and vLLM read them.",
    )
    export.add_argument("run", metavar="RUN", help="run folder, checkpoint, or PEFT adapter")
    export.add_argument("out", metavar="DIR", help="new or empty folder")
    export.add_argument(
        "--step", type=positive, metavar="N", help="checkpoint (default: the newest)"
    )
    export.add_argument(
        "--turns",
        type=positive,
        metavar="N",
        help="turns of the exported model (default: those of the run)",
    )
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: that of the run)",
    )
    export.add_argument(
        "--portable",
        action="store_true",
        help="with the model's code, by which transformers alone opens it (trust_remote_code=True)",
    )
    export.add_argument(
        "--adapter",
        choices=("merge", "keep"),
        default="merge",
        help="LoRA adapters: added to the weights, or written alone as a PEFT adapter that names "
        "its base model (default: merge)",
    )
    export.set_defaults(command=_export)

    commands.add_parser("bench", help="in a clone: what the penalty costs (python -m benchmarks)")

    recipes = commands.add_parser("recipes", help="list the recipes")
    recipes.set_defaults(command=_recipes)
    return parser


def _train(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        print(_train_help())
        return 0
    from stars_fast.base.errors import ConfigError

    overrides = [word for word in words if word != "--resume"]
    if not overrides or overrides[0].startswith("-"):
        raise ConfigError(
            "usage: stars-fast train RECIPE [--resume] [--field value ...]; see stars-fast "
            "recipes and stars-fast train --help"
        )
    from stars_fast.training.config import load_config

    recipe = overrides.pop(0)
    resume = "--resume" in words
    if resume and Path(recipe).parts[:-1] and not Path(recipe).exists():  # no recipe's name
        _check_resume(recipe)
    config = load_config(recipe, overrides)
    if resume:
        _check_resume(config.out)
    # What takes seconds to load comes after the mistakes that need none of it.
    from stars_fast.training.run.trainer import TrainingFailure, train
    from stars_fast.training.scale.allocator import grow_segments
    from stars_fast.training.unread import without_effect

    grow_segments()
    if os.environ.get("RANK", "0") == "0":
        for line in without_effect(recipe, overrides, config):
            print(f"stars-fast: warning: {line}", file=sys.stderr)
    try:
        outcome = train(config, resume=resume)
    except TrainingFailure as error:
        print(f"stars-fast: {error}", file=sys.stderr)
        return 1
    return 128 + outcome.signal if outcome.signal else 0


def _check_resume(path: str) -> None:
    """Raise ConfigError for a folder that holds nothing to continue."""
    from stars_fast.base.errors import ConfigError
    from stars_fast.base.run_folder import RunFolder
    from stars_fast.training.run.folder import nothing_to_resume

    if reason := nothing_to_resume(RunFolder(path)):
        raise ConfigError(reason)


def _train_help() -> str:
    from stars_fast.base import tree
    from stars_fast.data.kinds import kinds
    from stars_fast.models.families import families
    from stars_fast.training.config import config_class
    from stars_fast.training.step.methods import METHODS

    lines = [
        "usage: stars-fast train RECIPE [--resume] [--field value ...]",
        "",
        "RECIPE    a recipe of the package (stars-fast recipes), a YAML file, or a run folder",
        "--resume  continue the run in its folder from its newest checkpoint, bit for bit",
        "          (on a GPU with --train.deterministic true)",
        "",
        "methods:",
        *(f"  {name:12} {method.summary}" for name, method in METHODS.items()),
        "",
        "fields, by dotted path or by their last name where it is unique:",
    ]
    pairs = [(family, kind) for kind in kinds() for family in families()]
    from_data = {f"model.{name}" for each in families().values() for name in each.from_data}
    shown: set[tuple[str, str]] = set()
    for pair in pairs:
        section = None
        for path, field in tree.leaves(config_class(*pair)).items():
            if (path, field.help) in shown:
                continue
            shown.add((path, field.help))
            if path.rpartition(".")[0] != section:
                section = path.rpartition(".")[0]
                lines.append("")
            default = (
                "" if field.default is tree.REQUIRED else f" (default {_shown(field.default)})"
            )
            default = " (default from the data)" if path in from_data else default
            lines.append(f"  --{path} {tree.type_name(field.type)}")
            lines.append(f"      {field.help}{default}".rstrip())
    return "\n".join([*lines, "", _EXAMPLES])


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "empty"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _recipes(args: argparse.Namespace) -> int:
    from stars_fast.training.recipes import read_recipe, recipe_names

    names = recipe_names()
    width = max(map(len, names), default=0)
    for name in names:
        print(f"{name:{width}}  {read_recipe(name).get('description', '')}".rstrip())
    return 0


def _export(args: argparse.Namespace) -> int:
    import torch
    from safetensors import SafetensorError

    from stars_fast.base.errors import ConfigError
    from stars_fast.models.export import export_run

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    try:
        export_run(
            args.run,
            args.out,
            step=args.step,
            turns=args.turns,
            dtype=dtype,
            portable=args.portable,
            adapter=args.adapter,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except (OSError, SafetensorError) as error:
        said = str(error)
        raise ConfigError(said if args.out in said else f"{args.out}: {said}") from error
    print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line: `stars-fast train | plan | eval | lm-eval | analyze | study | export | bench |
recipes | runs | completion`, also `python -m stars_fast`.

Modules load where they are used, so that the help and the list of recipes come at once.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from stars_fast import __version__
from stars_fast.base.exit_code import exit_code
from stars_fast.base.options import Parser, positive

_EXAMPLES = """\
examples:
  stars-fast recipes
  stars-fast train addition-quick
  stars-fast train addition-quick-stars --penalty.weight 0.05 --out runs/weak
  stars-fast train runs/weak --resume
  stars-fast eval runs/weak runs/addition-quick --turns 1,2,4,8,16,32,64,100
  stars-fast analyze runs/weak runs/addition-quick
  stars-fast train ouro-tiny
  stars-fast plan ouro-numina-fast --gpus 4xA800-80GB
  torchrun --nproc-per-node 4 -m stars_fast train ouro-numina
  stars-fast eval runs/ouro-numina --tasks gsm8k,math500,asdiv,svamp,amc23 --turns 2,4,8
  stars-fast eval ByteDance/Ouro-1.4B --text wiki.txt --turns 1,2,4,8,16
  stars-fast export runs/ouro-numina ouro-stars --turns 8 --dtype bfloat16
  stars-fast export runs/ouro-numina-lora ouro-adapter --adapter keep
  stars-fast lm-eval --model stars_fast --model_args pretrained=ouro-stars,turns=8 --tasks gsm8k
"""

_OWN_OPTIONS = {
    "train": "train",
    "plan": "plan",
    "eval": "eval",
    "lm-eval": "lm_eval",
    "analyze": "analyze",
    "recipes": "recipes",
    "runs": "runs",
}
"""Commands whose options are in a module of `stars_fast.commands`."""

_OF_A_CLONE = {"study": "studies", "bench": "benchmarks"}
"""Commands that hand over to what is beside the package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 a failed run, 2 a mistake, 128 + signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(words), " ".join(["stars-fast", *words[:1]]))


def _run(words: list[str]) -> int:
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


def _parser(options: Mapping[str, Parser] | None = None) -> Parser:
    """The whole command line; of a command that reads its own words the given `options`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        "stars-fast",
        description="Train and judge looped language models: those that run one block of layers "
        "again\nand again, and are to keep their answers however often that is.",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def own(name: str, help: str) -> None:
        parents = [options[name]] if options and name in options else []
        commands.add_parser(name, help=help, parents=parents, add_help=not parents)

    own("train", help="train a recipe, or continue a run")
    own("plan", help="predict a run's time and memory on given GPUs, without one")

    own("eval", help="accuracy against turns: runs, checkpoints, lm-eval's tasks")
    own("lm-eval", help="lm-eval's own command line, with the model stars_fast")
    own("analyze", help="how the state moves over the turns, and its Jacobian")
    own("study", help="in a clone: the paper's studies (python -m studies)")

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

    own("bench", help="in a clone: what the penalty costs (python -m benchmarks)")

    own("recipes", help="list the recipes, or show one in full")
    own("runs", help="list runs with settings and results; their curves in one figure")

    completion = commands.add_parser(
        "completion",
        help="print what makes a shell complete all this",
        description='For bash: eval "$(stars-fast completion bash)" in ~/.bashrc; for zsh write it '
        "to a file _stars-fast in $fpath.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(command=_completion)
    return parser


def _completion(args: argparse.Namespace) -> int:
    from stars_fast.commands.completion import options, script

    print(script(_parser(options()), args.shell))
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

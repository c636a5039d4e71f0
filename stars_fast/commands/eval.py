"""`stars-fast eval`: accuracy and loss against turns.

Three kinds of evaluation, each in a module of its own: runs of the addition study, benchmarks
(`--tasks`), plain text (`--text`).
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from stars_fast.base.errors import ConfigError
from stars_fast.base.options import Parser, number_list, positive

ADDITION, TASKS, TEXT = "runs of the addition study", "--tasks", "--text"

_KINDS = {
    "tol": (ADDITION, TASKS),
    "tol_per": (ADDITION, TASKS),
    "batch_size": (TASKS, TEXT),
    "dtype": (TASKS, TEXT),
    "device": (TASKS, TEXT),
    "data": (TASKS,),
    "backend": (TASKS,),
    "no_chat_template": (TASKS,),
    "system": (TASKS,),
    "num_fewshot": (TASKS,),
    "max_new_tokens": (TASKS,),
    "samples": (TASKS,),
    "temperature": (TASKS,),
    "column": (TEXT,),
    "subset": (TEXT,),
    "split": (TEXT,),
    "length": (TEXT,),
}
"""Options that not every kind of evaluation has."""

_EXAMPLES = """\
examples:
  stars-fast eval runs/addition-quick runs/weak --turns 1,2,4,8,16,32,64,100
  stars-fast eval runs/addition-quick --turns 1,2,4,8,16,32 --tol 0.3,0.1,0.03,0.01
  stars-fast eval ByteDance/Ouro-1.4B --tasks gsm8k,math500,asdiv,svamp,amc23 --dtype bfloat16
  stars-fast eval runs/ouro-numina --tasks gsm8k --turns 8 --tol 0,0.1,0.01
  stars-fast eval ouro-stars Qwen/Qwen3-1.7B --tasks gsm8k,amc23 --turns 2,4,8 --samples 8
  stars-fast eval ouro-stars --text wiki.txt --turns 1,2,4,8,16
"""


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        SystemExit, ConfigError: a mistake in the options.
    """
    args = options_of(words)
    kind = TASKS if args.tasks else TEXT if args.text else ADDITION
    _check(args, kind)
    if kind == TASKS:
        from stars_fast.evaluation.sweep import run_sweep
        from stars_fast.evaluation.sweep_options import SweepOptions

        run_sweep(SweepOptions(**_given(args, models=args.runs, turns=args.turns or [1, 2, 4, 8])))
    elif kind == TEXT:
        from stars_fast.commands.eval_text import TextOptions, run_text
        from stars_fast.evaluation.sweep import default_out

        turns = args.turns or [1, 2, 4, 8, 16]
        out = Path(args.out) if args.out else default_out(args.runs[0])
        given = _given(args, models=args.runs, turns=turns)
        given.pop("out", None)
        run_text(TextOptions(**given), out)
    else:
        from stars_fast.commands.eval_addition import run_addition
        from stars_fast.models.adaptive import Per

        turns = args.turns or [1, 2, 4, 8, 16, 32, 64, 100]
        out = Path(args.out or args.runs[0])
        per = [args.tol_per] if args.tol_per else get_args(Per)
        run_addition(args.runs, turns, args.limit or 1000, args.step, out, args.tol or [], per)
    return 0


def parser() -> Parser:
    """The parser of the command's options."""
    parser = Parser(
        "stars-fast eval",
        description="Accuracy at each number of turns, for each model: a table, a JSON file and a\n"
        "figure. Of runs of the addition study it is exact match on unseen samples; of\n"
        "language models (runs, checkpoints, adapters, ids of the hub) benchmarks of\n"
        "lm-eval, or the token loss on a text. A standard model has one row, beside\n"
        "looped ones at each number of turns.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "runs", nargs="+", metavar="DIR",
        help="run folder, or a causal language model of transformers: looped (Ouro, Huginn, looped "
        "decoders) or standard",
    )  # fmt: skip
    add(
        "--turns", type=number_list, metavar="1,2,4",
        help="numbers of turns (default 1,2,4,8,16,32,64,100 for addition, 1,2,4,8 for tasks, "
        "1,2,4,8,16 for a text)",
    )  # fmt: skip
    add(
        "--limit", type=positive, metavar="N",
        help="samples of each task (default all), texts (default all), unseen sums (default 1000)",
    )  # fmt: skip
    add("--step", type=positive, metavar="N", help="checkpoint of a run (default: the newest)")
    add(
        "--tol", type=_tolerances, metavar="0,0.1",
        help="adaptive depth, of runs and in tasks: what changes by at most this in a turn, "
        "relative, takes no further turn; 0 (default) for all turns",
    )  # fmt: skip
    add(
        "--tol-per", choices=("sequence", "token"),
        help="what rests by itself (default sequence in tasks, both for addition)",
    )  # fmt: skip
    add("--out", metavar="DIR", help="folder for what is written (default: in the first DIR)")

    language = parser.add_argument_group("language models")
    add = language.add_argument
    add(
        "--batch-size", type=positive, metavar="N",
        help="sequences in a forward pass (default 16, of texts 8); with vllm, prompts handed over "
        "at once (default 256)",
    )  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's")
    add("--device", help="cpu, cuda, cuda:1, ... (default: the first GPU, or the CPU; not vllm)")

    tasks = parser.add_argument_group("benchmarks")
    add = tasks.add_argument
    add(
        "--tasks", type=_names, metavar="NAMES",
        help="gsm8k, gsm8k-value, math500, asdiv, svamp, amc23, other tasks of lm-eval, or YAML "
        "files of tasks",
    )  # fmt: skip
    add(
        "--max-new-tokens", type=positive, metavar="N",
        help="cap of a generation (default 2048); generations ended by it are counted",
    )  # fmt: skip
    add(
        "--num-fewshot", type=int, metavar="N",
        help="examples in the prompt (default: none for the benchmarks, else the task's own)",
    )  # fmt: skip
    add("--no-chat-template", action="store_true", default=None, help="prompts as plain text")
    add("--system", metavar="TEXT", help="system message of the chats")
    add(
        "--data", metavar="FOLDER",
        help="NAME.jsonl of each task with its data set's columns, instead of the hub",
    )  # fmt: skip
    add(
        "--samples", type=positive, metavar="K",
        help="draw K answers to each prompt, for avg@K and pass@K (default: one greedy answer)",
    )  # fmt: skip
    add("--temperature", type=float, metavar="T", help="of the samples (default 0.6)")
    add(
        "--backend", choices=("native", "vllm", "native,vllm"), metavar="NAME",
        help="native (default), vllm, or native,vllm: vllm where it knows the model, after a "
        "comparison of 20 greedy answers",
    )  # fmt: skip

    text = parser.add_argument_group("token loss")
    add = text.add_argument
    add(
        "--text", metavar="SOURCE",
        help="a .txt file, a .jsonl or .parquet file, or a data set of the hub",
    )  # fmt: skip
    add("--column", metavar="NAME", help="of the text (default text)")
    add("--subset", metavar="NAME", help="the hub's name of a configuration")
    add("--split", metavar="NAME", help="of the data set (default train)")
    add("--length", type=positive, metavar="N", help="tokens of a window (default 2048)")
    return parser


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options as they are given.

    Raises:
        SystemExit: a mistake, or --help.
    """
    known = parser()
    args = known.parse_args(words)
    args.runs = list(dict.fromkeys(args.runs))
    if args.tasks and args.text:
        known.error("--text: not allowed with --tasks")
    return args


def _check(args: argparse.Namespace, kind: str) -> None:
    """Raise ConfigError for an option that the kind of evaluation has not."""
    for name, kinds in _KINDS.items():
        if getattr(args, name) is not None and kind not in kinds:
            raise ConfigError(f"--{name.replace('_', '-')} is an option of {' and '.join(kinds)}")
    if args.tol_per is not None and args.tol is None:
        raise ConfigError(f"--tol-per: expected --tol beside it, got {args.tol_per}")
    for name in ("column", "subset", "split"):
        if kind == TEXT and getattr(args, name) is not None and Path(args.text).suffix == ".txt":
            raise ConfigError(
                f"--{name}: expected none for a .txt file, which has no columns and splits, got "
                f"{getattr(args, name)!r}"
            )


def _given(args: argparse.Namespace, **fields: Any) -> dict[str, Any]:
    """The options that were given, by the names of the fields; the others have their defaults."""
    names = {"tol": "tols", "num_fewshot": "shots", "max_new_tokens": "cap"}
    given = {
        names.get(name, name): value
        for name, value in vars(args).items()
        if value is not None and name not in ("runs", "no_chat_template")
    }
    if args.no_chat_template:
        given["chat"] = False
    return {**given, **fields}


def _names(text: str) -> list[str]:
    parts = (os.path.expanduser(part.strip()) for part in text.split(","))  # or files
    found = list(dict.fromkeys(part for part in parts if part))
    if not found:
        raise argparse.ArgumentTypeError("expected names like gsm8k,math500")
    return found


def _tolerances(text: str) -> list[float]:
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 0,0.1, got {text!r}") from None

"""`stars-fast plan`: time, memory and limit of a run on given GPUs, without one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stars_fast.base.errors import ConfigError
from stars_fast.base.tables import right_aligned
from stars_fast.training.config import load_config
from stars_fast.training.plan.cards import cards, parse_gpus
from stars_fast.training.plan.plan import Plan, Way, plan
from stars_fast.training.plan.rows import DOCUMENT
from stars_fast.training.plan.table import MEMORY_COLUMNS, memory_table
from stars_fast.training.scale.memory import gib

USAGE = """\
usage: stars-fast plan RECIPE --gpus 4xA800-80GB [--document N] [--json] [--field value ...]
       stars-fast plan RECIPE --table [--json] [--field value ...]

Predict the time of a step and of the run, memory, and what limits it; nothing is made or loaded.

RECIPE      a recipe of the package (stars-fast recipes), a YAML file, or a run folder
--gpus      how many of which card: {cards}
--document  mean tokens of a document, where the recipe does not say it (default: {document})
--table     what is recomputed on cards of 80, 48, 40 and 24 GB, by tokens and turns
--json      for programs
--field     any field of the recipe, as for stars-fast train"""


def main(words: Sequence[str]) -> int:
    """Print the plan; returns 0.

    Raises:
        ConfigError: the recipe, a field or the GPUs can't be used.
    """
    words = list(words)
    if not words or "-h" in words or "--help" in words:
        print(USAGE.format(cards=", ".join(cards()), document=DOCUMENT))
        return 0
    as_json, table = _flag(words, "--json"), _flag(words, "--table")
    gpus, document = _option(words, "--gpus"), _option(words, "--document") or str(DOCUMENT)
    if not document.isdecimal() or int(document) < 1:
        raise ConfigError(f"--document: expected a positive number of tokens, got {document!r}")
    if not words or words[0].startswith("-"):
        raise ConfigError("usage: stars-fast plan RECIPE --gpus 4xA800-80GB; see --help")
    config = load_config(words[0], words[1:])
    if table:
        rows = memory_table(config)
        if as_json:
            print(json.dumps([row._asdict() for row in rows]))
        else:
            print(_markdown([MEMORY_COLUMNS, *(row.cells() for row in rows)]))
        return 0
    if gpus is None:
        raise ConfigError(f"--gpus: expected a number and one of {', '.join(cards())}")
    found = plan(config, parse_gpus(gpus), int(document))
    print(json.dumps(found.as_dict()) if as_json else describe(found))
    return 0


def describe(found: Plan) -> str:
    """The plan for people."""
    memory, ours = found.memory, found.ours
    trained = "" if found.trained == found.parameters else f", {_size(found.trained)} trained"
    lines = [
        f"{found.run} on {found.gpus}: predicted, by rates measured on one H200",
        f"model   {found.model}: {_size(found.parameters)} parameters{trained}",
        f"step    {found.rows:,} rows of {found.tokens_a_row:,.0f} tokens "
        f"({found.documents_a_row:,} document{'s' * (found.documents_a_row != 1)} each), "
        f"{found.accumulation} micro-batch{'es' * (found.accumulation != 1)} a GPU, "
        f"{found.turns:.3g} turns on average, {found.most_turns} at most",
        f"time    {_seconds(ours.seconds)} a step: {_shares(ours)}",
        f"limit   {ours.limit}" if memory.fits else "limit   memory: it does not fit",
        f"memory  {gib(round(memory.held + memory.activations))} of {gib(round(memory.total))}: "
        f"{gib(round(memory.held))} weights, gradients, averages and CUDA, "
        f"{gib(round(memory.activations))} activations (budget {gib(round(memory.budget))})",
        f"        at the usual depth {memory.usual}; at the largest {memory.deepest}",
    ]
    if found.no_graphs is None:
        lines.append(f"graphs  {found.captured:.1%} of the micro-batches: no waiting for the host")
    else:
        lines.append(f"graphs  none: {found.no_graphs}")
    if found.row_length is not None:
        lines.append(
            f"        with --data.packing true --data.row_length {found.row_length} the GPU is the "
            "limit"
        )
    if not memory.fits:
        changes = "; ".join(found.fitting) or "none of fewer rows, FSDP, offload and LoRA"
        lines.append(f"        does not fit; would: {changes}")
    if found.steps is not None and found.tokens is not None:
        lines.append(f"run     {found.steps:,} steps, {found.tokens / 1e6:,.1f} M tokens")
    if found.adapted:
        lines.append("host    of adapters by their count of ops, which no GPU has timed")
    return "\n".join([*lines, "", _ways(found)])


def _ways(found: Plan) -> str:
    ways: list[tuple[str, Way | None]] = [
        (f"{found.method}, as the recipe has it", found.ours),
        ("SFT, as we run it", found.sft),
        (f"{found.method}, the published way", found.published),
    ]
    rows = [["", "s a step", "over SFT", "tokens/s a GPU", "MFU", "hours", "limit"]]
    for name, way in ways:
        if way is not None:
            rows.append(
                [
                    name,
                    f"{way.seconds:.3g}",
                    f"{way.seconds / found.sft.seconds:.2f}",
                    f"{way.tokens:,.0f}",
                    f"{way.mfu:.0%}",
                    "" if way.hours is None else f"{way.hours:.3g}",
                    way.limit,
                ]
            )
    return right_aligned(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _shares(way: Way) -> str:
    parts = sorted(way.parts.items(), key=lambda part: -part[1])
    names = {"host": "waiting for the host", "recompute": "recomputation"}
    shown = [(names.get(name, name), each / way.seconds) for name, each in parts]
    return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= 0.005)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def _size(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _flag(words: list[str], name: str) -> bool:
    if name not in words:
        return False
    words.remove(name)
    return True


def _option(words: list[str], name: str) -> Any:
    """The value of an option, which is taken out of the words; None without it."""
    for place, word in enumerate(words):
        given, has_value, value = word.partition("=")
        if given != name:
            continue
        if has_value:
            del words[place]
            return value
        if place + 1 == len(words) or words[place + 1].startswith("--"):
            raise ConfigError(f"{name} needs a value")
        value = words[place + 1]
        del words[place : place + 2]
        return value
    return None

"""`stars-fast eval DIR --text ...`: the token loss of looped and standard models on plain text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import finite, read_text, write_text
from stars_fast.base.tables import right_aligned
from stars_fast.evaluation.loading import device_for, make_folder
from stars_fast.evaluation.report import labels_of
from stars_fast.evaluation.subjects import Subject, find_subject, load_subject, tokenizer_of
from stars_fast.evaluation.text_loss import TextLoss, standard_text_loss, text_loss
from stars_fast.models.saved import ModelSource
from stars_fast.models.standard import StandardModel


@dataclass(frozen=True)
class TextOptions:
    """models: run folders and checkpoints. text: a .txt file, or what `datasets` reads. column,
    subset, split: of it. limit: texts; none for all. length: tokens of a window."""

    models: Sequence[str]
    text: str
    turns: Sequence[int]
    column: str = "text"
    subset: str | None = None
    split: str = "train"
    limit: int | None = None
    length: int = 2048
    batch_size: int = 8
    dtype: str | None = None
    device: str | None = None
    step: int | None = None


def run_text(options: TextOptions, out: Path) -> dict[str, TextLoss]:
    """Evaluate, print a table, and write text-loss.json and text-loss.png to `out`.

    Raises:
        ConfigError: a mistake in the options.
    """
    from stars_fast.base.plots import loss_against_turns

    make_folder(out)
    sources = [find_subject(path, options.step, "--text") for path in options.models]
    names = labels_of({source.path: source.label for source in sources})
    texts = list(itertools.islice(read_texts(options), options.limit))
    found = {names[source.path]: _loss_of(source, texts, options) for source in sources}
    print(_table(found))
    write_text(
        out / "text-loss.json", json.dumps(finite(_written(found, options)), indent=2) + "\n"
    )
    looped = {source.trained for source in sources if isinstance(source, ModelSource)}
    made = [out / "text-loss.json"]
    if looped:
        made.append(out / "text-loss.png")
        loss_against_turns(
            {label: _at_turns(loss) for label, loss in found.items() if None not in loss.nats},
            made[-1],
            title=f"Token loss on {Path(options.text).name}",
            trained_depth=looped.pop() if len(looped) == 1 else None,
            level={label: loss.nats[None] for label, loss in found.items() if None in loss.nats},
        )
    print(f"written: {', '.join(map(str, made))}")
    return found


def _at_turns(loss: TextLoss) -> dict[int, float]:
    return {turns: nats for turns, nats in loss.nats.items() if turns is not None}


def _loss_of(source: Subject, texts: Sequence[str], options: TextOptions) -> TextLoss:
    """One model is in memory at a time."""
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    model = load_subject(source, dtype, device_for(options.device))
    tokenizer = tokenizer_of(source)
    sizes = {"length": options.length, "batch_size": options.batch_size}
    try:
        if isinstance(source, StandardModel):
            return standard_text_loss(model, tokenizer, texts, **sizes)
        return text_loss(model, tokenizer, texts, options.turns, **sizes)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--text {options.text}: {error}") from error


def read_texts(options: TextOptions) -> Iterator[str]:
    """The texts of a .txt file (one), or of the column of a data set.

    Raises:
        ConfigError: they can't be read.
    """
    from stars_fast.data.chat import ChatDataConfig
    from stars_fast.data.sources import find_source

    if Path(options.text).suffix == ".txt":
        try:
            yield read_text(options.text)
        except ValueError as error:
            raise ConfigError(f"cannot read --text {error}") from error
        return
    try:
        where = ChatDataConfig(source=options.text, subset=options.subset, split=options.split)
        rows = find_source(where, seed=0).load()
    except ValueError as error:
        raise ConfigError(f"--text {options.text}: {error}") from error
    if options.column not in rows.column_names:
        raise ConfigError(
            f"--column: expected one of the columns {rows.column_names}, got {options.column!r}"
        )
    for row in rows.select_columns(options.column):
        if not isinstance(row[options.column], str | None):
            raise ConfigError(f"--column: expected text, got {row[options.column]!r:.80}")
        yield row[options.column] or ""


def _written(found: dict[str, TextLoss], options: TextOptions) -> dict[str, Any]:
    from stars_fast.base.machine import describe

    losses = {
        label: {
            "loss": _named(loss.nats),
            "perplexity": _named(loss.perplexity),
            "bits_per_byte": _named(loss.bits_per_byte),
            "tokens": loss.tokens,
            "bytes": loss.size,
        }
        for label, loss in found.items()
    }
    return {
        "machine": describe(device_for(options.device)),
        "options": asdict(options),
        "models": losses,
    }


def _name(turns: int | None) -> str:
    """A number of turns in tables and files."""
    return "-" if turns is None else str(turns)


def _named(by_turns: dict[int | None, float]) -> dict[str, float]:
    return {_name(turns): value for turns, value in by_turns.items()}


def _table(found: dict[str, TextLoss]) -> str:
    rows = [["model", "turns", "loss (nats)", "perplexity", "bits per byte", "tokens"]]
    rows += [
        [
            label,
            _name(turns),
            f"{nats:.4f}",
            f"{loss.perplexity[turns]:.4g}",
            f"{loss.bits_per_byte[turns]:.4f}",
            f"{loss.tokens:,}",
        ]
        for label, loss in found.items()
        for turns, nats in loss.nats.items()
    ]
    return right_aligned(rows)

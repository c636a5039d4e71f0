"""Subjects of an analysis: a model of a run or checkpoint, and the samples it is watched on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import read_text
from stars_fast.base.plots import TrainedDepth
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.batches import MicroBatch, Source, micro_batch, to_device
from stars_fast.data.documents import PaddedChats, TokenDocuments
from stars_fast.data.sources import READERS
from stars_fast.evaluation.addition import evaluate
from stars_fast.evaluation.run_data import data_of, open_data
from stars_fast.models.families import checkpoint_config, family_of
from stars_fast.models.loop import Loop
from stars_fast.models.saved import find_model, load_model, load_tokenizer

Document = tuple[np.ndarray, np.ndarray]
"""Tokens [S] and, for each, whether it is to be predicted, [S] bool."""


@dataclass(frozen=True)
class Request:
    """Which samples to look at.

    samples: how many. length: tokens kept of each document. batch: samples at once.
    text: file or hub id of samples, instead of what the run holds out.
    step: checkpoint of a run; the newest if None.
    """

    samples: int = 32
    length: int = 256
    batch: int = 16
    text: str | None = None
    step: int | None = None
    device: torch.device | str = "cpu"


@dataclass(frozen=True)
class Subject:
    """A model that is yet to be loaded, and the samples it is watched on, on their device.

    source: run folder, checkpoint or hub id, as given.
    name: of the run, or of the checkpoint.
    what: the model, the data and the step, for people.
    load: gives the model, in fp32, in evaluation mode and without gradients of its weights. Nothing
        here keeps it, so that of several subjects one at a time is in memory.
    batches: the samples, padded on the right.
    trained: the turns of the training.
    accuracy: exact match of the model at each of some numbers of turns; None where token loss is
        what it is judged by.
    """

    source: str
    name: str
    what: str
    load: Callable[[], Loop]
    batches: list[MicroBatch]
    trained: TrainedDepth
    accuracy: Callable[[Loop, Sequence[int]], dict[int, float]] | None = None

    @property
    def samples(self) -> int:
        return sum(batch.samples.count for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Real ones."""
        return sum(batch.real_tokens for batch in self.batches)


def find_subject(source: str, request: Request) -> Subject:
    """The model of a run folder, of a checkpoint folder or of the hub.

    Raises:
        ConfigError: there is no such model, or no samples for it.
    """
    if request.text is None and not RunFolder(source).config.exists():
        family_of(source)
        raise ConfigError(
            f"{source} is no run folder; for a checkpoint or a hub id give samples with --text"
        )
    found = find_model(source, request.step)
    exact = found.step is not None and data_of(found)[0].exact_match
    if request.text is None:
        data = open_data(found)
        held_out, what = data.held_out, f"held-out {data.unit}"
        if held_out is None:
            raise ConfigError(f"{source} holds out no validation data: give samples with --text")
        if isinstance(held_out, PaddedChats):
            held_out, what = _cut_documents(held_out, request), _cut_to(what, request)
        else:
            what = f"unseen {data.unit}"
    else:
        if exact:
            raise ConfigError(
                f"--text is for models of text; {source} is a run of sums, which is watched on its "
                "unseen sums"
            )
        tokenizer = load_tokenizer(found)
        documents = TokenDocuments(_texts(request.text, tokenizer, request))
        held_out = PaddedChats(documents, tokenizer.pad_token_id or 0)
        what = _cut_to(f"texts of {request.text}", request)
    count = min(request.samples, len(held_out))
    samples = held_out

    def accuracy(loop: Loop, turns: Sequence[int]) -> dict[int, float]:
        return evaluate(loop, samples, turns)

    where = "checkpoint" if found.step is None else f"step {found.step}"
    trained = found.trained
    if found.step is None:
        trained = found.family.turns_of(checkpoint_config(found.checkpoint))
    return Subject(
        source=source,
        name=found.label,
        what=f"{where}, {count} {what}",
        load=lambda: _frozen(
            found.family.loop(load_model(found, torch.float32, str(request.device)))
        ),
        batches=_batches(samples, count, request),
        trained=trained or 1,
        accuracy=accuracy if exact else None,
    )


def _cut_to(what: str, request: Request) -> str:
    return f"{what}, of each at most {request.length} tokens"


def _cut_documents(padded: PaddedChats, request: Request) -> PaddedChats:
    chats = padded.chats
    documents = _cut((chats.document(i) for i in range(len(chats))), request)
    return PaddedChats(TokenDocuments(documents), padded.pad)


def _texts(text: str, tokenizer: Any, request: Request) -> list[Document]:
    """The first samples of a file: the paragraphs of a text, or the rows of what `data.source`
    of a run can be, by their column `text` or as chats."""
    path = Path(text)
    if path.suffix == ".txt" or (path.is_file() and path.suffix not in READERS):
        try:
            paragraphs = re.split(r"\n\s*\n", read_text(path))
        except ValueError as error:
            raise ConfigError(f"cannot read --text {error}") from error
        return _cut(_plain(paragraphs, tokenizer), request)
    from stars_fast.data.chat import ChatDataConfig, ChatEncoder
    from stars_fast.data.sources import conversation, find_columns, find_source

    config = ChatDataConfig(source=text, max_length=request.length)
    try:
        rows = find_source(config, 0).load()
        if "text" in rows.column_names:
            return _cut(_plain((row["text"] for row in rows), tokenizer), request)
        columns = find_columns(config, rows)
        encoder = ChatEncoder(tokenizer, max_length=request.length)
        read = (conversation(row, columns).messages for row in rows)
        chats = (chat for chat in read if chat is not None)
        return _cut((encoder.encode([chat])[0][:2] for chat in chats), request)
    except ValueError as error:
        raise ConfigError(f"--text {text}: {error}") from error


def _plain(texts: Iterable[str | None], tokenizer: Any) -> Iterable[Document]:
    for text in texts:
        if text and text.strip():
            tokens = np.array(tokenizer(text.strip(), add_special_tokens=False)["input_ids"])
            yield tokens, np.arange(len(tokens)) > 0


def _cut(documents: Iterable[Document], request: Request) -> list[Document]:
    """The first samples that have a token to predict, cut off on the right.

    Raises:
        ConfigError: none has.
    """
    kept: list[Document] = []
    for tokens, targets in documents:
        if len(kept) == request.samples:
            break
        tokens, targets = tokens[: request.length], targets[: request.length]
        if targets[1:].any():
            kept.append((tokens, targets))
    if not kept:
        raise ConfigError(
            f"no samples: no text has a token to predict within its first {request.length} tokens"
        )
    return kept


def _frozen(loop: Loop) -> Loop:
    """Without gradients of the weights no backward pass keeps what only they need."""
    return loop.eval().requires_grad_(False)


def _batches(source: Source, count: int, request: Request) -> list[MicroBatch]:
    starts = range(0, count, request.batch)
    units = (np.arange(start, min(start + request.batch, count)) for start in starts)
    device = torch.device(request.device)
    return [to_device(micro_batch(source, each), device) for each in units]

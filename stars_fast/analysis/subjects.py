"""What an analysis looks at: a model of a run or a checkpoint, and the samples it is watched on."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import read_text
from stars_fast.base.optional import need
from stars_fast.base.plots import TrainedDepth
from stars_fast.base.run_folder import RunFolder
from stars_fast.base.seeds import derive
from stars_fast.data.addition import AdditionData
from stars_fast.data.batches import HostBatch, MicroBatch, Source, micro_batch, to_device
from stars_fast.data.sources import READERS
from stars_fast.evaluation.addition import evaluate
from stars_fast.models.families.looped_lm import LoopedLoop
from stars_fast.models.folders import check_exists, check_folder
from stars_fast.models.loop import Loop
from stars_fast.tokens import padded_tokens
from stars_fast.training.addition import Sums, load_model
from stars_fast.training.config import load_config

Document = tuple[np.ndarray, np.ndarray]
"""Tokens [S] and, for each, whether it is to be predicted, [S] bool."""


@dataclass(frozen=True)
class Request:
    """Which samples to look at.

    samples: how many. length: tokens kept of each (of an Ouro's). batch: samples at once.
    text: file or hub id of the samples of an Ouro, instead of its validation data.
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
    """The model of a run folder, an Ouro checkpoint in the public layout or one of the hub.

    Raises ConfigError if there is no such model, or no samples for it.
    """
    folder = RunFolder(source)
    config = load_config(str(folder.config)) if folder.config.exists() else None
    if config is not None and config.task == "addition":
        return _addition_run(source, config, request)
    if config is None:
        try:
            check_exists(source)
            check_folder(source)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return _ouro(source, config, request)


# -- the addition study


def _addition_run(source: str, config: Any, request: Request) -> Subject:
    if request.text is not None:
        raise ConfigError(
            f"--text is for Ouro; {source} is a run of the addition study, which is watched on its "
            "unseen sums"
        )
    checkpoint = RunFolder(source).checkpoint(request.step)
    try:
        data = AdditionData(config.data)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{source}: data: {error}") from error
    count = min(request.samples, len(data.test))
    step = int(checkpoint.name.removeprefix("step-"))

    def load() -> Loop:
        return _frozen(LoopedLoop(load_model(source, step)[0]).float().to(request.device))

    def accuracy(loop: Loop, turns: Sequence[int]) -> dict[int, float]:
        assert isinstance(loop, LoopedLoop)
        return evaluate(loop.model, data, turns)

    return Subject(
        source=source,
        name=config.name,
        what=f"step {step}, {count} unseen {config.data.digits}-digit sums",
        load=load,
        batches=_batches(Unseen(data), count, request),
        trained=config.trained_turns,
        accuracy=accuracy,
    )


class Unseen(Sums):
    """The unseen sums as a source of batches."""

    def __len__(self) -> int:
        return len(self.data.test)

    def batch(self, units: np.ndarray) -> HostBatch:
        tokens, targets, mask = self.data.batch("test", torch.from_numpy(units))
        return HostBatch(tokens, targets, padded_tokens(mask))


# -- Ouro


def _ouro(source: str, config: Any, request: Request) -> Subject:
    """A run with its configuration, or a checkpoint without one."""
    need("transformers", "Ouro models")
    from stars_fast.data.documents import PaddedChats
    from stars_fast.models.families.ouro import OuroLoop
    from stars_fast.models.ouro.config import OuroConfig
    from stars_fast.models.saved import find_model, load_model, load_tokenizer

    if request.text is None and config is None:
        raise ConfigError(
            f"{source} is no run folder; for a checkpoint or a hub id give samples with --text"
        )
    if request.text is None and not config.data.validation:
        raise ConfigError(f"{source} holds out no validation data: give samples with --text")
    found = find_model(source, request.step)
    tokenizer = load_tokenizer(found)
    if request.text is None:
        documents, data = _validation(source, config, tokenizer, request), "validation chats"
    else:
        documents, data = _texts(request.text, tokenizer, request), f"texts of {request.text}"
    if config is None:
        trained = OuroConfig.from_pretrained(source).total_ut_steps
    else:
        trained = config.trained_turns
    where = "checkpoint" if found.step is None else f"step {found.step}"
    chats = PaddedChats(DocumentsInMemory(documents), tokenizer.pad_token_id or 0)
    return Subject(
        source=source,
        name=found.label,
        what=f"{where}, {len(documents)} {data}, of each at most {request.length} tokens",
        load=lambda: _frozen(OuroLoop(load_model(found, torch.float32, str(request.device)))),
        batches=_batches(chats, len(documents), request),
        trained=trained,
    )


def _validation(source: str, config: Any, tokenizer: Any, request: Request) -> list[Document]:
    from stars_fast.data.tokenised import load_chats

    seed = derive(config.seed, "data") % 2**32
    try:
        chats = load_chats(config.data, tokenizer, seed, quiet=True)[1]
    except (ValueError, OSError) as error:
        raise ConfigError(f"{source}: {error}") from error
    assert chats is not None
    return _cut((chats.document(i) for i in range(len(chats))), request)


class DocumentsInMemory:
    """Tokenised texts in memory, as a source of padded batches takes them."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens, _ in self.documents])

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, index: int) -> Document:
        return self.documents[index]

    def fingerprint(self) -> int:
        return zlib.crc32(b"".join(tokens.tobytes() for tokens, _ in self.documents))


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
        chats = (chat for row in rows if (chat := conversation(row, columns)) is not None)
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

    Raises ConfigError if none has."""
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


# -- both


def _frozen(loop: Loop) -> Loop:
    """Without gradients of the weights no backward pass keeps what only they need."""
    return loop.eval().requires_grad_(False)


def _batches(source: Source, count: int, request: Request) -> list[MicroBatch]:
    starts = range(0, count, request.batch)
    units = (np.arange(start, min(start + request.batch, count)) for start in starts)
    device = torch.device(request.device)
    return [to_device(micro_batch(source, each), device) for each in units]

"""Tokenised chats: made once, in parallel, and read from disk from then on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from stars_fast.base.checks import check_integer
from stars_fast.base.files import sync, write_text
from stars_fast.base.optional import need
from stars_fast.data.chat import ChatDataConfig, ChatEncoder
from stars_fast.data.messages import NO_TEXT
from stars_fast.data.sources import (
    Source,
    conversations,
    find_columns,
    find_source,
    usable_rows,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT = 3
"""Raised whenever the same chats would give other files."""

_UNFINISHED = re.compile(r"([0-9a-f]{32})\.\w{8}")
"""Names of folders that `_build` works in: a key, and what `tempfile` adds."""

ROWS_PER_WORKER = 500
"""A process is not worth its start for fewer."""

_ARRAYS = {"tokens": np.int32, "targets": np.bool_, "offsets": np.int64, "target_counts": np.int64}

_PIECE = 2**22
"""Elements that are summed up at a time."""


@dataclass(frozen=True)
class ChatInfo:
    """Counts of what became of the rows of a split."""

    source_rows: int
    """Rows of the source."""
    null_rows: int
    """Those of them without a conversation: null, or a blank prompt or answer."""
    dropped: dict[str, int]
    """Those of them that say something outside the contents of their messages, by what it is."""
    unread: list[str]
    """Columns, and keys of messages, that nothing depends on."""
    rows: int
    """Rows drawn for this split."""
    without_target: int
    """Those dropped: nothing to predict is left, such as after truncation in the prompt."""
    truncated: int
    """Documents that are cut off on the right."""
    documents: int
    tokens: int
    targets: int

    def __str__(self) -> str:
        return (
            f"{self.documents:,} chats, {self.tokens:,} tokens, {self.targets:,} of them targets; "
            f"{self.truncated:,} truncated, {self.without_target:,} of {self.rows:,} rows dropped "
            f"without target, "
            + _left_out(self.source_rows, self.null_rows, self.dropped)
            + (f"; not read: {', '.join(self.unread)}" if self.unread else "")
        )

    @property
    def warning(self) -> str | None:
        """A line where most rows are not trained on; None where most are."""
        unusable = self.null_rows + sum(self.dropped.values())
        advice = "is the text in other columns (data.messages, or data.prompt and data.answer)?"
        lost, rows = unusable, self.source_rows
        if self.dropped and max(self.dropped.values()) > self.null_rows:
            advice = "they say something outside the contents of their messages"
        if 2 * unusable <= self.source_rows:
            advice = (
                "they are cut off before an answer, or no message has the role assistant: is "
                "data.max_length too short?"
            )
            lost, rows = self.without_target, self.rows
        if 2 * lost <= rows:
            return None
        return f"most rows are not trained on, {lost:,} of {rows:,}: {advice}"


def _left_out(rows: int, null_rows: int, dropped: Mapping[str, int]) -> str:
    """The rows of a source that have no conversation, for people."""
    others = ", ".join(f"{count:,} for {reason}" for reason, count in dropped.items())
    said = f"{null_rows:,} of the source's {rows:,} without text"
    if not others:
        return said
    return f"{said}, {others} (what is outside the contents of messages is not trained on)"


class TokenisedChats:
    """A split of N documents, mapped from the files of `folder`.

    `tokens` [total] int32 and `targets` [total] bool are the documents one after the other, of
    which document i is at `offsets[i]:offsets[i + 1]` ([N + 1] int64). A token is a target if it is
    to be predicted from those before it; the first of a document never is. `target_counts` [N]
    int64 says how many targets each document has, at least one; `info` counts what was dropped.

    Raises:
        ValueError, OSError: files are missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.info = _read_info(self.folder / "info.json")
        sizes = {
            "tokens": self.info.tokens,
            "targets": self.info.tokens,
            "offsets": self.info.documents + 1,
            "target_counts": self.info.documents,
        }
        arrays = {
            name: _map(_path(self.folder, name), kind, sizes[name])
            for name, kind in _ARRAYS.items()
        }
        self.tokens, self.targets = arrays["tokens"], arrays["targets"]
        self.offsets, self.target_counts = arrays["offsets"], arrays["target_counts"]
        if (
            (self.offsets[0], self.offsets[-1]) != (0, self.info.tokens)
            or self.lengths.min() < 1
            or self.target_counts.min() < 1
            or self.target_counts.sum() != self.info.targets
        ):
            raise ValueError(f"{self.folder}: offsets and counts don't fit each other")

    def __len__(self) -> int:
        return self.info.documents

    def __reduce__(self) -> tuple[type[TokenisedChats], tuple[Path]]:
        return TokenisedChats, (self.folder,)  # another process maps the files, too

    def fingerprint(self) -> int:
        """A checksum of tokens and targets; it reads them all."""
        value = zlib.crc32(self.offsets.data)
        for array in (self.tokens, self.targets):
            for start in range(0, len(array), _PIECE):
                value = zlib.crc32(array[start : start + _PIECE].data, value)
        return value

    def largest_token(self) -> int:
        """The largest id of a token; it reads them all."""
        pieces = range(0, len(self.tokens), _PIECE)
        return max(int(self.tokens[start : start + _PIECE].max()) for start in pieces)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document: [N] int64."""
        return np.diff(self.offsets)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens [S] int32 and targets [S] bool of a document, read-only."""
        if not 0 <= index < len(self):
            raise IndexError(f"index: expected a value in 0..{len(self) - 1}, got {index}")
        place = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[place], self.targets[place]


def load_chats(
    config: ChatDataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, quiet: bool = False
) -> tuple[TokenisedChats, TokenisedChats | None]:
    """The training and the validation split; the latter None if `config.validation` is 0.

    Rows without a conversation are dropped, then the validation rows and the training rows are
    drawn by `seed`, without a common row. The validation rows don't depend on the number of
    training rows.

    The first call tokenises and writes the cache; others with the same source, tokenizer, settings
    and seed only open it, and load no source except to look up the hub's version of it. Several
    processes may call at once.

    Args:
        config: what to load.
        tokenizer: a fast one of transformers.
        seed: of the rows that are drawn, and of the chats of tiny-chat; 0 or more.
        quiet: no progress bars.

    Raises:
        ValueError: that names the field, for a source or a column that can't be used, or a
            tokenizer or template that can't; a split without a single target.
    """
    check_integer("seed", seed, 0)
    encoder = ChatEncoder(
        tokenizer,
        system=config.system,
        max_length=config.max_length,
        supervise=config.supervise,
    )
    with _bars(quiet):
        source = find_source(config, seed)
        folder = _cache(config) / _key(config, encoder, source, seed)
        splits = _open(folder, config)
        _sweep(folder.parent)
        if splits is None:
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(f"{folder}.lock"):  # one process builds, the others wait for it
                    splits = _open(folder, config) or _build(folder, config, encoder, source, seed)
            except OSError as error:  # of pyarrow it has no number and no file
                raise ValueError(
                    f"data.cache: can't write the tokens to {folder.parent}: {error}"
                ) from error
    return splits


Splits = tuple[TokenisedChats, TokenisedChats | None]
"""Training and validation."""


class EncodeRows:
    """Rows of a source -> rows of tokens and targets, for `Dataset.map`; a chat without a target
    has no tokens either."""

    def __init__(self, encoder: ChatEncoder, columns: Sequence[str]) -> None:
        self.encoder, self.columns = encoder, columns

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "targets", "count", "truncated")
        }
        read = conversations(batch, self.columns)
        chats = (chat.messages for chat in read if chat.messages is not None)
        for tokens, targets, truncated in self.encoder.encode(chats):
            kept = slice(None if targets.any() else 0)
            rows["tokens"].append(tokens[kept])
            rows["targets"].append(targets[kept].view(np.int8))
            rows["count"].append(int(targets.sum()))
            rows["truncated"].append(truncated)
        return rows


def _build(
    folder: Path, config: ChatDataConfig, encoder: ChatEncoder, source: Source, seed: int
) -> Splits:
    """Make the new `folder`, under another name until it is whole.

    The rows on the way lie beside it, and go last: a network file system does not remove a folder
    with a file that is still mapped. What it leaves then, `_sweep` removes.
    """
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as name:
        new = Path(name) / "splits"
        new.mkdir()
        _write_splits(new, Path(name), config, encoder, source, seed)
        if folder.exists():  # damaged
            shutil.rmtree(folder)
        new.rename(folder)
        sync(folder.parent)
    return _splits(folder, config)


def _sweep(cache: Path) -> None:
    """Remove what processes that died while they tokenised have left in the cache, and nothing
    else: the folder may be one in which users keep their own."""
    for left in cache.glob("*.*"):
        match = _UNFINISHED.fullmatch(left.name)
        # Where its builder is at work it is locked; another process may remove it too
        with suppress(Timeout, OSError):
            if match and left.is_dir():
                with FileLock(cache / f"{match[1]}.lock", timeout=0):
                    shutil.rmtree(left)


def _write_splits(
    folder: Path,
    scratch: Path,
    config: ChatDataConfig,
    encoder: ChatEncoder,
    source: Source,
    seed: int,
) -> None:
    """Write the splits to `folder`, with rows on the way in `scratch`."""
    rows = source.load()
    columns = find_columns(config, rows)
    usable, dropped, unread = usable_rows(rows, columns)
    null_rows = dropped.pop(NO_TEXT, 0)
    left_out = _left_out(len(rows), null_rows, dropped)
    if not len(usable):
        raise ValueError(f"data.source: expected a conversation at least, got none: {left_out}")
    if len(usable) <= config.validation:
        raise ValueError(
            f"data.validation must leave rows to train on, got {config.validation} of "
            f"{len(usable)} usable rows of {len(rows)}: {left_out}"
        )
    counts = {
        "source_rows": len(rows),
        "null_rows": null_rows,
        "dropped": dropped,
        "unread": [*(name for name in rows.column_names if name not in columns), *unread],
    }
    drawn = np.random.default_rng(seed).permutation(usable)
    for split, first, count in (
        ("validation", 0, config.validation),
        ("train", config.validation, config.samples or len(usable)),
    ):
        chosen = np.sort(drawn[first : first + count])  # in the order of the file: quick to read
        if len(chosen):
            encode = EncodeRows(encoder, columns)
            encoded = _encode(
                rows.select(chosen), encode, config.workers, scratch / f"{split}-rows"
            )
            _write(folder / split, encoded, counts | {"rows": len(chosen)})


def _encode(rows: Dataset, encode: EncodeRows, workers: int | None, folder: Path) -> Dataset:
    """`rows` encoded, in the files of the new `folder`."""
    datasets = need("datasets", "chats")
    folder.mkdir()
    processes = min(workers or _cores(), len(rows) // ROWS_PER_WORKER)
    features = {
        "tokens": [datasets.Value("int32")],
        "targets": [datasets.Value("int8")],
        "count": datasets.Value("int64"),
        "truncated": datasets.Value("bool"),
    }
    return rows.map(
        encode,
        batched=True,
        batch_size=200,
        remove_columns=rows.column_names,
        features=datasets.Features(features),
        num_proc=processes if processes > 1 else None,
        cache_file_name=str(folder / "rows.arrow"),
        new_fingerprint=folder.name,  # without it, the tokenizer would be hashed
        desc="tokenise",
    )


def _write(folder: Path, rows: Dataset, counted: Mapping[str, Any]) -> None:
    """Write the arrays and the info of the encoded `rows` that have a target."""
    folder.mkdir()
    parts = []
    with _path(folder, "tokens").open("wb") as tokens, _path(folder, "targets").open("wb") as marks:
        for table in rows.with_format("arrow").iter(batch_size=1000):
            for name, file in (("tokens", tokens), ("targets", marks)):
                file.write(table[name].combine_chunks().flatten().to_numpy().data)
            lengths = table["tokens"].combine_chunks().value_lengths()
            parts.append([lengths, table["count"], table["truncated"]])
    lengths, counts, truncated = (
        np.concatenate([np.asarray(part) for part in column]) for column in zip(*parts, strict=True)
    )
    kept = counts > 0
    info = ChatInfo(
        **counted,
        without_target=int((~kept).sum()),
        truncated=int(truncated[kept].sum()),
        documents=int(kept.sum()),
        tokens=int(lengths.sum()),
        targets=int(counts.sum()),
    )
    if not info.documents:
        raise ValueError(f"data.source: no row for {folder.name} has a token to predict: {info}")
    offsets = np.concatenate([[0], np.cumsum(lengths[kept], dtype=np.int64)])
    offsets.astype(_ARRAYS["offsets"]).tofile(_path(folder, "offsets"))
    counts[kept].astype(_ARRAYS["target_counts"]).tofile(_path(folder, "target_counts"))
    for name in _ARRAYS:
        sync(_path(folder, name))
    write_text(folder / "info.json", json.dumps(asdict(info), indent=2) + "\n")
    sync(folder)


def _open(folder: Path, config: ChatDataConfig) -> Splits | None:
    """The splits in `folder`; None if it is not there or, with a warning, damaged."""
    if not folder.exists():
        return None
    try:
        return _splits(folder, config)
    except (OSError, ValueError) as error:
        warnings.warn(f"the cached chats are damaged and made anew: {error}", stacklevel=3)
        return None


def _splits(folder: Path, config: ChatDataConfig) -> Splits:
    validation = TokenisedChats(folder / "validation") if config.validation else None
    return TokenisedChats(folder / "train"), validation


def _read_info(path: Path) -> ChatInfo:
    try:
        return ChatInfo(**json.loads(path.read_text(encoding="utf-8")))
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def _map(path: Path, kind: type, size: int) -> np.ndarray:
    if path.stat().st_size != size * np.dtype(kind).itemsize:
        raise ValueError(f"{path}: expected {size} of {np.dtype(kind)}")
    return np.memmap(path, kind, "r", shape=(size,))


def _path(folder: Path, array: str) -> Path:
    return folder / f"{array}.bin"


def _key(config: ChatDataConfig, encoder: ChatEncoder, source: Source, seed: int) -> str:
    """A hash of all that the files depend on."""
    content = json.loads(encoder.tokenizer.backend_tokenizer.to_str())
    content |= {"truncation": None, "padding": None}  # set by calls, without effect on ours
    # Without the fields that leave the files as they are; the source's identity stands for it.
    without = ("source", "kind", "packing", "row_length", "workers", "cache")
    settings = {name: value for name, value in asdict(config).items() if name not in without}
    parts = [
        FORMAT,
        settings,
        seed,
        source.identity,
        content,
        encoder.template,
        encoder.end_ids,
        {name: str(token) for name, token in encoder.tokenizer.special_tokens_map.items()},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _cache(config: ChatDataConfig) -> Path:
    chosen = config.cache or os.environ.get("STARS_FAST_CACHE") or "~/.cache/stars_fast"
    return Path(chosen).expanduser() / "chats"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _bars(quiet: bool) -> Iterator[None]:
    """Without the progress bars of `datasets` if `quiet`."""
    datasets = need("datasets", "chats")
    if not quiet or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
